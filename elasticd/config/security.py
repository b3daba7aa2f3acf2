"""The section `[security]`: who may do what at the coordinator's port, its TLS, and its limits.

The file of the configuration names files alone: no secret stands in it, on a command line or in a log.
"""

from __future__ import annotations

import enum
import math

from elasticd_planner.value import Value, refuse


class Role(enum.StrEnum):
    """The rights of a caller of the coordinator's port."""

    VIEWER = "viewer"  # reads: GET
    OPERATOR = "operator"  # everything: GET and POST
    AGENT = "agent"  # the agents' WebSocket alone


class SecuritySection(Value, frozen=True, kw_only=True):
    """Tokens, TLS and limits of the coordinator's port."""

    # [path] At the coordinator: the file with the tokens of viewers.
    viewers: str | None = None
    # [path] At the coordinator: the file with the tokens of operators.
    operators: str | None = None
    # [path] At the coordinator: the file with the tokens of agents.
    agents: str | None = None
    # [path] At the coordinator: its certificate (PEM). It turns TLS on.
    cert: str | None = None
    # [path] At the coordinator: the key (PEM) of its certificate.
    key: str | None = None
    # [path] At the coordinator: the CA (PEM) whose client certificates are taken in place of a token.
    client_ca: str | None = None
    # [path] At the coordinator: revocation lists (CRL, PEM) that this CA signed. Certificates on them are not
    # taken any more. It is read again at each reload.
    client_crl: str | None = None
    # [path] At agents and commands: the file with their own token. `$ELASTICD_TOKEN` is used instead where it
    # is set.
    token_file: str | None = None
    # [path] At agents and commands: the CA (PEM) that signed the coordinator's certificate.
    ca: str | None = None
    # [path] At agents and commands: their own certificate (PEM).
    client_cert: str | None = None
    # [path] At agents and commands: the key (PEM) of their own certificate.
    client_key: str | None = None
    # [MiB] The largest message that the coordinator's port accepts: a frame of an agent. Each message in it has
    # a limit of its own, of 4 MiB for a job's spec and 256 KiB for most others.
    message_mib: int = 8
    # [connections] The most connections at once that showed a token; without tokens, that asked for something.
    connections: int = 8192
    # [requests/s] The most REST requests from one address.
    requests_per_second: float = 500.0
    # Whether a coordinator that other machines reach may serve without tokens and certificates.
    insecure: bool = False

    def __post_init__(self) -> None:
        if (self.cert is None) != (self.key is None):
            refuse("cert and key go together: give both, as PEM files, or neither")
        if (self.client_cert is None) != (self.client_key is None):
            refuse("client_cert and client_key go together: give both, as PEM files, or neither")
        if self.client_ca is not None and self.cert is None:
            refuse("client_ca needs cert and key: without TLS nobody shows a certificate")
        if self.client_crl is not None and self.client_ca is None:
            refuse("client_crl needs client_ca: it lists certificates of that CA")
        if self.client_cert is not None and self.ca is None:
            refuse("client_cert needs ca: whoever shows a certificate checks the coordinator's too")
        if not 1 <= self.message_mib <= 64:
            refuse(f"message_mib = {self.message_mib} must be MiB between 1 and 64, as 8")
        if self.connections < 1:
            refuse(f"connections = {self.connections} must be at least 1; each agent has one")
        if not 1 <= self.requests_per_second < math.inf:
            refuse(f"requests_per_second = {self.requests_per_second} must be at least 1, as 500")

    def tokens(self, role: Role) -> str | None:
        """The file of a role's tokens."""
        return {Role.VIEWER: self.viewers, Role.OPERATOR: self.operators, Role.AGENT: self.agents}[role]

    @property
    def asks(self) -> bool:
        """True if the coordinator lets in only whom it knows."""
        return any(self.tokens(role) for role in Role) or self.client_ca is not None
