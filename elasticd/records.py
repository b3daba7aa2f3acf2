"""The records of the store: the keys under one cluster's prefix and the value behind each.

The agents write `nodes/` and `members/` under their lease; the leader writes the rest, each write fenced by
a comparison with its leader key. `epoch` is that key's create revision: orders with a lower one are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeVar

import msgspec
from elasticd_planner.cost.model_profile import ModelProfile, Numbers
from elasticd_planner.problem import MeshProblem, ModuleProblem, Problem
from elasticd_planner.profiling.samples import ModelBytes
from elasticd_planner.spec.cluster import Device
from elasticd_planner.spec.mesh import JobPlan, MeshModel, MeshPlan
from elasticd_planner.spec.model import ModelSpec, Specs
from elasticd_planner.spec.packed_sequences import PackedSequences
from elasticd_planner.spec.plan import Plan, StatePolicy
from elasticd_planner.spec.sequence_lengths import Lengths
from elasticd_planner.value import StoredValue, Value, refuse

from elasticd.codec.decoding import decode_stored, decoded, decoded_as, shown, skip, tag_of, version_refusal
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
CLUSTER_KEYS = ("schema", "leader", "config", "config-history", "drains", "journal", "nodes", "members", "jobs")
LEADER_KEYS = ("spec", "plan", "proposal", "fence", "done", "checkpoints", "profile", "stop", "history")
OTHER_KEYS = ("members", "rendezvous", "ranks", "parts")
#: Those of a job's keys that live as long as it does, and are changed by each step of its control.
LASTING: tuple[Literal["plan", "fence"], ...] = ("plan", "fence")
#: Digits of a number in a key, at most: those of 64 bits.
MOST_DIGITS = 18
T = TypeVar("T", bound=msgspec.Struct)
S = TypeVar("S")

# fmt: off
#: How a key below a job's begins; all of them begin with the empty one.
JobPart = Literal[
    "", "spec", "plan", "proposal", "fence", "done", "checkpoints", "profile", "stop", "history/", "ranks/",
    "parts/"
]
# fmt: on


class Keys(Value, frozen=True, kw_only=True):
    """The keys of one cluster."""

    cluster: str  # the cluster's name

    def __post_init__(self) -> None:
        if not self.cluster or "/" in self.cluster:
            refuse(f"cluster name {self.cluster!r} must not be empty or contain '/'")

    @property
    def root(self) -> str:
        """The prefix of all keys."""
        return f"/elasticd/{self.cluster}/"

    @property
    def leader(self) -> str:
        """The key that its holder leads by."""
        return self.root + "leader"

    @property
    def schema(self) -> str:
        """Which release's records these are (`SchemaRecord`)."""
        return self.root + "schema"

    @property
    def config(self) -> str:
        """The key of the changes of detection and policy while running."""
        return self.root + "config"

    def config_history(self, number: int) -> str:
        """One change of the configuration."""
        return f"{self.config}-history/{number:08d}"

    @property
    def drains(self) -> str:
        """The prefix of users' wishes to drain nodes."""
        return self.root + "drains/"

    @property
    def journal(self) -> str:
        """The prefix of what the leader told: events, and the steps of jobs."""
        return self.root + "journal/"

    @property
    def nodes(self) -> str:
        """The prefix of all nodes."""
        return self.root + "nodes/"

    def node(self, node: str) -> str:
        """One node (`NodeRecord`)."""
        return self.nodes + node

    @property
    def jobs(self) -> str:
        """The prefix of all jobs."""
        return self.root + "jobs/"

    def job(self, job: str, part: JobPart) -> str:
        """A key of a job, or the prefix of several."""
        return f"{self.jobs}{job}/{part}"

    @property
    def members(self) -> str:
        """The prefix of all workers: no job's, so that none of them is told to each agent."""
        return self.root + "members/"

    def member(self, job: str, device: str) -> str:
        """One worker (`MemberRecord`)."""
        return f"{self.members}{job}/{device.replace('/', ':')}"

    def rendezvous(self, job: str) -> str:
        """The prefix of what torchruns in restart mode, and nobody else, keep through their agents."""
        return f"{self.jobs}{job}/rendezvous/"

    def history(self, job: str, number: int) -> str:
        """A plan of a job (`HistoryRecord`), by its number."""
        return self.job(job, "history/") + f"{number:08d}"

    def lasts(self, key: str) -> bool:
        """Returns True if this is a job's plan or fence."""
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
        """Returns True if this release does not know the key, which is counted and logged once for all keys
        like it."""
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
    """A node whose agent lives: its devices, its addresses, and whether it is being drained."""

    node: str  # the node's name
    devices: tuple[Device, ...]  # its devices with their memory, by local rank
    address: str  # host that its workers listen on for the ranks of other nodes
    agent: str  # id of this start of its agent
    emulated: bool = False  # its devices run at an emulated speed
    snapshots: str = ""  # "host:port" where other agents send it snapshots to keep (empty: nowhere)
    certificate: str = ""  # PEM by which `snapshots` is known
    draining: bool = False  # its devices are to be left, and no plan takes them up again
    #: machine and network that it is on (`elasticd.system.network_addresses.host`); nodes of one host reach
    #: each other by loopback
    host: str = ""
    #: "host:port" where other agents test whether they reach this node on the data network (empty: an older
    #: release)
    reach: str = ""
    version: int = RECORD_VERSION


