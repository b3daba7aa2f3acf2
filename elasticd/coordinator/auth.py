"""Authentication and permission of requests: tokens and certificates against roles. No IO after `read`.

A file of tokens has one a line, with a name before it or without: `alice 5c1f...`. In the file of agents a name
is a node's, and its token speaks for that node alone. A certificate says both itself: its organizational unit
(OU) is the role, its common name (CN) the name.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from elasticd.config.credentials import check_token, private_text
from elasticd.config.security import Role, SecuritySection
from elasticd.config.tree import ConfigError
from elasticd.system.certificates import revoked_serials

#: Paths that everybody may ask for: they say that a coordinator is there, and no more.
OPEN = ("/livez", "/readyz")
#: What only operators may read: it costs the leader time and memory as long as it lasts.
COSTLY = ("/v1/record",)


@dataclass(frozen=True, kw_only=True, slots=True)
class Caller:
    """The sender of a request."""

    role: Role  # what it may do
    name: str = ""  # of its token or certificate (empty: it has none)
    said: str = ""  # who it says it is, which nothing proves; else where it asks from

    @property
    def words(self) -> str:
        """The sender in an audit: what it says, and by the name of its token."""
        return f"{self.said} ({self.name})" if self.said and self.name else self.said or self.name or "somebody"


@dataclass(frozen=True, kw_only=True, slots=True)
class CallerProof:
    """The credentials that a request showed."""

    authorization: bytes = field(default=b"", repr=False)  # the header's value; empty: none
    certificate: Mapping[str, Any] | None = None  # verified by the handshake, as `ssl` gives it


#: Characters that are kept of who a sender says it is.
MOST_SAID = 200
#: Who asks where nobody is asked who he is.
ANYBODY = Caller(role=Role.OPERATOR)


def needed(kind: str, method: str, path: str) -> tuple[Role, ...]:
    """The roles of which one is needed for an ASGI scope of this type, none where everybody may."""
    if kind == "websocket":
        return (Role.AGENT, Role.OPERATOR)
    if method in ("GET", "HEAD") and path not in COSTLY:
        return () if path in OPEN else (Role.VIEWER, Role.OPERATOR)
    return (Role.OPERATOR,)


class Authorizer:
    """The tokens of each role, as digests, and the serial numbers of certificates that are `revoked`."""

    def __init__(
        self, tokens: Mapping[bytes, Caller], *, asks: bool, revoked: frozenset[int] = frozenset()
    ) -> None:
        self._tokens, self._revoked = dict(tokens), revoked
        #: False: everybody may everything, as it is without a section [security].
        self.asks = asks

    @classmethod
    def read(cls, section: SecuritySection) -> Authorizer:
        """From the files as they are now. Raises ConfigError."""
        callers: dict[bytes, Caller] = {}
        for role in Role:
            path = section.tokens(role)
            if path is None:
                continue
            for token, caller in _entries(path, role):
                if callers.setdefault(_digest(token), caller) != caller:
                    raise ConfigError(
                        f"[security] {role}s {path} has a token that is listed elsewhere too, for another role "
                        "or name: give each its own"
                    )
        return cls(callers, asks=section.asks, revoked=_revoked(section))

    def caller(self, proof: CallerProof) -> Caller | None:
        """Returns the caller that showed these credentials; None: a stranger. A token that is wrong is not made
        good by a certificate."""
        if not self.asks:
            return ANYBODY
        if proof.authorization:
            scheme, _, token = proof.authorization.partition(b" ")
            return self._holder(token.strip()) if scheme.lower() == b"bearer" else None
        if not proof.certificate or int(proof.certificate.get("serialNumber", "0"), 16) in self._revoked:
            return None
        return _named(proof.certificate)

    def _holder(self, token: bytes) -> Caller | None:
        """Looks a token up by its digest: how long that takes tells nothing of any token."""
        return self._tokens.get(_digest(token))


def _entries(path: str, role: Role) -> list[tuple[bytes, Caller]]:
    key = f"[security] {role}s"
    entries = []
    for number, line in enumerate(private_text(path, key).splitlines(), start=1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        if len(words) > 2:
            raise ConfigError(f"{key} {path}:{number}: write a token, or a name and a token, in each line")
        check_token(words[-1], f"{key} {path}:{number}")
        name = words[0] if len(words) == 2 else ""
        entries.append((words[-1].encode(), Caller(role=role, name=name)))
    if not entries:
        raise ConfigError(f"{key} {path} holds no token: write one with: openssl rand -hex 32 > {path}")
    return entries


def _revoked(section: SecuritySection) -> frozenset[int]:
    if section.client_crl is None or section.client_ca is None:
        return frozenset()
    try:
        lists, authorities = (
            Path(path).expanduser().read_bytes() for path in (section.client_crl, section.client_ca)
        )
        return revoked_serials(lists, authorities)
    except (OSError, ValueError) as error:
        raise ConfigError(f"[security] client_crl {section.client_crl} cannot be used ({error})") from None


def _named(certificate: Mapping[str, Any]) -> Caller | None:
    """Of a certificate that the handshake has verified. None where it names no role, or two."""
    subject = [pair for part in certificate.get("subject", ()) for pair in part]
    units = {value for key, value in subject if key == "organizationalUnitName"}
    names = [value for key, value in subject if key == "commonName"]
    if len(units) != 1 or len(names) != 1:
        return None
    (unit,) = units
    return Caller(role=Role(unit), name=names[0]) if unit in tuple(Role) else None


def _digest(token: bytes) -> bytes:
    return hashlib.sha256(token).digest()
