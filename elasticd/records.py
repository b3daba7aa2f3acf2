"""What the store holds: the keys under one cluster's prefix and the value behind each.

The agents write `nodes/` and `members/` under their lease; the leader writes the rest, each write fenced by
a comparison with its leader key. `epoch` is that key's create revision: orders with a lower one are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, TypeVar

import msgspec
from elasticd_planner.cost.model_profile import ModelProfile, Numbers
from elasticd_planner.problem import Problem
from elasticd_planner.spec.cluster import Device
from elasticd_planner.spec.model import ModelSpec
from elasticd_planner.spec.plan import Plan, StatePolicy
from elasticd_planner.value import StoredValue, Value, refuse

from elasticd.codec.decoding import decode_stored, decoded_as, shown, skip, version_refusal
from elasticd.codec.message import PEERS_VERSION
from elasticd.codec.record_parts import whole
from elasticd.version import __version__

#: Version of every record here.
RECORD_VERSION = 1
#: Version of the keys, and of what they mean together.
SCHEMA_VERSION = 1
#: How the keys below a cluster's prefix begin, and those below a job's: those that the leader decides by, and
#: those that agents write, or that torchruns have written, or that records need. (In release 0.1 a job's agents
#: had `members` there; all agents are told of what is below jobs.)
CLUSTER_KEYS = ("schema", "leader", "config", "config-history", "journal", "nodes", "members", "jobs")
LEADER_KEYS = ("spec", "plan", "proposal", "fence", "done", "checkpoints", "history")
OTHER_KEYS = ("members", "rendezvous", "ranks", "parts")
#: Those of a job's keys that live as long as it does, and are changed by each step of its control.
LASTING: tuple[Literal["plan", "fence"], ...] = ("plan", "fence")
#: Digits of a number in a key, at most: those of 64 bits.
MOST_DIGITS = 18
T = TypeVar("T", bound=msgspec.Struct)

# fmt: off
#: How a key below a job's begins; all of them begin with the empty one.
JobPart = Literal[
    "", "spec", "plan", "proposal", "fence", "done", "checkpoints", "history/", "ranks/", "parts/"
]
# fmt: on


class Keys(Value, frozen=True, kw_only=True):
    """The keys of one cluster."""

    cluster: str

    def __post_init__(self) -> None:
        if not self.cluster or "/" in self.cluster:
            refuse(f"cluster name {self.cluster!r} must not be empty or contain '/'")

    @property
    def root(self) -> str:
        return f"/elasticd/{self.cluster}/"

    @property
    def leader(self) -> str:
        return self.root + "leader"

    @property
    def schema(self) -> str:
        """Which release's records these are (`SchemaRecord`)."""
        return self.root + "schema"

    @property
    def config(self) -> str:
        """What was changed of detection and policy while running."""
        return self.root + "config"

    def config_history(self, number: int) -> str:
        return f"{self.config}-history/{number:08d}"

    @property
    def journal(self) -> str:
        """The prefix of what the leader told: events, and the steps of jobs."""
        return self.root + "journal/"

    @property
    def nodes(self) -> str:
        return self.root + "nodes/"

    def node(self, node: str) -> str:
        return self.nodes + node

    @property
    def jobs(self) -> str:
        return self.root + "jobs/"

    def job(self, job: str, part: JobPart) -> str:
        return f"{self.jobs}{job}/{part}"

    @property
    def members(self) -> str:
        """The prefix of all workers: no job's, so that none of them is told to each agent."""
        return self.root + "members/"

    def member(self, job: str, device: str) -> str:
        return f"{self.members}{job}/{device.replace('/', ':')}"

    def rendezvous(self, job: str) -> str:
        """The prefix of what torchruns in restart mode, and nobody else, keep through their agents."""
        return f"{self.jobs}{job}/rendezvous/"

    def history(self, job: str, number: int) -> str:
        return self.job(job, "history/") + f"{number:08d}"

    def lasts(self, key: str) -> bool:
        """Whether this is a job's plan or fence."""
        job, _, part = key.removeprefix(self.jobs).rpartition("/")
        return key.startswith(self.jobs) and bool(job) and part in LASTING

    def unknown_part(self, key: str) -> str:
        """The part of a key by which this release does not know it ("quotas", "jobs/JOB/quota"), or nothing for
        a key that it knows. Such keys are of a newer release, and are skipped."""
        name, _, rest = key.removeprefix(self.root).partition("/")
        if name != "jobs":
            return "" if name in CLUSTER_KEYS else name
        part, _, last = rest.partition("/")[2].partition("/")
        if part == "history" and numbered(last) is None:
            # Release 0.1 let a job's name have a '/' in it: jobs/x/history/members/... is of "x/history".
            folder, slash, _ = last.partition("/")
            return f"jobs/JOB/history/{folder if slash else 'NAME'}"
        return "" if part in (*LEADER_KEYS, *OTHER_KEYS) else f"jobs/JOB/{part}"

    def note_unknown(self, key: str) -> bool:
        """Whether this release does not know the key, which is counted and logged once for all keys like it."""
        part = self.unknown_part(key)
        if part:
            skip(
                "key",
                ("key", part),
                f"the store has the key {shown(key)!r}, which elasticd {__version__} does not know: keys under "
                f"{shown(part)!r} are skipped; is their writer of a newer release?",
            )
        return bool(part)