class MemberRecord(StoredValue, frozen=True, kw_only=True, tag="member"):
    """A worker process: the device that it drives and this start of it."""

    device: str  # "node/local rank"
    incarnation: str  # id of this start of the process
    pid: int  # process id on its node
    version: int = RECORD_VERSION


class ConfigRecord(StoredValue, frozen=True, kw_only=True, tag="config-change"):
    """A change of the configuration while running. The newest is in force; each is also kept in the history."""

    number: int  # counts the changes, from 1
    #: what differs from the coordinators' files, by encoded dotted key
    values: dict[str, bool | int | float | str]
    at: float  # unix seconds
    by: str  # who made the change, in their own words
    version: int = RECORD_VERSION


class ModuleSpec(Value, frozen=True, kw_only=True):
    """One module of a model of several."""

    name: str
    model: ModelSpec  # its tensors
    items: str = ""  # the key under which a sample has the items that it runs on (empty: it runs on samples)
    takes: dict[str, str] = msgspec.field(default_factory=dict)  # by key in the batch: whose output it takes
    items_a_sample: float = 0.0  # in the mean
    rows_an_item: float = 0.0  # [tokens] that its blocks work on, in the mean (0: not known)
    output_bytes: float = 0.0  # of what its head gives of an item, in the mean (0: not known)
    profile: ModelProfile | None = None  # of items, measured before the job (None: guessed from the shapes)


