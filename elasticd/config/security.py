"""The section `[security]`: who may do what at the coordinator's port, its TLS, and its limits.

The file of the configuration names files alone: no secret stands in it, on a command line or in a log.
"""

from __future__ import annotations

import enum
import math

from elasticd_planner.value import Value, refuse


class Role(enum.StrEnum):
    """viewer: looks (GET). operator: changes (POST), and all else. agent: the agents' WebSocket alone."""

    VIEWER = "viewer"
    OPERATOR = "operator"
    AGENT = "agent"


class SecuritySection(Value, frozen=True, kw_only=True):
    """Paths of files, each on the machine of whom it concerns.

    At the coordinator: `viewers`, `operators` and `agents` hold the tokens of each role, `cert` and `key` (PEM)
    make its port speak TLS, and `client_ca` signed the certificates that are taken for a token. At its clients
    (agents, commands): `token_file` holds the own token, which `$ELASTICD_TOKEN` overrides; `ca` signed the
    coordinator's certificate, and `client_cert` and `client_key` are the own one. Limits of the coordinator's
    port: MiB of a message, connections at once, and REST requests a second from one address. `insecure`: a
    coordinator that other machines reach may serve everybody.
    """

    viewers: str | None = None
    operators: str | None = None
    agents: str | None = None
    cert: str | None = None
    key: str | None = None
    client_ca: str | None = None
    token_file: str | None = None
    ca: str | None = None
    client_cert: str | None = None
    client_key: str | None = None
    message_mib: int = 64
    connections: int = 8192
    requests_per_second: float = 500.0
    insecure: bool = False

    def __post_init__(self) -> None:
        if (self.cert is None) != (self.key is None):
            refuse("cert and key go together: give both, as PEM files, or neither")
        if (self.client_cert is None) != (self.client_key is None):
            refuse("client_cert and client_key go together: give both, as PEM files, or neither")
        if self.client_ca is not None and self.cert is None:
            refuse("client_ca needs cert and key: without TLS nobody shows a certificate")
        if self.client_cert is not None and self.ca is None:
            refuse("client_cert needs ca: whoever shows a certificate checks the coordinator's too")
        if not 1 <= self.message_mib <= 1024:
            refuse(f"message_mib = {self.message_mib} must be MiB between 1 and 1024, as 64")
        if self.connections < 1:
            refuse(f"connections = {self.connections} must be at least 1; each agent has one")
        if not 1 <= self.requests_per_second < math.inf:
            refuse(f"requests_per_second = {self.requests_per_second} must be at least 1, as 500")

    def tokens(self, role: Role) -> str | None:
        """The file of a role's tokens."""
        return {Role.VIEWER: self.viewers, Role.OPERATOR: self.operators, Role.AGENT: self.agents}[role]

    @property
    def asks(self) -> bool:
        """Whether the coordinator lets in only whom it knows."""
        return any(self.tokens(role) for role in Role) or self.client_ca is not None