def numbered(name: str) -> int | None:
    """The number that the last part of a key is; None for what no leader writes there. (Python refuses to read
    numbers of thousands of digits, and a number beyond 64 bits would be no record's.)"""
    return int(name) if len(name) <= MOST_DIGITS and name.isascii() and name.isdecimal() else None


class NodeRecord(StoredValue, frozen=True, kw_only=True, tag="node"):
    """A node whose agent lives; `address` is what its workers listen on for each other, `snapshots` where other
    agents send it snapshots to keep ("host:port", empty: nowhere) and `certificate` (PEM) what it is known by
    there. `draining`: its devices are to be left, and no plan takes them up again. `host`: which machine and
    network it is on (`elasticd.system.network_addresses.host`); nodes of one host reach each other by loopback.
    `reach`: where other agents try whether they reach this node on the data network ("host:port", empty: an
    older release)."""

    node: str
    devices: tuple[Device, ...]
    address: str
    agent: str
    emulated: bool = False
    snapshots: str = ""
    certificate: str = ""
    draining: bool = False
    host: str = ""
    reach: str = ""
    version: int = RECORD_VERSION


class MemberRecord(StoredValue, frozen=True, kw_only=True, tag="member"):
    """A worker process: the device that it drives and this start of it."""

    device: str
    incarnation: str
    pid: int
    version: int = RECORD_VERSION


class ConfigRecord(StoredValue, frozen=True, kw_only=True, tag="config-change"):
    """A change of the configuration while running; each one is kept in the history."""

    number: int  # of this change
    values: dict[str, bool | int | float | str]  # what differs from the files, by encoded dotted key
    at: float  # unix seconds
    by: str  # who made it, in their own words
    version: int = RECORD_VERSION


class JobSpec(StoredValue, frozen=True, kw_only=True, tag="job-spec"):
    """What a job trains, the same from every worker; a sample has `sample_tokens` tokens in the mean. profile:
    what was measured of the model before the job (None: nothing, seconds are guessed from the shapes). state:
    who keeps its optimizer's state. first: a digest of the values that the model has by itself (empty: they are
    made by name and seed); it matters until something was trained. numbers: of master weights and gradients,
    where modules compute in others. recompute: whether stages may make their activations again where memory
    demands it, or must; recomputed: blocks that do so under every plan. shifts: its dataset can be
    read in sequences of another length (`at_length`). peers: version of what its ranks exchange."""

    job: str
    model: ModelSpec
    global_batch: int
    micro_batch: int
    samples: int
    sample_tokens: float
    seed: int
    profile: ModelProfile | None = None
    state: StatePolicy = StatePolicy()
    first: str = ""
    numbers: Numbers | None = None
    recompute: bool | Literal["always"] = False
    recomputed: tuple[int, ...] = ()
    shifts: bool = False
    peers: int = PEERS_VERSION
    version: int = RECORD_VERSION

    def __post_init__(self) -> None:
        if self.micro_batch < 1 or self.global_batch % self.micro_batch:
            refuse(
                f"global_batch {self.global_batch} does not divide into micro-batches of {self.micro_batch}: "
                f"choose a multiple of {self.micro_batch}"
            )


class Vote(Value, frozen=True, kw_only=True):
    """What the vote of a step decided: mean loss, gradient norm and target count, tokens, whether its update is
    made. Whoever kept the step's reduced gradients can make the update from it. loss, norm: None where they are
    not finite, for which JSON has no number."""

    step: int
    loss: float | None
    norm: float | None
    count: float
    tokens: int
    apply: bool


class Recovery(Value, frozen=True, kw_only=True):
    """What a proposal goes on from after a fence. sources: of the plan `old`, the devices whose copies live,
    with their incarnations; after it all are at `step`. vote: of the last step, for those that had not heard
    its outcome; None where all had. stale: sources whose parameters are true only where they keep the state.

    Where no living copies are whole, `snapshots` says of every member of `old` which source reads the snapshot
    of its share at `step` from its own agent; what anybody holds beside that is of no use.
    """

    fence: int
    step: int
    sources: dict[str, str]
    vote: Vote | None = None
    stale: tuple[str, ...] = ()
    snapshots: dict[str, str] = msgspec.field(default_factory=dict)


class Thrown(Value, frozen=True, kw_only=True):
    """An exception that the script's own code raised on a device, after `step` updates; kind: its class."""

    device: str
    step: int
    kind: str
    text: str
    traceback: str