class JobSpec(StoredValue, frozen=True, kw_only=True, tag="job-spec"):
    """The model, batch and settings of a job, the same from every worker."""

    job: str  # the job's name
    #: tensors of the model, with their shapes and how each may be sharded; of several modules those of the one
    #: that computes the loss
    model: ModelSpec
    global_batch: int  # samples of a step, over all pipelines
    micro_batch: int  # samples of a micro-batch
    samples: int  # samples of the dataset
    sample_tokens: float  # tokens of a sample, in the mean
    seed: int  # of first values, the order of samples and dropout
    #: measured of the model before the job (None: nothing, seconds are guessed from the shapes)
    profile: ModelProfile | None = None
    #: bytes that its sections keep and have alive, as the job's first worker measured them without a profile
    #: (None: it is another worker, or they follow from the shapes)
    measured_bytes: ModelBytes | None = None
    state: StatePolicy = StatePolicy()  # who keeps the optimizer's state
    #: digest of the model's first values (empty: they are made by name and seed); matters until a step was
    #: trained
    first: str = ""
    #: types of master weights and gradients, where modules compute in others
    numbers: Numbers | None = None
    #: whether stages may recompute activations where memory demands it, or must ("always")
    recompute: bool | Literal["always"] = False
    recomputed: tuple[int, ...] = ()  # blocks that recompute under every plan
    #: whether TP groups may have slices of the tokens between cut modules where memory demands it, or must
    sequence_parallel: bool | Literal["always"] = False
    packed: PackedSequences | None = None  # the sequences of a step, as known before it starts (None: padded)
    global_tokens: int = 0  # tokens of a step, which has samples by these (0: it has `global_batch` samples)
    plan: Plan | None = None  # the first plan, where the user gives it
    keep_plan: bool = False  # whether a plan stays while its devices do
    shifts: bool = False  # its dataset has `at_length`; only leaders of 0.1 ask, who compare it; until 0.3
    modules: tuple[ModuleSpec, ...] = ()  # of a model of several all of them (empty: it has one)
    peers: int = PEERS_VERSION  # version of what its ranks exchange with each other
    version: int = RECORD_VERSION

    def __post_init__(self) -> None:
        if self.micro_batch < 1 or self.global_batch % self.micro_batch:
            refuse(
                f"global_batch {self.global_batch} does not divide into micro-batches of {self.micro_batch}: "
                f"choose a multiple of {self.micro_batch}"
            )

    @property
    def specs(self) -> Specs:
        """The tensors of the model, or of each of its modules."""
        return {module.name: module.model for module in self.modules} if self.modules else self.model


class MeshJobSpec(StoredValue, frozen=True, kw_only=True, tag="mesh-job-spec"):
    """The model of a job whose loop is the user's own, on a device mesh; the same from every worker."""

    job: str  # the job's name
    model: MeshModel  # the tensors, and the meshes that it may have
    global_batch: int  # samples of a step, over all lanes
    samples: int  # samples of the dataset
    seed: int  # of the order of samples
    #: digest of the model's first values (empty: not known); matters until a step was trained
    first: str = ""
    keep_plan: bool = False  # whether a plan stays while its devices do
    peers: int = PEERS_VERSION  # version of what its ranks exchange with each other
    version: int = RECORD_VERSION

    def __post_init__(self) -> None:
        if self.global_batch < 1:
            refuse(f"batch {self.global_batch}: a step needs a sample at least")

    @property
    def specs(self) -> MeshModel:
        """The tensors of the model."""
        return self.model


#: What a job trains: a model that elasticd cuts, or a loop of the user's own on a mesh.
AnyJobSpec = JobSpec | MeshJobSpec


class Vote(Value, frozen=True, kw_only=True):
    """The outcome of a step's vote. Every rank that kept the step's reduced gradients can make the update from
    it."""

    step: int  # index of the step
    loss: float | None  # mean per target; None where it is not finite, for which JSON has no number
    norm: float | None  # of the mean loss's gradient, before clipping; None where it is not finite
    count: float  # targets of the step, over all ranks
    tokens: int  # tokens of the step, over all ranks
    apply: bool  # the update is made
    #: a bit for each trained parameter in the model's order, the first in the lowest, as a hexadecimal number:
    #: no rank has a gradient of it, and the optimizer skips it (empty: none)
    unreached: str = ""
    #: mean over targets and blocks of the balance losses of routers, without their factor; None: there are none
    balance: float | None = None


