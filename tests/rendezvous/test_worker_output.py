"""Workers' output on its way through torchrun: whole lines with a label, files for each start, the newest in a
ring."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from elasticd.rendezvous import worker_output
from elasticd.rendezvous.output_link import OutputLink
from elasticd.rendezvous.worker_output import WorkerOutput
from elasticd.system import output_ring
from elasticd.system.output_options import OutputOptions
from elasticd.system.output_ring import OutputRing
from elasticd.testing.waiting import until


class NoAgent(OutputLink):
    """Names devices, and keeps the rings that it was shown."""

    def __init__(self) -> None:
        self.rings: dict[int, OutputRing] = {}

    def share(self, index: int, ring: OutputRing) -> str:
        self.rings[index] = ring
        return f"alpha/{index}"


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], str]]:
    """What reaches torchrun's own streams: here a pipe."""
    read, write = os.pipe()
    os.set_blocking(read, False)
    shown: list[bytes] = []
    monkeypatch.setattr(worker_output, "_write", lambda fd, data: os.write(write if fd in (1, 2) else fd, data))

    def text() -> str:
        try:
            while data := os.read(read, 1 << 16):
                shown.append(data)
        except BlockingIOError:
            pass
        return b"".join(shown).decode()

    yield text
    os.close(read)
    os.close(write)


def run(output: WorkerOutput, code: str, attempt: int = 0) -> None:
    """A worker of one attempt, as torch starts it."""
    destinations = output.reify({0: {"TORCHELASTIC_RESTART_COUNT": str(attempt)}})
    with open(destinations.stdouts[0], "w") as out, open(destinations.stderrs[0], "w") as err:
        subprocess.run([sys.executable, "-u", "-c", code], stdout=out, stderr=err, check=False)


def made(options: OutputOptions, index: int = 1) -> tuple[WorkerOutput, NoAgent]:
    link = NoAgent()
    return WorkerOutput(link, "job", (index,), options, log_dir=None), link


def kept(link: NoAgent, index: int = 1) -> str:
    return output_ring.read(link.rings[index].fd, -output_ring.RING_BYTES, output_ring.RING_BYTES).data.decode()


def test_lines_come_whole_and_with_the_workers_label(terminal: Callable[[], str]) -> None:
    output, _ = made(OutputOptions(label=True))
    run(output, "import os; os.write(1, b'one\\ntw'); os.write(2, b'error\\n'); os.write(1, b'o\\n')")
    until(lambda: terminal().count("\n") == 3)
    assert sorted(terminal().splitlines()) == ["[alpha/1] error", "[alpha/1] one", "[alpha/1] two"]


