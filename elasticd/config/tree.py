"""The configuration tree: one TOML file, read once into frozen values, and refused with a message that helps.

Every daemon and command reads the same file (`--config`, else `$ELASTICD_CONFIG`; without either the defaults
hold) and uses its own sections. Command-line options go through `with_overrides`, so that they meet the
same checks. `[emulate]` is for agents and workers alone: no section of the planner's knows of it.
"""

from __future__ import annotations

import difflib
import logging
import math
import os
import platform
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from elasticd_planner.cost.model_profile import GUESSED_FLOPS
from elasticd_planner.detection.stragglers import DetectSettings
from elasticd_planner.policy.policy import PolicySettings
from elasticd_planner.spec.cluster import Level, Link, check_levels
from elasticd_planner.value import Value, refuse

from elasticd.config.security import SecuritySection
from elasticd.names import name_refusal
from elasticd.system.logs import LogSection
from elasticd.system.network_addresses import LOOPBACK

#: Names the file where `--config` does not.
CONFIG_VARIABLE = "ELASTICD_CONFIG"
DEFAULT_PORT = 7471
DASHBOARD_PORT = 7472

_UNITS: dict[str, int] = {"": 1, "B": 1} | {
    f"{letter}{suffix}": base**power
    for power, letter in enumerate("KMGT", start=1)
    for suffix, base in (("B", 1000), ("iB", 1024))
}
S = TypeVar("S", bound=msgspec.Struct)
_log = logging.getLogger(__name__)


class ConfigError(ValueError):
    """The configuration is wrong: the message names source, key and value, and what would be right."""


def _host_name() -> str:
    return platform.node().split(".")[0] or "localhost"


class ClusterSection(Value, frozen=True, kw_only=True):
    """The cluster that a daemon or command belongs to."""

    # All keys of the cluster in etcd begin with `/elasticd/NAME/`.
    name: str = "default"

    def __post_init__(self) -> None:
        _check_name("name", self.name)


class EtcdSection(Value, frozen=True, kw_only=True):
    """The etcd of the cluster, and the credentials for it."""

    # The members of etcd, each as HOST:PORT.
    endpoints: tuple[str, ...] = ("127.0.0.1:2379",)
    # [path] The CA (PEM) that signed etcd's certificate. It turns TLS on.
    ca: str | None = None
    # [path] The client certificate (PEM), for an etcd that asks for one.
    cert: str | None = None
    # [path] The key (PEM) of the client certificate.
    key: str | None = None
    # The name of the user in etcd.
    user: str | None = None
    # [path] The file with the user's password. `$ELASTICD_ETCD_PASSWORD` is used instead where it is set.
    password_file: str | None = None

    def __post_init__(self) -> None:
        if not self.endpoints:
            refuse("endpoints must name at least one etcd, for example 127.0.0.1:2379")
        for endpoint in self.endpoints:
            host, _, port = endpoint.rpartition("://")[2].rstrip("/").rpartition(":")
            if not host or not port.isdigit() or not 0 < int(port) < 65536:
                refuse(f"endpoints: {endpoint!r} is not host:port, as in 127.0.0.1:2379")
            if self.ca is None and endpoint.startswith("https:"):
                refuse(f"endpoints: {endpoint!r} speaks TLS: give ca, the file that signed its certificate")
            if self.ca is not None and endpoint.startswith("http:"):
                refuse(f"endpoints: {endpoint!r} speaks no TLS, but ca is given: write https://, or drop ca")
        if (self.cert is None) != (self.key is None):
            refuse("cert and key go together: give both, as PEM files, or neither")
        if self.cert is not None and self.ca is None:
            refuse("cert needs ca, the file that signed etcd's own certificate")
        if self.password_file is not None and self.user is None:
            refuse("password_file needs user, the name that etcd knows")