class Recovery(Value, frozen=True, kw_only=True):
    """The state that a proposal goes on from after a fence.

    Where the copies that live are no complete state, `snapshots` says which source reads which member's share:
    those of members whose boxes nobody else has, from the same step as the copies; or all (`all_read`).
    """

    fence: int  # number of the fence
    step: int  # updates after which all sources are, at the end of the recovery; -1: as a checkpoint says
    sources: dict[str, str]  # devices of plan `old` whose copies live, with their incarnations
    vote: Vote | None = None  # of the last step, for ranks that had not heard its outcome; None where all had
    #: sources whose parameters are up to date only where they keep the optimizer's state (ZeRO)
    stale: tuple[str, ...] = ()
    #: by member of `old`: the source that reads the snapshot of its share at `step` from its own agent
    snapshots: dict[str, str] = msgspec.field(default_factory=dict)
    #: index of the last step whose update is to be left out, with those before it (-1: of none)
    leave_out: int = -1

    def all_read(self, old: JobPlan) -> bool:
        """Returns True if snapshots of all members of `old` are read, so that no copy on a device is of use."""
        return bool(self.snapshots) and all(member in self.snapshots for member in old.members)


class Thrown(Value, frozen=True, kw_only=True):
    """An exception that the script's own code raised."""

    device: str  # device of the rank that raised it
    step: int  # index of the step that failed, as the script sees it
    kind: str  # name of the exception's class
    text: str  # the exception as a string
    traceback: str  # its traceback, as Python prints it


class Fence(StoredValue, frozen=True, kw_only=True, tag="fence"):
    """Every number up to this one is closed, and processes are fenced off: what they do from now on is no part
    of the job."""

    number: int  # above every number used before
    epoch: int  # of the leader that wrote it
    gone: dict[str, str]  # incarnations that are fenced off, by device
    reason: str  # what happened, for people
    #: last exceptions of the script's own code: a new leader is to know that a step was tried before
    thrown: tuple[Thrown, ...] = ()
    #: the members want an older state, and to leave out the updates from there up to this step's (-1: not)
    back: int = -1
    version: int = RECORD_VERSION


class Proposal(StoredValue, frozen=True, kw_only=True, tag="proposal"):
    """A plan that the members of `old` and `plan` are to prepare. One is open at a time.

    Members vote for it at the end of a step; with a `recovery` there is no vote, and they move as soon as they
    are ready.
    """

    number: int  # above every number used before
    epoch: int  # of the leader that wrote it
    plan: JobPlan  # the plan, bound to the incarnations of its members
    old: JobPlan | None  # the plan that state comes from; None: state comes from `checkpoints`, or is made anew
    recovery: Recovery | None = None  # what it goes on from after a fence
    status: Literal["open", "aborted"] = "open"  # "aborted": its members keep the plan before
    reason: str = ""  # why it was aborted
    checkpoints: tuple[str, ...] = ()  # names, newest first; the first that all members can read is taken
    in_place: bool = False  # state moves in place, since memory does not hold the old copy beside the new one
    #: members of `old` that keep what changes of their old copy in host memory, for the same reason
    aside: tuple[str, ...] = ()
    version: int = RECORD_VERSION


class PlanHead(Value, frozen=True, kw_only=True):
    """Of a plan: the workers that it is bound to."""

    binding: dict[str, str] = msgspec.field(default_factory=dict)  # incarnations of its members, by device


class RecoveryHead(Value, frozen=True, kw_only=True):
    """Of a recovery: the workers whose copies it goes on from."""

    sources: dict[str, str]  # their incarnations, by device


class ProposalHead(Value, frozen=True, kw_only=True, tag="proposal"):
    """The fields of a `Proposal` that an agent reads: which workers the proposal concerns, and whether it is
    open. The fields are those of `Proposal`."""

    number: int
    epoch: int
    plan: PlanHead
    old: PlanHead | None
    recovery: RecoveryHead | None = None
    status: Literal["open", "aborted"] = "open"
    reason: str = ""
    version: int = RECORD_VERSION


class StoredProposal(Value, frozen=True, kw_only=True):
    """A proposal as an agent has it: its head, and its JSON, which the agent passes on to workers as the leader
    wrote it."""

    head: ProposalHead
    stored: msgspec.Raw