class Fence(StoredValue, frozen=True, kw_only=True, tag="fence"):
    """Every number up to this one is closed, and `gone` (device to incarnation) are fenced off: what they do
    from now on is no part of the job. `thrown`: the last exceptions of the script's own code, for a new leader,
    which is to know that a step was tried before."""

    number: int
    epoch: int
    gone: dict[str, str]
    reason: str
    thrown: tuple[Thrown, ...] = ()
    version: int = RECORD_VERSION


class Proposal(StoredValue, frozen=True, kw_only=True, tag="proposal"):
    """A plan that the members of `old` and `plan` are to prepare. One is open at a time. With a `recovery` it
    is not voted: its members move as soon as they are ready. Without an `old` the state comes from the first of
    `checkpoints` that all members can read; with none of them it is made anew."""

    number: int
    epoch: int
    plan: Plan
    old: Plan | None
    recovery: Recovery | None = None
    status: Literal["open", "aborted"] = "open"
    reason: str = ""
    checkpoints: tuple[str, ...] = ()
    in_place: bool = False
    version: int = RECORD_VERSION


class PlanRecord(StoredValue, frozen=True, kw_only=True, tag="running-plan"):
    """The plan that the job runs, recorded from the first report of a swap; `step` updates were applied."""

    plan: Plan
    epoch: int
    step: int
    version: int = RECORD_VERSION


class HistoryRecord(StoredValue, frozen=True, kw_only=True, tag="plan-history"):
    """Why a plan was made, from what: enough to make it again."""

    number: int
    plan: Plan
    problem: Problem
    reason: str
    version: int = RECORD_VERSION


class PublishedCheckpoint(Value, frozen=True, kw_only=True):
    """A checkpoint by its folder's name: the state after `step` updates, written under this plan."""

    name: str
    step: int
    plan: int


class CheckpointsRecord(StoredValue, frozen=True, kw_only=True, tag="checkpoints"):
    """The checkpoints of a job that may get their names, the newest last. Bounded: what lies on disk under its
    final name was in here once."""

    published: tuple[PublishedCheckpoint, ...]
    epoch: int
    version: int = RECORD_VERSION


class OutRecord(StoredValue, frozen=True, kw_only=True, tag="torchrun-excluded"):
    """A torchrun in restart mode that is to take no part in further rounds, and why."""

    torchrun: str
    epoch: int
    reason: str
    version: int = RECORD_VERSION


class DoneRecord(StoredValue, frozen=True, kw_only=True, tag="job-done"):
    """The job is over: its last vote was reported, or it stopped for a reason. `at`: when, in unix seconds (0:
    release 0.1 did not say)."""

    step: int
    epoch: int
    reason: str = ""
    at: float = 0.0
    version: int = RECORD_VERSION


class SchemaRecord(StoredValue, frozen=True, kw_only=True, tag="schema"):
    """The version of all keys and records of the cluster, and the release of the leader that wrote it when it
    took over."""

    release: str
    version: int = SCHEMA_VERSION


def read_schema(data: bytes) -> SchemaRecord:
    """The cluster's schema record, of any version. Raises `msgspec.DecodeError` with the remedy."""
    try:
        return decoded_as(SchemaRecord, data)
    except msgspec.DecodeError as error:
        raise msgspec.DecodeError(
            f"the store's schema record cannot be read by elasticd {__version__} ({error}): run the release "
            "that wrote it; if no elasticd did, delete the key"
        ) from None


def schema_apart(record: SchemaRecord) -> str:
    """Returns why this release cannot work beside the leader that wrote this record, or an empty string."""
    return version_refusal("the store's schema", record.version, SCHEMA_VERSION, record.release)


def schema_refusal(data: bytes) -> str:
    """Returns why this release does not start on a cluster with this schema record, or an empty string."""
    try:
        return schema_apart(read_schema(data))
    except msgspec.DecodeError as error:
        return str(error)


def encode(record: msgspec.Struct) -> bytes:
    """A record as it is stored."""
    return msgspec.json.encode(record)


#: Of a record that is stored whole.
NO_PARTS: Mapping[str, bytes] = {}


def decode(data: bytes, kind: type[T], parts: Mapping[str, bytes] = NO_PARTS) -> T:
    """A record, of whose job these parts are stored (`elasticd.codec.record_parts`). Raises
    `msgspec.DecodeError` that names the field, or both versions of one that is too new."""
    return decode_stored(whole(data, parts), kind)


def decode_at(key: str, data: bytes, kind: type[T], parts: Mapping[str, bytes] = NO_PARTS) -> T:
    """The record at a key of the store. Raises `msgspec.DecodeError` that names the key too."""
    try:
        return decode(data, kind, parts)
    except msgspec.DecodeError as error:
        raise msgspec.DecodeError(f"the record {shown(key)!r}: {error}") from None