class CoordinatorSection(Value, frozen=True, kw_only=True):
    """A coordinator: its name, where it serves, and how long it keeps jobs that are over."""

    # The coordinator's name among the coordinators of the cluster. Default: the host's name.
    name: str = msgspec.field(default_factory=_host_name)
    # The address at which it serves.
    host: str = "127.0.0.1"
    # The port at which it serves. 0: any free port.
    port: int = DEFAULT_PORT
    # [path] The folder in which it remembers its etcd. Default: `elasticd` in `$XDG_STATE_HOME` or
    # ~/.local/state.
    state: str | None = None
    # [days] A job is forgotten this long after its end.
    keep_days: float = 7.0
    # [jobs] If more jobs than this are over, the oldest of them are forgotten earlier.
    keep_jobs: int = 1000
    # [seconds] A job that has not begun is stopped if no torchrun or worker has come for this long.
    assemble_seconds: float = 900.0
    # [days] A job that recovers, and waits for devices or for a copy of its state, is stopped this long after
    # its last step.
    recover_days: float = 7.0

    def __post_init__(self) -> None:
        _check_name("name", self.name)
        if not 0 <= self.keep_days < math.inf:
            refuse(f"keep_days = {self.keep_days} must be days, as 7, or a part of one, as 0.5")
        if not 0 <= self.keep_jobs <= 10_000:
            refuse(f"keep_jobs = {self.keep_jobs} must be a number of jobs up to 10000, as 1000")
        if not 1 <= self.assemble_seconds <= 30 * 86_400:
            text = f"assemble_seconds = {self.assemble_seconds} must be seconds between 1 and 2592000 (30 days)"
            refuse(f"{text}, as 900")
        if not 0 < self.recover_days <= 365:
            refuse(f"recover_days = {self.recover_days} must be days up to 365, as 7, or a part of one, as 0.5")
        if not self.host:
            refuse("host must be an address that the agents can reach, for example 127.0.0.1")
        if not 0 <= self.port < 65536:
            refuse(f"port = {self.port} must be between 0 and 65535")


class DashboardSection(Value, frozen=True, kw_only=True):
    """The dashboard: where it serves, and what it keeps."""

    # The address at which it serves browsers.
    host: str = "127.0.0.1"
    # The port at which it serves browsers. 0: any free port.
    port: int = DASHBOARD_PORT
    # [path] The file of its history (SQLite). Default: `dashboard-CLUSTER.db` in the folder where daemons
    # remember their state.
    history: str | None = None
    # [days] Events, steps and measurements older than this are deleted.
    keep_days: float = 30.0
    # [MiB] If the history is larger than this, its oldest part is deleted earlier.
    history_mib: int = 512

    def __post_init__(self) -> None:
        if not self.host:
            refuse("host must be an address that browsers can reach, for example 127.0.0.1")
        if not 0 <= self.port < 65536:
            refuse(f"port = {self.port} must be between 0 and 65535")
        if not 0 < self.keep_days < math.inf:
            refuse(f"keep_days = {self.keep_days} must be days, as 30, or a part of one, as 0.5")
        if not 1 <= self.history_mib <= 1 << 20:
            refuse(f"history_mib = {self.history_mib} must be MiB between 1 and 1048576, as 512")


class AgentSection(Value, frozen=True, kw_only=True):
    """The agent of one node."""

    # The node's name. Default: the host's name.
    node: str = msgspec.field(default_factory=_host_name)
    # [path] The unix socket for the node's workers. Default: `$ELASTICD_SOCKET`, else a path of the user's own.
    socket: str | None = None
    # The address at which the node's workers listen for those of other nodes. Default: this machine's address
    # on the route to the leader.
    address: str | None = None
    # [devices] How many devices the node has. Default: the machine is asked.
    devices: int | None = None
    # [bytes] Memory of each device; a number, or as "8 GiB". Default: the machine is asked.
    memory: int | None = None
    # [path] The folder in which it remembers its etcd. Default: as for the coordinator.
    state: str | None = None
    # [MiB] Memory that snapshots from other nodes may use here. Default: a quarter of the node's memory.
    snapshot_mib: int | None = None
    # The group whose members may use the socket, besides the agent's own user.
    group: str | None = None
    # [seconds] How often a standby device is probed. 0: only when its worker starts.
    probe_seconds: float = 30.0

    def __post_init__(self) -> None:
        _check_name("node", self.node)
        if self.address is not None and not self.address:
            refuse("address must be one of this machine's, as 10.0.0.7, or be left out")
        if self.devices is not None and self.devices < 1:
            refuse(f"devices = {self.devices} must be at least 1")
        if self.memory is not None and self.memory < 1:
            refuse(f"memory = {self.memory} must be a positive number of bytes, as 8 GiB")
        if self.snapshot_mib is not None and self.snapshot_mib < 0:
            refuse(f"snapshot_mib = {self.snapshot_mib} must be MiB, as 4096, or 0 to keep none for others")
        if not 0 <= self.probe_seconds < math.inf:
            refuse(f"probe_seconds = {self.probe_seconds} must be seconds, as 30, or 0 for one probe alone")

    @property
    def listens(self) -> str:
        """The address, once a daemon has chosen one where the file does not; else for this machine alone."""
        return self.address if self.address is not None else LOOPBACK


