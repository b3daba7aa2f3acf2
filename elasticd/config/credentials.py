"""Credentials: tokens, certificates and passwords, read from the files that the configuration names.

    known = credentials(config.security)      its own token, and how it checks the coordinator's certificate
    secret(path, "[etcd] password_file")      the one line of a file that others may not read

A secret comes from a file or the environment. It is in no `repr`, in no message and in no log.
"""

from __future__ import annotations

import os
import re
import ssl
import stat
from dataclasses import dataclass, field

from elasticd.config.security import SecuritySection
from elasticd.config.tree import ConfigError

#: A client's token, instead of `[security] token_file`.
TOKEN_VARIABLE = "ELASTICD_TOKEN"
#: Characters of the shortest token: 96 bits, where they are drawn at random.
SHORTEST = 16
_REMEDY = "write one with: openssl rand -hex 32"


@dataclass(frozen=True, kw_only=True, slots=True)
class Credentials:
    """A client's token and TLS; either may be None. A context that is there makes TLS a must."""

    token: str | None = field(default=None, repr=False)
    context: ssl.SSLContext | None = None

    def headers(self) -> dict[str, str]:
        """Of a request, or of a WebSocket's handshake."""
        return {"Authorization": f"Bearer {self.token}"} if self.token else {}

    def verifying(self) -> ssl.SSLContext:
        """By which an HTTP client judges a server's certificate. Without TLS it trusts nobody: an HTTP
        client reads all certificates of the system otherwise, which takes 60 ms."""
        return self.context if self.context is not None else ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)

    def objection(self, url: str) -> str:
        """Why nothing is sent to this coordinator, or nothing: what is said in the open, others hear."""
        if self.context is not None and url.startswith("http:"):
            return (
                f"the coordinator at {url} speaks no TLS, but [security] ca is set here: give cert and key in "
                "its section [security], or drop ca here"
            )
        if self.context is None and url.startswith("https:"):
            return (
                f"the coordinator at {url} speaks TLS: set ca in section [security] to the file that signed "
                "its certificate"
            )
        return ""


def credentials(section: SecuritySection) -> Credentials:
    """A client's. Reads the files at each call, so that a token can be replaced while running. Raises
    ConfigError."""
    token = os.environ.get(TOKEN_VARIABLE) or None
    if token is not None:
        check_token(token, f"${TOKEN_VARIABLE}")
    elif section.token_file is not None:
        token = secret(section.token_file, "[security] token_file")
        check_token(token, f"[security] token_file {section.token_file}")
    return Credentials(token=token, context=_client_context(section))


def of_another(section: SecuritySection, token: str | None) -> Credentials:
    """Somebody else's, in whose name a request is passed on: his token, and our trust in the coordinator. Our
    own token and certificate are not in it. Raises ConfigError."""
    return Credentials(token=token, context=_client_context(section, shown=False))


def secret(path: str, key: str) -> str:
    """The one line in the file at `path`, which the configuration's `key` names. Raises ConfigError."""
    lines = [line.strip() for line in private_text(path, key).splitlines() if line.strip()]
    if len(lines) != 1:
        raise ConfigError(f"{key} {path} has {len(lines)} lines: it must hold the secret alone, in one line")
    return lines[0]


def private_text(path: str, key: str) -> str:
    """The text of a file that holds secrets. Raises ConfigError, also where everybody may read it."""
    try:
        with open(os.path.expanduser(path), encoding="utf-8") as file:
            mode = os.fstat(file.fileno()).st_mode
            text = file.read(1 << 20)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text in UTF-8"
        raise ConfigError(
            f"{key} {path} cannot be read ({reason}): name a file that this user may read"
        ) from None
    if mode & stat.S_IRWXO:
        raise ConfigError(f"{key} {path} is open to everybody: chmod o= {path}")
    return text


def check_token(token: str, where: str) -> None:
    """Raises ConfigError without the token in it."""
    if len(token) < SHORTEST or not re.fullmatch(r"[A-Za-z0-9._~+/=-]+", token):
        raise ConfigError(
            f"{where}: a token has {SHORTEST} or more letters, digits and ._~+/=- without spaces; {_REMEDY}"
        )


def server_context(section: SecuritySection) -> ssl.SSLContext | None:
    """The TLS context of the coordinator's port; None without a certificate. Raises ConfigError."""
    if section.cert is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    load_pair(context, section)
    if section.client_ca is not None:
        # Not required by the handshake: who shows none needs a token, and probes of /livez have neither.
        context.verify_mode = ssl.CERT_OPTIONAL
        _trust(context, section.client_ca, "client_ca")
    return context


def load_pair(context: ssl.SSLContext, section: SecuritySection) -> None:
    """The certificate and key as they are in their files now; connections from now on show them."""
    assert section.cert is not None, "the section was checked"
    assert section.key is not None, "the section was checked"
    _chain(context, section.cert, section.key, "cert and key")


def _client_context(section: SecuritySection, *, shown: bool = True) -> ssl.SSLContext | None:
    """`shown`: whether our certificate is shown to the coordinator."""
    if section.ca is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    _trust(context, section.ca, "ca")
    if shown and section.client_cert is not None and section.client_key is not None:
        _chain(context, section.client_cert, section.client_key, "client_cert and client_key")
    return context


def _trust(context: ssl.SSLContext, ca: str, key: str) -> None:
    try:
        context.load_verify_locations(cafile=os.path.expanduser(ca))
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(
            f"[security] {key} = {ca!r} cannot be used ({_error_text(error)}): name a PEM file of certificates"
        ) from None


def _chain(context: ssl.SSLContext, cert: str, key: str, keys: str) -> None:
    private_text(key, f"[security] {keys.rpartition(' ')[2]}")
    try:
        # Without a password at hand: a key that has one would be asked for at the terminal.
        context.load_cert_chain(os.path.expanduser(cert), os.path.expanduser(key), password="")
    except (OSError, ssl.SSLError, ValueError) as error:
        raise ConfigError(
            f"[security] {keys} cannot be used ({cert}, {key}: {_error_text(error)}): name a certificate "
            "and its private key, both PEM, the key without a password"
        ) from None


def _error_text(error: Exception) -> str:
    if isinstance(error, ssl.SSLError):
        return error.reason or "it is not PEM"
    return error.strerror or str(error) if isinstance(error, OSError) else str(error)