class PlanRecord(StoredValue, frozen=True, kw_only=True, tag="running-plan"):
    """The plan that the job runs, recorded from the first report of a swap."""

    plan: JobPlan  # the plan
    epoch: int  # of the leader that wrote it
    step: int  # updates before the first step under it
    version: int = RECORD_VERSION


class HistoryRecord(StoredValue, frozen=True, kw_only=True, tag="plan-history"):
    """Why a plan was made, and from what: enough to make it again."""

    number: int  # of the plan
    plan: Plan  # the plan
    problem: Problem  # what the planner was given
    reason: str  # why it was proposed, for people
    version: int = RECORD_VERSION


class MeshHistoryRecord(StoredValue, frozen=True, kw_only=True, tag="mesh-plan-history"):
    """Why the plan of a mesh was made, and from what: see `HistoryRecord`."""

    number: int  # of the plan
    plan: MeshPlan  # the plan
    problem: MeshProblem  # what the planner was given
    reason: str  # why it was proposed, for people
    version: int = RECORD_VERSION


#: Why a plan of either kind was made.
AnyHistoryRecord = HistoryRecord | MeshHistoryRecord


class ProfileRecord(StoredValue, frozen=True, kw_only=True, tag="job-profile"):
    """Seconds and bytes of a job's model as its steps have taught them since the plan in force was made."""

    profile: ModelProfile  # the newest
    taught_by: int  # number of the plan whose steps it was last fitted to (0: none)
    lengths: Lengths | None = None  # of sequences, that it is for (None: all as the spec says)
    plan: int = 0  # number of the plan in force when it was written
    step_seconds: float | None = None  # predicted of a step under that plan, by this profile
    #: of items, of a job of several modules; the profile is of the one with the loss
    modules: tuple[ModuleProblem, ...] = ()
    version: int = RECORD_VERSION


class PublishedCheckpoint(Value, frozen=True, kw_only=True):
    """A checkpoint that may have its final name."""

    name: str  # of its folder
    step: int  # updates in its state
    plan: int  # number of the plan that wrote it
    dead: bool = False  # the job went back to a step before it: it is no part of the job's history


class CheckpointsRecord(StoredValue, frozen=True, kw_only=True, tag="checkpoints"):
    """The checkpoints of a job that may get their final names. What lies on disk under such a name was in this
    record once."""

    published: tuple[PublishedCheckpoint, ...]  # newest last, a bounded number
    epoch: int  # of the leader that wrote it
    version: int = RECORD_VERSION


class OutRecord(StoredValue, frozen=True, kw_only=True, tag="torchrun-excluded"):
    """A torchrun in restart mode that is to take no part in further rounds."""

    torchrun: str  # its name in the rendezvous
    epoch: int  # of the leader that wrote it
    reason: str  # why, for people
    version: int = RECORD_VERSION


class RestartEndRecord(StoredValue, frozen=True, kw_only=True, tag="restart-job-end"):
    """The end of a job in restart mode, for those that ask later."""

    phase: Literal["finished", "failed", "stopped"]
    epoch: int  # of the leader that wrote it
    step: int  # newest that was reported (0: none was)
    nodes: tuple[str, ...]  # of its torchruns
    restarts: int  # how often its workers were started again
    sentence: str  # all that in words, with why it failed
    failure: str = ""  # the last failure of a worker: its traceback, or its last line (empty: none failed)
    stopped_by: str = ""  # the user who stopped it, or the signal that ended it (empty: neither)
    at: float = 0.0  # unix seconds
    version: int = RECORD_VERSION


class DoneRecord(StoredValue, frozen=True, kw_only=True, tag="job-done"):
    """The job is over: its last vote was reported, or it stopped for a reason."""

    step: int  # updates in all
    epoch: int  # of the leader that wrote it
    reason: str = ""  # why it stopped (empty: it finished)
    orderly: bool = False  # its workers were told to go, by a user who stopped it or by signals, and did
    requested: bool = False  # somebody asked for it, whether they went in order or not
    at: float = 0.0  # unix seconds (0: release 0.1 did not say)
    version: int = RECORD_VERSION