class LinkSection(Value, frozen=True, kw_only=True):
    """A link between two devices."""

    # [bytes/s] Its bandwidth; a number, or as "25 GB/s".
    bandwidth: float = Link().bandwidth
    # [seconds] Its latency: the time until the first byte arrives.
    latency: float = Link().latency

    def __post_init__(self) -> None:
        if not 0 < self.bandwidth < math.inf:
            refuse(f"bandwidth = {self.bandwidth} must be bytes a second, as 25e9 or '25 GB/s'")
        if not 0 <= self.latency < 60:
            refuse(f"latency = {self.latency} must be the seconds of one hop, as 2e-5")

    @property
    def link(self) -> Link:
        """The same two numbers as the planner's value: bytes per second, and seconds."""
        return Link(bandwidth=self.bandwidth, latency=self.latency)


class LevelSection(LinkSection, frozen=True, kw_only=True):
    """A level of links between node and network: a rack, a rail group, a pod."""

    # What the level is called, as "rack".
    name: str
    # The nodes of each of its groups, by name: two nodes of one group talk over this link.
    nodes: tuple[tuple[str, ...], ...]

    def __post_init__(self) -> None:
        super().__post_init__()
        Level(name=self.name, link=self.link, groups=self.nodes)  # refuses what is no level

    @property
    def level(self) -> Level:
        """The level as the planner's value."""
        return Level(name=self.name, link=self.link, groups=self.nodes)


class PlannerSection(Value, frozen=True, kw_only=True):
    """Speeds of devices and links that the planner assumes until they are measured."""

    # [FLOP/s] What a normal device reaches on the job's model (with `memory_bandwidth`, in matrices).
    flops: float = GUESSED_FLOPS
    # [bytes/s] Bandwidth of a normal device's memory by its data sheet, as 2e12, for norms, additions and
    # activation functions, which wait for it. 0 where it is not known: they count as no time of their own.
    memory_bandwidth: float = 0.0
    # The link between two devices of a node.
    inside: LinkSection = LinkSection()
    # The link between two devices of different nodes.
    between: LinkSection = LinkSection()
    # Levels of links that join some of the nodes, as the nodes of a rack; the nearest first.
    levels: tuple[LevelSection, ...] = ()
    # [bytes] What a communicator takes of a device's memory, as on GPUs: plans leave room for as many as a
    # device may have (24). A number, or as "64 MiB".
    communicator: int = 0

    def __post_init__(self) -> None:
        if self.communicator < 0:
            refuse(f"communicator = {self.communicator} must be a number of bytes, as 64 MiB")
        check_levels([section.level for section in self.levels])
        if not 0 < self.flops < math.inf:
            refuse(
                f"flops = {self.flops} must be the operations a second that a normal device reaches, as 1.5e14"
            )
        if not 0 <= self.memory_bandwidth < math.inf:
            refuse(
                f"memory_bandwidth = {self.memory_bandwidth} must be the bytes a second of a normal device's "
                "memory, as 2e12, or 0 where it is not known"
            )


class EmulateSection(Value, frozen=True, kw_only=True):
    """Emulated devices, for demonstrations and tests: workers pace their blocks to a given speed."""

    # Whether devices are emulated.
    enabled: bool = False
    # [seconds] The forward pass of one token through one block on a normal device.
    forward: float | None = None
    # [seconds] The backward pass of one token through one block on a normal device.
    backward: float | None = None
    # [tokens] The length of a sequence whose tokens take as long in attention as in all else of a block, since
    # attention goes with the square of the length. 0: attention takes no time.
    attention_tokens: int = 0
    # [bytes] The memory that each device claims to have; a number, or as "3 MiB".
    memory: int | None = None

    def __post_init__(self) -> None:
        if (self.forward is None) != (self.backward is None):
            refuse("forward and backward go together: give both, in seconds per token, or neither")
        for name, seconds in (("forward", self.forward), ("backward", self.backward)):
            if seconds is not None and not 0 < seconds < 3600:
                refuse(f"{name} = {seconds} must be the seconds that one token takes, as 0.0002")
        if self.memory is not None and self.memory < 1:
            refuse(f"memory = {self.memory} must be a positive number of bytes, as 3 MiB")
        if self.attention_tokens < 0:
            refuse(f"attention_tokens = {self.attention_tokens} must be a number of tokens, or 0")
        if self.enabled and self.forward is None:
            refuse("enabled = true needs forward and backward, in seconds per token of one block")


class ChaosSection(Value, frozen=True, kw_only=True):
    """Fault injection."""

    # Whether `elasticd chaos` may harm this cluster on purpose.
    enabled: bool = False