def test_all_that_ended_workers_wrote_is_shown_once_it_is_finished(
    terminal: Callable[[], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also the last line without an end, and where torchrun is slow to write."""
    write = worker_output._write

    def late(fd: int, data: bytes) -> None:
        time.sleep(0.02)
        write(fd, data)

    monkeypatch.setattr(worker_output, "_write", late)
    output, _ = made(OutputOptions(label=True))
    run(output, "print('a whole line'); print('last words', end='')")
    output.finish()
    assert terminal() == "[alpha/1] a whole line\n[alpha/1] last words\n"


def test_a_prompt_without_a_line_end_is_shown_before_it_is_answered(terminal: Callable[[], str]) -> None:
    output, _ = made(OutputOptions(label=True))
    destinations = output.reify({0: {}})
    with open(destinations.stdouts[0], "w") as out:
        process = subprocess.Popen(
            [sys.executable, "-c", "input('name? ')"], stdin=subprocess.PIPE, stdout=out, bufsize=0
        )
        try:
            until(lambda: "[alpha/1] name? " in terminal())
            process.communicate(b"x\n", 60)
        finally:
            process.kill()
            process.wait()


def test_without_a_label_all_comes_as_it_is(terminal: Callable[[], str]) -> None:
    output, _ = made(OutputOptions())
    run(output, "import os; os.write(2, b'10%\\r20%\\r'); os.write(2, b'\\x1b[1mdone\\n')")
    until(lambda: terminal() == "10%\r20%\r\x1b[1mdone\n")


def test_each_start_of_a_worker_has_a_file_of_its_own_and_none_is_overwritten(
    tmp_path: Path, terminal: Callable[[], str]
) -> None:
    options = OutputOptions(folder=str(tmp_path), filed=3, shown=0)
    for code in ("print('first')", "print('second')"):
        output, _ = made(options)
        run(output, code)
        run(output, "raise SystemExit('again')", attempt=1)
        output.finish()
    texts = {path.name: path.read_text() for path in (tmp_path / "job").iterdir()}
    assert texts == {
        "alpha-1.0.log": "first\n",
        "alpha-1.1.log": "again\n",
        "alpha-1.2.log": "second\n",
        "alpha-1.3.log": "again\n",
    }
    assert terminal() == "", "the files have it alone"


def test_the_ring_has_the_output_of_all_starts_and_says_where_one_begins(terminal: Callable[[], str]) -> None:
    output, link = made(OutputOptions(shown=0))
    run(output, "print('before')")
    run(output, "print('after')", attempt=1)
    output.finish()
    assert kept(link) == "before\nelasticd: the worker is started again (1)\nafter\n"


def test_the_last_words_are_those_of_stderr(terminal: Callable[[], str]) -> None:
    output, _ = made(OutputOptions(shown=0))
    run(output, "import sys; print('out'); sys.stderr.write('x' * 100_000 + 'the reason')")
    words = output.last_words(0)
    assert words.endswith("the reason")
    assert len(words) < worker_output.KEPT_BYTES + (1 << 16)
    assert "out" not in words


def test_a_worker_on_a_terminal_has_a_terminal_of_the_same_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """For progress bars and a debugger: all of one worker's output goes through one terminal, in order."""
    import fcntl
    import struct
    import termios

    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 33, 77, 0, 0))
    saved = os.dup(1), os.dup(2)
    output, _ = made(OutputOptions())
    code = "import os, sys; print(*os.get_terminal_size(2)); print(sys.stderr.isatty(), file=sys.stderr)"
    try:
        os.dup2(theirs, 1)
        os.dup2(theirs, 2)
        run(output, code)
        text = b""
        while b"True" not in text:
            text += os.read(ours, 1000)
    finally:
        for fd, before in enumerate(saved, start=1):
            os.dup2(before, fd)
            os.close(before)
        os.close(theirs)
        os.close(ours)
    assert text.decode().split() == ["77", "33", "True"]


def test_a_reader_of_the_ring_never_sees_torn_output_and_the_writer_never_waits() -> None:
    ring, stop = OutputRing(), threading.Event()
    line = b"%015d\n"

    def write() -> None:
        number = 0
        while not stop.is_set():
            ring.write(b"".join(line % (number + i) for i in range(1000)))
            number += 1000

    writer = threading.Thread(target=write)
    writer.start()
    try:
        after, parts = 0, 0
        while parts < 300:
            part = output_ring.read(ring.fd, after, 1 << 16)
            if part.begin < part.end:
                parts += 1
            first = -part.begin % 16
            numbers = [int(part.data[at : at + 15]) for at in range(first, len(part.data) - 16, 16)]
            assert numbers == [(part.begin + first) // 16 + i for i in range(len(numbers))]
            assert part.begin >= after
            assert len(part.data) == part.end - part.begin
            after = part.end
    finally:
        stop.set()
        writer.join()
        ring.close()


@pytest.mark.parametrize(
    "sizes", [(0,), (5, 3), (output_ring.RING_BYTES,), (output_ring.RING_BYTES - 3, 7), (600_000, 2)]
)
def test_the_ring_keeps_the_newest_bytes(sizes: tuple[int, ...]) -> None:
    ring = OutputRing()
    try:
        data = b""
        for number, size in enumerate(sizes):
            piece = bytes((number + i) % 251 for i in range(size))
            ring.write(piece)
            data += piece
        assert output_ring.is_ring(ring.fd)
        found = output_ring.read(ring.fd, -output_ring.RING_BYTES, output_ring.RING_BYTES)
        assert found.data == data[-output_ring.RING_BYTES :]
        assert (found.begin, found.end) == (max(0, len(data) - output_ring.RING_BYTES), len(data))
        assert output_ring.read(ring.fd, len(data) + 5, 10).data == b""
    finally:
        ring.close()


def test_what_is_no_ring_is_not_read() -> None:
    fd = os.memfd_create("other")
    try:
        assert not output_ring.is_ring(fd)
    finally:
        os.close(fd)