class StopRecord(StoredValue, frozen=True, kw_only=True, tag="job-stop"):
    """A user stops this job, and no leader has ended it yet. Later leaders go on with it."""

    by: str  # the user
    seconds: float  # that its workers have for a last checkpoint
    at: float = 0.0  # unix seconds of the newest wish
    led: float = 0.0  # seconds for which leaders had led then, in all (0: not known)
    version: int = RECORD_VERSION


class DrainRecord(StoredValue, frozen=True, kw_only=True, tag="node-drain"):
    """A user drains this node, or has it used again: also once its agent is another one, or its leader."""

    on: bool  # its devices are to be left
    version: int = RECORD_VERSION


class SchemaRecord(StoredValue, frozen=True, kw_only=True, tag="schema"):
    """The version of all keys and records of the cluster."""

    release: str  # of elasticd on the leader that wrote it as it took over
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


class _Tag(msgspec.Struct):
    """The part of a record that is read before the rest."""

    type: Any = ""


def encode(record: msgspec.Struct) -> bytes:
    """A record as it is stored."""
    return msgspec.json.encode(record)


#: Of a record that is stored whole.
NO_PARTS: Mapping[str, bytes] = {}


def decode(data: bytes, kind: type[T], parts: Mapping[str, bytes] = NO_PARTS) -> T:
    """A record, of whose job these parts are stored (`elasticd.codec.record_parts`). Raises
    `msgspec.DecodeError` that names the field, or both versions of one that is too new."""
    return decode_stored(whole(data, parts), kind)


def decode_spec(data: bytes, parts: Mapping[str, bytes] = NO_PARTS) -> AnyJobSpec:
    """The spec of a job of either kind. Raises `msgspec.DecodeError` as `decode` does."""
    data = whole(data, parts)
    return decode_stored(data, MeshJobSpec) if _has_tag(data, MeshJobSpec) else decode_stored(data, JobSpec)


def decode_history(data: bytes, parts: Mapping[str, bytes] = NO_PARTS) -> AnyHistoryRecord:
    """Why a plan of either kind was made. Raises `msgspec.DecodeError` as `decode` does."""
    data = whole(data, parts)
    if _has_tag(data, MeshHistoryRecord):
        return decode_stored(data, MeshHistoryRecord)
    return decode_stored(data, HistoryRecord)


def _has_tag(data: bytes, kind: type[msgspec.Struct]) -> bool:
    return bool(decoded_as(_Tag, data).type == tag_of(kind))


def decode_proposal(data: bytes, parts: Mapping[str, bytes] = NO_PARTS) -> StoredProposal:
    """A job's proposal, of which the head alone is decoded. Raises `msgspec.DecodeError` as `decode` does; also
    for bytes that are no JSON, so that the rest can be passed on."""
    data = whole(data, parts)
    head = decode_stored(data, ProposalHead, partial=True)
    decoded(bytes.decode, data)  # a decoder does not look at the text of what it skips
    return StoredProposal(head=head, stored=decoded_as(msgspec.Raw, data))


def decode_at(key: str, data: bytes, kind: type[T], parts: Mapping[str, bytes] = NO_PARTS) -> T:
    """The record at a key of the store. Raises `msgspec.DecodeError` that names the key too."""

    def reader(data: bytes, parts: Mapping[str, bytes]) -> T:
        return decode(data, kind, parts)

    return read_at(key, data, reader, parts)


def read_at(
    key: str,
    data: bytes,
    reader: Callable[[bytes, Mapping[str, bytes]], S],
    parts: Mapping[str, bytes] = NO_PARTS,
) -> S:
    """The record at a key of the store, by its own reader. Raises as `decode_at`."""
    try:
        return reader(data, parts)
    except msgspec.DecodeError as error:
        raise msgspec.DecodeError(f"the record {shown(key)!r}: {error}") from None
