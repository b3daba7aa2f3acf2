"""The failure of a worker, read from its last words."""

from __future__ import annotations

import subprocess
import sys

import pytest

from elasticd.rendezvous.worker_failure import alike, cause, ending, failure_of
from elasticd.wire.rendezvous import WorkerFailure


def raised(code: str) -> WorkerFailure:
    """The failure of an interpreter that runs this code."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    return failure_of(done.stderr, done.returncode)


@pytest.mark.parametrize(
    ("code", "line"),
    [
        ("{}['inputs']", "KeyError: 'inputs'"),
        ("raise ValueError", "ValueError"),
        ("raise ValueError('a\\n  b\\nc: d')", "ValueError: a"),
        ("class Own(Exception): pass\nraise Own('x')", "Own: x"),
        ("import json\njson.loads('{')", "json.decoder.JSONDecodeError: Expecting property name enclosed"),
        ("try:\n  1/0\nexcept Exception as e:\n  raise RuntimeError('after') from e", "RuntimeError: after"),
        ("x = = 1", "SyntaxError: invalid syntax"),
        ("raise SystemExit('train.py: no data')", "train.py: no data"),
        ("import sys\nsys.exit(7)", "ended with exit code 7"),
        ("import os\nos.kill(os.getpid(), 9)", "ended by signal SIGKILL"),
        ("import sys\nsys.stderr.write('10%\\r20%\\r')\n1/0", "ZeroDivisionError: division by zero"),
    ],
)
def test_last_exception_line_or_signal_is_the_failure(code: str, line: str) -> None:
    failure = raised(code)
    assert failure.line.startswith(line), failure
    assert failure.code != 0
    assert not failure.refusal


def test_torchs_prefix_of_a_rank_and_lines_after_the_exception_do_not_hide_it() -> None:
    done = subprocess.run([sys.executable, "-c", "{}['x']"], capture_output=True, text=True)
    prefixed = "".join(f"[rank1]: {line}\n" for line in done.stderr.splitlines())
    failure = failure_of(prefixed + "[W1128 ProcessGroup] destroy_process_group() was not called\n", 1)
    assert failure.line == "KeyError: 'x'"
    assert failure.traceback.startswith("Traceback (most recent call last):")
    assert "[rank1]" not in failure.traceback


def test_exception_of_elasticd_is_a_refusal_and_so_is_what_its_error_file_says() -> None:
    trace = "Traceback (most recent call last):\nelasticd.runtime.model.errors.ModelError: no head\n"
    assert failure_of(trace, 1).refusal
    assert not failure_of(trace.replace("model.errors.ModelError", "comm.groups.PeerLost"), 1).refusal
    assert failure_of("", 1, "global_batch 7 does not divide") == WorkerFailure(
        text="global_batch 7 does not divide", refusal=True
    )


KEY = WorkerFailure(kind="KeyError", text="'x'")
GLOO = "RuntimeError: [../gloo/transport/tcp/pair.cc:1] Connection closed by peer [127.0.0.1]:7"
PEER = failure_of(f"Traceback (most recent call last):\n{GLOO}\n", 1)
KILLED, TERMINATED = WorkerFailure(text="k", code=-9), WorkerFailure(text="t", code=-15)


def test_cause_is_neither_who_was_told_to_end_nor_who_lost_another_rank() -> None:
    assert PEER.lost_peer
    for others in ([TERMINATED, KEY], [PEER, KEY], [TERMINATED, PEER, KEY]):
        assert cause(others) == KEY
    assert cause([PEER, KILLED, TERMINATED]) == KILLED


def test_only_what_a_script_did_by_itself_counts_as_the_same_twice() -> None:
    assert alike(KEY, KEY)
    numbered = WorkerFailure(kind="RuntimeError", text="out of memory: 12 of 80 GiB")
    assert alike(numbered, WorkerFailure(kind="RuntimeError", text="out of memory: 13 of 80 GiB"))
    assert not alike(None, KEY)
    assert not alike(KEY, WorkerFailure(kind="KeyError", text="'y'"))
    assert not alike(KILLED, KILLED)
    assert not alike(PEER, PEER)


@pytest.mark.parametrize(
    ("failure", "words"),
    [
        (WorkerFailure(code=-9, text="ended by signal SIGKILL"), "died (SIGKILL)"),
        (WorkerFailure(code=1, kind="ValueError", text="no"), "failed: ValueError: no"),
        (WorkerFailure(code=7, text="ended with exit code 7"), "failed: ended with exit code 7"),
    ],
)
def test_how_a_worker_ended_is_said_behind_its_name(failure: WorkerFailure, words: str) -> None:
    assert ending(failure) == words
