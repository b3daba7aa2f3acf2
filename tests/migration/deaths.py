"""Five gloo processes switch, and one is killed at each of its steps: prints what became of the others as JSON.

    python -m tests.migration.deaths VICTIM EVERY

A step is an operation of the victim's transport (schema gathered, data posted and sent, seals, receipts) or of
the all-gather of ok. For each (or each EVERY-th) step the ranks are forked anew and form their group; the
victim kills itself right before it. The others run the runtime's groups, the real `migrate` and the worker's
machine. This process is the leader: it hears from every survivor, and tells those in doubt to swap if one
swapped, else to keep.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from elasticd_migration.local_state import LocalState
from elasticd_migration.migrate import Moved, migrate
from elasticd_migration.transport import Handle, ProcessGroupTransport
from elasticd_planner.layout.layouts import Layouts

from elasticd.machines.worker import switch as sw
from elasticd.runtime.comm.groups import TERMS, Group, PlanGroups
from elasticd.wire.worker import InDoubt, Prepared, StayedOnPlan
from tests.file_key_value import FileKeyValue
from tests.migration.plans import SPEC, plan
from tests.migration.ranks import assert_same_bits, local, members, trained

OLD = Layouts(SPEC, plan(1, [(1, [("n0/0", 3), ("n0/1", 1)]), (2, [("n1/0", 1)])]))
NEW = Layouts(SPEC, plan(2, [(2, [("n0/0", 1), ("n1/1", 2)]), (1, [("n2/0", 1)])]))
MEMBERS = members(OLD.plan, NEW.plan)
WHOLE = trained()
LIMIT = 20_000
#: Seconds after which a survivor that says nothing counts as stuck.
PATIENCE = 60.0
#: The steps behind the last one of the transport.
LAST = ("ok", "during ok", "after ok")


class Steps:
    """Counts the steps of a rank and kills it right before one of them (-1: never)."""

    def __init__(self, fatal: int) -> None:
        self.fatal = fatal
        self.names: list[str] = []

    def next(self, name: str) -> None:
        if len(self.names) == self.fatal:
            os.kill(os.getpid(), signal.SIGKILL)
        self.names.append(name)


class Stepping(ProcessGroupTransport):
    steps: Steps

    def send(self, destination: int, tensor: torch.Tensor, *, channel: int = 0) -> int:
        self.steps.next(f"send {('data', 'seal', 'receipt')[channel]} to {destination}")
        return super().send(destination, tensor, channel=channel)

    def receive(self, source: int, tensor: torch.Tensor, *, channel: int = 0) -> Handle:
        self.steps.next(f"post {('data', 'seal', 'receipt')[channel]} from {source}")
        return super().receive(source, tensor, channel=channel)

    def all_gather(self, payload: bytes) -> list[bytes]:
        self.steps.next("gather schemas")
        return super().all_gather(payload)


class Rank:
    """One rank: the machine, and what its effects do."""

    def __init__(self, folder: str, me: str, steps: Steps, deaf: bool) -> None:
        self.me, self.steps, self.deaf = me, steps, deaf
        store = FileKeyValue(Path(folder) / "store")
        self.plan_groups = PlanGroups("move", me, "127.0.0.1", store, seconds=PATIENCE)
        self.group: Group = self.plan_groups.group(MEMBERS, "transition")
        self.group.all_gather(torch.zeros(1))  # nobody dies before all have made it
        self.before = local(WHOLE, OLD, me)
        self.after: LocalState | None = None
        self.state = sw.SwitchState(
            number=1, seen=1, trains=me in OLD.plan.members, phase=sw.SwitchPhase.STANDBY
        )
        if self.state.trains:
            self.state = sw.SwitchState(number=1, seen=1, trains=True, phase=sw.SwitchPhase.TRAINING)
        self.outcome = ""

    def run(self) -> str:
        """What this rank reports: swapped, kept or doubt."""
        self.feed(sw.Proposed(number=2, joins=self.me in NEW.plan.members))
        self.feed(Prepared(number=2))
        if self.state.trains:
            self.feed(sw.Voting())
            self.feed(sw.Voted(prepared=(2,) * len(OLD.plan.members)))
        return self.outcome

    def feed(self, event: sw.SwitchEvent) -> None:
        self.state, effects = sw.step(self.state, event)
        for effect in effects:
            match effect:
                case sw.MoveState():
                    self.feed(self.moved())
                case sw.AllGatherOk(ok=ok):
                    self.feed(self.said(ok))
                case sw.Swap():
                    self.outcome = "swapped"
                case sw.SendToLeader(message=StayedOnPlan()):
                    self.outcome = "kept"
                case sw.SendToLeader(message=InDoubt()):
                    self.outcome = "doubt"

    def moved(self) -> sw.SwitchEvent:
        transport = Stepping(self.group.backend, self.group.members, self.me, self.group.all_gather)
        transport.steps = self.steps
        try:
            result: Moved = migrate(OLD, NEW, self.before, transport, limit=LIMIT)
        except Exception as error:
            self.plan_groups.shut()  # frees the others, who learn it the same way
            return sw.MoveFailed(number=2, reason=f"{self.me}: {error}")
        self.after = result.state
        self.kept = transport  # its last messages may be on their way
        return sw.StateMoved(number=2)

    def said(self, ok: bool) -> sw.SwitchEvent:
        self.steps.next(LAST[0])
        try:
            if self.steps.fatal == len(self.steps.names):
                heir = 1 if self.group.rank == 0 else 0
                self.group.send(torch.tensor([int(ok)]), heir, TERMS)  # one of the others hears it
            self.steps.next(LAST[1])
            oks = self.group.all_gather(torch.tensor([int(ok)]))
            self.steps.next(LAST[2])
            if self.deaf:
                raise RuntimeError("lost the others before the answer came")
        except RuntimeError as error:
            self.plan_groups.shut()
            return sw.GatherFailed(number=2, reason=str(error))
        return sw.Gathered(number=2, oks=tuple(bool(each) for each in oks))

    def check(self, number: int) -> bool:
        """Whether all that this rank is to hold under that plan is here, bit by bit."""
        state = self.after if number == 2 else self.before
        assert state is not None
        assert_same_bits(state, local(WHOLE, NEW if number == 2 else OLD, self.me))
        return True


def rank_main(folder: str, me: str, fatal: int, deaf: bool, report: int, word: int) -> None:
    """In a forked process; reports by lines over pipes."""
    rank = Rank(folder, me, Steps(fatal), deaf)
    outcome = rank.run()
    os.write(report, json.dumps({"outcome": outcome, "steps": rank.steps.names}).encode() + b"\n")
    number = int(os.read(word, 1))
    os.write(report, json.dumps({"number": number, "whole": rank.check(number)}).encode() + b"\n")


class Gang:
    """The forked ranks of one case."""

    def __init__(self, folder: str, victim: str, fatal: int, deaf: str) -> None:
        self.pids: dict[str, int] = {}
        self.reports: dict[str, int] = {}
        self.words: dict[str, int] = {}
        self._texts: dict[str, bytes] = dict.fromkeys(MEMBERS, b"")
        for me in MEMBERS:
            read, report = os.pipe()
            word, write = os.pipe()
            pid = os.fork()
            if pid == 0:
                try:
                    rank_main(folder, me, fatal if me == victim else -1, me == deaf, report, word)
                finally:
                    os._exit(0)
            os.close(report)
            os.close(word)
            self.pids[me], self.reports[me], self.words[me] = pid, read, write

    def hear(self, who: Sequence[str]) -> dict[str, dict[str, Any]]:
        """One line of each; of one that says nothing in time, or died, nothing."""
        found: dict[str, dict[str, Any]] = {}
        open_ends = {self.reports[me]: me for me in who}
        deadline = time.monotonic() + PATIENCE
        while open_ends and (left := deadline - time.monotonic()) > 0:
            for end in select.select(list(open_ends), [], [], left)[0]:
                me, text = open_ends[end], os.read(end, 1 << 16)
                self._texts[me] += text
                if b"\n" in self._texts[me]:
                    line, _, self._texts[me] = self._texts[me].partition(b"\n")
                    found[me] = json.loads(line)
                if not text or me in found:
                    del open_ends[end]
        return found

    def tell(self, me: str, number: int) -> None:
        os.write(self.words[me], str(number).encode())

    def end(self) -> None:
        for pid in self.pids.values():
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        for end in (*self.reports.values(), *self.words.values()):
            os.close(end)


def case(victim: str, fatal: int, deaf: str = "") -> dict[str, Any]:
    """One death: how it ended for those who live, and the steps of the victim if it did not die. `deaf`: who
    takes part in the all-gather of ok and does not hear what came of it."""
    with tempfile.TemporaryDirectory(prefix="elasticd-deaths-") as folder:
        gang = Gang(folder, victim, fatal, deaf)
        try:
            heard = gang.hear(MEMBERS)
            living = [me for me in MEMBERS if me != victim or fatal < 0]
            outcomes = {me: heard[me]["outcome"] if me in heard else "stuck" for me in living}
            number = 2 if "swapped" in outcomes.values() else 1
            for me in living:
                own = {"swapped": 2, "kept": 1}.get(outcomes[me], number)
                gang.tell(me, own)
            ended = gang.hear(living)
        finally:
            gang.end()
    return {
        "outcomes": outcomes,
        "ended": {me: [ended[me]["number"], ended[me]["whole"]] if me in ended else None for me in living},
        "steps": heard[victim]["steps"] if fatal < 0 else [],
    }


def main(victim: str, every: int) -> None:
    torch.set_num_threads(1)
    quiet = case(victim, -1)
    steps = quiet["steps"]
    chosen = sorted({*range(0, len(steps), every), *range(len(steps) - len(LAST), len(steps))})
    cases = [{"before": steps[fatal], **case(victim, fatal)} for fatal in chosen]
    cases.append({"before": "deaf", **case(victim, len(steps) - 1, deaf="n0/1")})
    print(json.dumps({"quiet": quiet, "cases": cases}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