class Config(Value, frozen=True, kw_only=True):
    """The configuration tree: one section for each field."""

    cluster: ClusterSection = msgspec.field(default_factory=ClusterSection)
    etcd: EtcdSection = msgspec.field(default_factory=EtcdSection)
    coordinator: CoordinatorSection = msgspec.field(default_factory=CoordinatorSection)
    dashboard: DashboardSection = msgspec.field(default_factory=DashboardSection)
    agent: AgentSection = msgspec.field(default_factory=AgentSection)
    detect: DetectSettings = msgspec.field(default_factory=DetectSettings)
    policy: PolicySettings = msgspec.field(default_factory=PolicySettings)
    planner: PlannerSection = msgspec.field(default_factory=PlannerSection)
    emulate: EmulateSection = msgspec.field(default_factory=EmulateSection)
    chaos: ChaosSection = msgspec.field(default_factory=ChaosSection)
    security: SecuritySection = msgspec.field(default_factory=SecuritySection)
    log: LogSection = LogSection()


_SECTIONS: dict[str, type[msgspec.Struct]] = {
    field.name: field.type for field in msgspec.structs.fields(Config)
}


def load(path: str | Path | None = None) -> Config:
    """The configuration of the file at `path`, else of `$ELASTICD_CONFIG`, else the defaults.

    Raises ConfigError.
    """
    named_by = "--config" if path is not None else CONFIG_VARIABLE
    chosen = path if path is not None else os.environ.get(CONFIG_VARIABLE) or None
    if chosen is None:
        return Config()
    return parse(text_of(chosen, f"the configuration {chosen} (named by {named_by})"), str(chosen))


def parse(text: str, source: str) -> Config:
    """The configuration in TOML `text`; `source` names it in messages. Raises ConfigError."""
    sections: dict[str, Any] = {}
    for name, body in toml(text, source).items():
        if name not in _SECTIONS:
            raise ConfigError(f"{source}: there is no section [{name}]{_suggest(name, _SECTIONS)}")
        sections[name] = section(name, _SECTIONS[name](), body, source)
    return Config(**sections)


