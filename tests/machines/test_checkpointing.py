"""When checkpoints begin, close and are given up: all interleavings of threads, votes and switches of plans."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from elasticd.machines.worker import checkpointing
from elasticd.machines.worker.checkpointing import Begin, CheckpointState, Close, GiveUp, Skip, Status
from tests.sizes import examples


@dataclass(eq=False)
class Rank:
    """A rank with its thread: what the effects asked of it, and what it is at. Two that stand alike are two."""

    state: CheckpointState
    thread: tuple[str, int] | None = None
    done: list[str] = field(default_factory=list)

    def take(self, effects: tuple[checkpointing.CheckpointEffect, ...]) -> None:
        for effect in effects:
            match effect:
                case Begin(step=step):
                    assert self.thread is None, "copied over what is still being written"
                    self.thread = ("write", step)
                case Close(step=step):
                    assert self.thread is None
                    self.thread = ("close", step)
                case GiveUp(step=step):
                    # it follows what is under way, on the same thread
                    self.thread = ("let go", step)
                case Skip():
                    self.done.append("skip")

    def work(self, ok: bool) -> None:
        """The thread finishes what it is at."""
        if self.thread is None:
            return
        what, step = self.thread
        self.thread = None
        if what == "write":
            self.state = checkpointing.wrote(self.state, step, ok=ok)
        else:
            self.state = checkpointing.done(self.state, step)
            self.done.append(f"{what} {step}" + ("" if ok else " failed"))


def vote(ranks: list[Rank], step: int, words: list[int] | None = None, *, last: bool = False) -> None:
    words = [rank.state.word for rank in ranks] if words is None else words
    decided = set()
    for index, rank in enumerate(ranks):
        due = checkpointing.due(rank.state, step) or (last and not any(words))
        rank.state, effects = checkpointing.voted(rank.state, step, words, index, now_due=due)
        decided.add(tuple(effect for effect in effects if isinstance(effect, Begin | Skip)))
        rank.take(effects)
    assert len(decided) == 1, "some begin and others do not"


def ranks(count: int, every: int = 2) -> list[Rank]:
    return [Rank(state=CheckpointState(every=every)) for _ in range(count)]


def test_a_checkpoint_is_closed_by_the_first_rank_once_all_have_written() -> None:
    gang = ranks(3)
    vote(gang, 1)
    assert all(rank.thread is None for rank in gang)
    vote(gang, 2)
    assert all(rank.thread == ("write", 2) for rank in gang)
    gang[0].work(True)
    gang[1].work(True)
    vote(gang, 3)
    assert gang[0].state.status is Status.WRITTEN, "one has not written"
    gang[2].work(True)
    vote(gang, 4)
    assert gang[0].thread == ("close", 2)
    assert gang[0].done == ["skip"], "step 4 was due"
    assert [rank.state.word for rank in gang[1:]] == [0, 0]
    vote(gang, 6)
    assert gang[1].done == ["skip", "skip"], "the first is not done with it"
    gang[0].work(True)
    vote(gang, 8)
    assert all(rank.thread == ("write", 8) for rank in gang)


def test_a_checkpoint_that_one_rank_was_asked_for_is_begun_by_all_and_once() -> None:
    gang = ranks(3, every=100)
    gang[1].state = checkpointing.asked(gang[1].state)
    vote(gang, 7)
    assert all(rank.thread == ("write", 7) for rank in gang)
    for rank in gang:
        rank.work(True)
    vote(gang, 8)
    gang[0].work(True)
    vote(gang, 9)
    assert all(rank.thread is None for rank in gang)
    assert not any(rank.state.word for rank in gang)


def test_one_that_is_asked_for_while_another_is_written_follows_it() -> None:
    gang = ranks(2)
    vote(gang, 2)
    gang[0].state = checkpointing.asked(gang[0].state)
    vote(gang, 3)
    assert all(rank.thread == ("write", 2) for rank in gang)
    for rank in gang:
        rank.work(True)
    vote(gang, 5)
    gang[0].work(True)
    assert gang[0].state.word == Status.ASKED
    vote(gang, 7)
    assert all(rank.thread == ("write", 7) for rank in gang)
    assert not any(rank.done.count("skip") for rank in gang), "nothing was due"


def test_a_word_that_came_too_late_for_the_vote_counts_for_the_checkpoint_that_begins_by_it() -> None:
    gang = ranks(2, every=100)
    gang[0].state = checkpointing.asked(gang[0].state)
    words = [rank.state.word for rank in gang]
    gang[1].state = checkpointing.asked(gang[1].state)
    vote(gang, 3, words)
    assert not any(rank.state.asked for rank in gang)


def test_a_last_checkpoint_is_not_kept_waiting_by_one_that_is_asked_for() -> None:
    gang = ranks(2, every=100)
    gang[1].state = checkpointing.asked(gang[1].state)
    assert [rank.state.busy_word for rank in gang] == [0, 0]


def test_a_job_that_goes_back_gives_up_the_checkpoint_of_a_later_step_and_begins_none() -> None:
    ranks = [Rank(CheckpointState(every=10)) for _ in range(2)]
    vote(ranks, 10)
    ranks[0].work(ok=True)
    for rank in ranks:
        assert checkpointing.went_back(rank.state, 10) == (rank.state, ()), (
            "it is of the state that is in force"
        )
        rank.state, effects = checkpointing.went_back(rank.state, 7)
        assert effects == (GiveUp(step=10, reason="the job went back to step 7"),)
        rank.take(effects)
        rank.work(ok=True)
        assert checkpointing.went_back(rank.state, 7) == (rank.state, ())
    assert [rank.done for rank in ranks] == [["let go 10"], ["let go 10"]]
    asked = checkpointing.asked(ranks[0].state)
    for due, state in ((True, ranks[1].state), (False, asked)):
        words = [state.word, 0]
        after, effects = checkpointing.voted(state, 10, words, 0, now_due=due, begins=False)
        assert (after, effects) == (state, ()), "one that was asked for is made later"
    vote(ranks, 10)
    assert [rank.thread for rank in ranks] == [("write", 10)] * 2, "the steps are made again"


def test_a_rank_that_cannot_write_lets_all_give_up() -> None:
    gang = ranks(2)
    vote(gang, 2)
    gang[1].work(False)
    vote(gang, 3)
    assert all(rank.thread == ("let go", 2) for rank in gang)
    for rank in gang:
        rank.work(True)
    vote(gang, 4)
    assert all(rank.thread == ("write", 4) for rank in gang)


def test_a_checkpoint_outlives_a_switch_that_keeps_its_members_and_not_one_that_loses_one() -> None:
    gang = ranks(2)
    vote(gang, 2)
    for rank in gang:
        rank.work(True)
    joined = [ranks(1)[0], *gang]  # another rank order, and one more
    vote(joined, 3)
    assert [rank.thread for rank in joined] == [None, ("close", 2), None]
    gang = ranks(3)
    vote(gang, 2)
    for rank in gang:
        rank.work(True)
    vote(gang[:2], 3)
    assert [rank.thread for rank in gang[:2]] == [("let go", 2)] * 2


@settings(max_examples=examples(150), phases=[Phase.generate])
@given(st.data())
def test_all_decide_alike_whatever_the_threads_and_the_plans_do(data: st.DataObject) -> None:
    everybody = ranks(4)
    gang = everybody[: data.draw(st.integers(1, 4))]
    closed: list[int] = []
    for step in range(1, 25):
        words = []
        for rank in gang:
            # a thread may finish before the record is made, or after it and before the vote is folded
            if data.draw(st.booleans()):
                rank.work(data.draw(st.integers(0, 9)) > 0)
            words.append(rank.state.word)
        for rank in everybody:
            if data.draw(st.integers(0, 3)) == 0:
                rank.work(data.draw(st.integers(0, 9)) > 0)
            if data.draw(st.integers(0, 9)) == 0:  # the leader's word comes at any time
                rank.state = checkpointing.asked(rank.state)
        begun = {rank.state.step for rank in gang if rank.thread and rank.thread[0] == "write"}
        assert len(begun) <= 1, "two checkpoints at once"
        vote(gang, step, words)
        closing = [rank for rank in gang if rank.thread and rank.thread[0] == "close"]
        assert len(closing) <= 1
        closed += [rank.state.step for rank in closing]
        if data.draw(st.integers(0, 9)) == 0:
            gang = data.draw(st.permutations(everybody))[: data.draw(st.integers(1, 4))]
            for rank in everybody:
                if rank not in gang:
                    rank.state, effects = checkpointing.left(rank.state)
                    rank.take(effects)
    for rank in everybody:
        rank.work(True)
        assert rank.state.status is not Status.BUSY
