"""Signals as a notice: heard whatever the process is at, and an end when the grace is over."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

#: Each runs in a process of its own, says what happened on stdout, and is told to go by us.
HEAD = """
import os, signal, sys, threading, time
from elasticd.runtime.control.preemption_notice import PreemptionNotice
def say(*words): os.write(1, (" ".join(map(str, words)) + "\\n").encode())
notice = PreemptionNotice(float(sys.argv[1]), lambda name: say("told", name))
"""
SLEEPS = "notice.install(); say('ready'); time.sleep(600)"
#: The main thread is in C and gives nobody its turn but the interpreter's own threads.
STUCK = """
import ctypes
notice.install(); say('ready')
ctypes.CDLL(None).sleep(600); ctypes.CDLL(None).sleep(600)
"""
HANDLED = """
signal.signal(signal.SIGTERM, lambda number, frame: say('theirs', number))
notice.install(); say('ready')
while True: time.sleep(0.01)
"""
RESTORED = """
notice.install(); notice.restore()
say(signal.getsignal(signal.SIGTERM) is signal.SIG_DFL, 'ready')
time.sleep(600)
"""
#: The job ends as the signal comes.
RESTORED_MEANWHILE = """
signal.signal(signal.SIGTERM, lambda number, frame: say('theirs', number))
notice.install()
os.kill(os.getpid(), signal.SIGTERM)
notice.restore()
say('restored' if signal.getsignal(signal.SIGTERM) != notice._handle else 'kept', 'ready')
time.sleep(600)
"""
#: Its main thread waits with the lock of a stream that nobody reads.
LOGGING = """
import logging
logging.basicConfig(stream=os.fdopen(os.pipe()[1], 'w'))
notice.install(); say('ready')
while True: logging.getLogger('user').warning('x' * 1000)
"""
#: As `nohup` and a script of the user's own leave a signal.
TAKEN = """
import faulthandler
signal.signal(signal.SIGHUP, signal.SIG_IGN)
signal.signal(signal.SIGUSR1, lambda number, frame: say('usr1'))
faulthandler.register(signal.SIGUSR2, file=open('/dev/null', 'w'))
notice.install(); say('ready')
while True: time.sleep(0.01)
"""
IGNORED = "signal.signal(signal.SIGTERM, signal.SIG_IGN); notice.install(); say('ready'); time.sleep(600)"
FORKS = """
notice.install()
child = os.fork()
if child == 0:
    time.sleep(600)
os.kill(child, signal.SIGTERM)
say('child', os.waitpid(child, 0)[1])
time.sleep(600)
"""
LOOP = """
import asyncio
notice.install()
async def main():
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, lambda: say('usr1'))
    say('ready')
    await asyncio.sleep(600)
asyncio.run(main())
"""


class Child:
    def __init__(self, body: str, grace: float) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", HEAD + body, str(grace)],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            preexec_fn=lambda: signal.signal(signal.SIGTERM, signal.SIG_DFL),
        )

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def tell(self, number: int = signal.SIGTERM) -> None:
        self.process.send_signal(number)


@pytest.fixture
def start() -> Iterator[object]:
    children: list[Child] = []

    def begin(body: str, grace: float = 600.0) -> Child:
        children.append(Child(body, grace))
        return children[-1]

    yield begin
    for child in children:
        child.process.kill()
        child.process.wait()
        assert child.process.stdout is not None
        child.process.stdout.close()


@pytest.mark.parametrize("body", [SLEEPS, STUCK], ids=["in Python", "in C"])
def test_it_is_heard_at_once_and_the_process_ends_in_good_order_when_the_grace_is_over(start, body) -> None:
    child = start(body, 0.5)
    assert child.line() == "ready"
    child.tell()
    assert child.line() == "told SIGTERM"
    assert child.process.wait(60) == 0, "torchrun takes nothing else for an end that it need not mend"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2])
def test_other_signals_that_say_that_the_process_will_end_are_notice_too(start, number) -> None:
    child = start(SLEEPS, 0.5)
    assert child.line() == "ready"
    child.tell(number)
    assert child.line() == f"told {number.name}"
    assert child.process.wait(60) == 0, "SIGINT raises no KeyboardInterrupt"


def test_signals_that_the_script_uses_or_ignores_are_left_to_it(start) -> None:
    child = start(TAKEN)
    assert child.line() == "ready"
    for number in (signal.SIGHUP, signal.SIGUSR2, signal.SIGUSR1):
        child.tell(number)
    assert child.line() == "usr1"
    child.tell(signal.SIGINT)
    assert child.line() == "told SIGINT"


def test_an_echo_is_none_and_a_second_signal_ends_the_process_at_once(start) -> None:
    child = start(SLEEPS)
    assert child.line() == "ready"
    child.tell()
    assert child.line() == "told SIGTERM"
    child.tell()
    deadline = time.monotonic() + 60
    while child.process.poll() is None:  # as somebody who loses patience
        assert time.monotonic() < deadline
        child.tell()
        time.sleep(0.2)
    assert child.process.wait() == 0


def test_the_handler_that_was_there_is_called_too(start) -> None:
    child = start(HANDLED)
    assert child.line() == "ready"
    child.tell()
    assert {child.line(), child.line()} == {"told SIGTERM", f"theirs {signal.SIGTERM:d}"}


def test_restored_the_signal_is_what_it_was(start) -> None:
    child = start(RESTORED)
    assert child.line() == "True ready"
    child.tell()
    assert child.process.wait(60) == -signal.SIGTERM


def test_signal_that_comes_as_the_job_ends_is_the_scripts_or_a_notice_and_nothing_between(start) -> None:
    """Told, with the grace and its end; or the handler of before, and nobody is told."""
    child = start(RESTORED_MEANWHILE, grace=1.0)
    said = [child.line(), child.line()]
    if "restored ready" in said:
        assert said == ["theirs 15", "restored ready"]
        assert child.process.poll() is None
    else:
        assert {*said, child.line()} == {"theirs 15", "told SIGTERM", "kept ready"}
        assert child.process.wait(60) == 0


def test_process_ends_after_its_grace_though_its_main_thread_waits_to_log(start) -> None:
    child = start(LOGGING, grace=0.5)
    assert child.line() == "ready"
    child.tell()
    assert child.line() == "told SIGTERM"
    assert child.process.wait(60) == 0


def test_a_signal_that_was_ignored_stays_so(start) -> None:
    child = start(IGNORED)
    assert child.line() == "ready"
    child.tell()
    with pytest.raises(subprocess.TimeoutExpired):
        child.process.wait(1)


def test_a_child_by_fork_is_ended_by_it_and_its_parent_is_not_told(start) -> None:
    child = start(FORKS)
    assert child.line() == f"child {signal.SIGTERM:d}"
    child.tell()
    assert child.line() == "told SIGTERM"


def test_other_signals_go_to_a_loop_that_came_later_and_sigterm_to_us(start) -> None:
    child = start(LOOP)
    assert child.line() == "ready"
    child.tell(signal.SIGUSR1)
    assert child.line() == "usr1"
    child.tell()
    assert child.line() == "told SIGTERM"


def test_nothing_is_installed_from_another_thread() -> None:
    import threading

    from elasticd.runtime.control.preemption_notice import PreemptionNotice

    before = signal.getsignal(signal.SIGTERM)
    thread = threading.Thread(target=PreemptionNotice(1.0, lambda name: None).install)
    thread.start()
    thread.join()
    assert signal.getsignal(signal.SIGTERM) is before
    assert os.getpid()