def text_of(path: str | Path, what: str) -> str:
    """The text of a TOML file that the user named; `what` is the file in messages. Raises ConfigError."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text in UTF-8"
        raise ConfigError(f"cannot read {what}: {reason}; name a readable TOML file") from error


def toml(text: str, source: str) -> dict[str, Any]:
    """The contents of TOML `text`; `source` names it in messages. Raises ConfigError."""
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # a number of thousands of digits is no TOMLDecodeError
        raise ConfigError(f"{source} is not TOML: {error}") from error


def with_overrides(config: Config, options: Mapping[str, Any]) -> Config:
    """`config` with values from the command line, by dotted key: {"agent.node": "alpha"}; None leaves a key.

    Raises ConfigError, and KeyError for a key that no section has (an error of the program).
    """
    changed: dict[str, dict[str, Any]] = {}
    for key, value in options.items():
        name, _, field = key.partition(".")
        if field not in {known.name for known in msgspec.structs.fields(_SECTIONS[name])}:
            raise KeyError(key)
        if value is not None:
            changed.setdefault(name, {})[field] = value
    sections = {
        name: section(name, getattr(config, name), body, "the command line", strict=False)
        for name, body in changed.items()
    }
    return msgspec.structs.replace(config, **sections)


def reloaded(config: Config, reread: Callable[[], Config] | None, sections: Iterable[str]) -> Config:
    """`config` with these sections as they are in the file now. What else has changed there needs a restart,
    and a file that is wrong changes nothing: the log says so."""
    if reread is None:
        return config
    try:
        fresh = reread()
    except ConfigError as error:
        _log.error("the configuration stays as it is: %s", error)
        return config
    changed = [name for name in _SECTIONS if getattr(fresh, name) != getattr(config, name)]
    here = {name: getattr(fresh, name) for name in sections}
    later = [f"[{name}]" for name in changed if name not in here]
    _log.info("read anew: %s", ", ".join(f"[{name}]" for name in changed if name in here) or "nothing new")
    if later:
        _log.warning("%s has changed too, and holds from the next start on", ", ".join(later))
    return msgspec.structs.replace(config, **here)


def section(name: str, base: S, body: Any, source: str, *, strict: bool = True) -> S:
    """`base` with the keys of `body`, as `with_keys`. Raises ConfigError, also where `body` is no table."""
    if not isinstance(body, Mapping):
        raise ConfigError(f"{source}: {name} = {body!r} must be a section: write [{name}] and keys below it")
    return with_keys(base, body, f"{source}: [{name}]", strict=strict)


def with_keys(base: S | type[S], body: Mapping[str, Any], where: str, *, strict: bool = True) -> S:
    """`base`, or a new value of that type, with the keys of `body`, each checked. A key's name in earlier
    releases is taken too, and logged.

    Args:
        where: The table in messages, as "cluster.toml: [agent]".
        strict: False reads text as a number where a number is due.

    Raises:
        ConfigError: a key or a value is wrong, or one is missing.
    """
    fields = {field.name: field for field in msgspec.structs.fields(base)}
    renamed = {field.encode_name: field.name for field in fields.values()}
    values: dict[str, Any] = {}
    for given_key, value in body.items():
        key = renamed.get(given_key, given_key)
        if key != given_key:
            _log.warning("%s %s is called %s now: change its name", where, given_key, key)
            if key in body:
                raise ConfigError(f"{where} {given_key} and {key} are one key: give {key} alone")
        if key not in fields:
            # What somebody took for the place of a token or a password is not said aloud.
            default = "" if isinstance(base, SecuritySection | EtcdSection) else f" (= {value!r})"
            raise ConfigError(f"{where} has no key {key!r}{default}{_suggest(key, fields)}")
        assignment = f"{where} {key} = {value!r}"
        if fields[key].type == tuple[LevelSection, ...]:
            values[key] = _levels(value, assignment, where)
        elif fields[key].type is not LinkSection:
            values[key] = _convert(value, fields[key].type, assignment, key, strict)
        elif isinstance(value, Mapping):
            values[key] = with_keys(getattr(base, key), value, f"{where.removesuffix(']')}.{key}]")
        else:
            raise ConfigError(f"{assignment}: write a table, as {{ bandwidth = '25 GB/s', latency = 2e-5 }}")
    new = isinstance(base, type)
    missing = [field.name for field in fields.values() if new and field.required and field.name not in values]
    if missing:
        raise ConfigError(f"{where} needs {' and '.join(missing)}")
    try:
        return base(**values) if isinstance(base, type) else msgspec.structs.replace(base, **values)
    except ValueError as error:
        raise ConfigError(f"{where}: {error}") from error


def _levels(value: Any, said: str, where: str) -> tuple[LevelSection, ...]:
    """The tables of [[planner.levels]]."""
    if not isinstance(value, list) or not all(isinstance(body, Mapping) for body in value):
        raise ConfigError(f"{said}: write a table [[planner.levels]] for each level")
    return tuple(with_keys(LevelSection, body, f"{where.removesuffix(']')}.levels]") for body in value)


def size(text: str) -> int:
    """Bytes of "3 MiB", "512MB" or "1024". Raises ValueError."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    units = {unit.lower(): factor for unit, factor in _UNITS.items()}
    if match is None or match[2].lower() not in units:
        raise ValueError(f"{text!r} is not a size: write bytes, or a number and KiB, MiB, GiB, as '3 MiB'")
    return round(float(match[1]) * units[match[2].lower()])


#: Examples of a right value, by the type that was expected.
_RIGHT = {
    "bool": ": write true or false",
    "int": ": write a whole number, as 8",
    "float": ": write a number, as 0.5",
}


def _convert(value: Any, kind: Any, where: str, key: str, strict: bool) -> Any:
    try:
        if key in ("memory", "communicator") and isinstance(value, str):
            return size(value)
        if key == "bandwidth" and isinstance(value, str) and value.strip().endswith("/s"):
            return float(size(value.strip().removesuffix("/s")))
        if not strict and isinstance(value, str) and kind == tuple[str, ...]:
            return tuple(part.strip() for part in value.split(",") if part.strip())
        return msgspec.convert(value, kind, strict=strict)
    except msgspec.ValidationError as error:
        # msgspec says: Expected `int | null`, got `str`. TOML has no null.
        reason = str(error).replace(" | null", "").replace("`", "")
        right = next((_RIGHT[word] for word in _RIGHT if reason.startswith(f"Expected {word},")), "")
        raise ConfigError(f"{where}: {reason[0].lower()}{reason[1:]}{right}") from error
    except ValueError as error:
        raise ConfigError(f"{where}: {error}") from error


def _suggest(name: str, known: Iterable[str]) -> str:
    names = list(known)
    near = difflib.get_close_matches(name, names, n=1)
    return f": did you mean {near[0]!r}?" if near else f"; it may be one of {', '.join(sorted(names))}"


def _check_name(key: str, value: str) -> None:
    """A name becomes a part of keys in etcd and of device names."""
    if why := name_refusal(key, value):
        refuse(why)
