"""Plays a page in terminals: each command is run as written, and what it prints is compared with the page."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import TextIO

import psutil

from elasticd.testing.waiting import until
from tests.pages.console import INTERRUPT, Block, Difference, blocks, compare

#: Seconds that a command, or a line of one that runs on, may take: of a machine that other work keeps busy.
PATIENCE_SECONDS = 420.0


class Terminal:
    """A terminal of a page: one command after the other, in one folder."""

    def __init__(self, name: str, folder: Path, environment: Mapping[str, str]) -> None:
        self.name, self._folder, self._environment = name, folder, dict(environment)
        self._process: subprocess.Popen[bytes] | None = None
        self._output = Path(tempfile.mkstemp(dir=folder, prefix=f".{name}-", suffix=".printed")[1])
        self._read = 0  # lines that the page has shown

    def start(self, command: str) -> None:
        """Starts a command, once the one before has ended."""
        until(self.ended, lambda: f"the end of the command before: {self.lines()[-20:]}", seconds=120)
        with self._output.open("wb") as output:
            self._process = subprocess.Popen(
                ["bash", "-c", command],
                cwd=self._folder,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._read = 0

    def lines(self) -> list[str]:
        """What the command printed and the page has not shown."""
        text = self._output.read_text(errors="replace")
        return [line.rstrip() for line in text.splitlines()][self._read :]

    def shown(self, count: int) -> None:
        """The page has shown the next `count` lines."""
        self._read += count

    def ended(self) -> bool:
        return self._process is None or self._process.poll() is not None

    def interrupt(self) -> None:
        """Ctrl-C: SIGINT to all that runs in the terminal."""
        assert self._process is not None
        os.killpg(self._process.pid, signal.SIGINT)

    def end(self) -> None:
        """Ends what still runs, with all that it started."""
        if self._process is None:
            return
        family: list[psutil.Process] = []
        try:
            parent = psutil.Process(self._process.pid)
            family = [*parent.children(recursive=True), parent]
        except psutil.NoSuchProcess:
            pass
        for process in family:
            try:
                process.send_signal(signal.SIGTERM)
            except psutil.NoSuchProcess:
                continue
        _, alive = psutil.wait_procs(family, timeout=10)
        for process in alive:
            process.kill()
        self._process.wait()


class Session:
    """The terminals of a page. All that runs in them is ended with the `with`."""

    def __init__(
        self,
        folder: Path,
        environment: Mapping[str, str],
        patience_seconds: float = PATIENCE_SECONDS,
        echo: TextIO | None = None,
    ) -> None:
        """`echo` gets all that is printed, as it is compared."""
        self._folder, self._environment = folder, environment
        self._terminals: dict[str, Terminal] = {}
        self._patience_seconds, self._echo = patience_seconds, echo
        self.checked_lines = 0  #: shown lines that were printed
        self.seconds: list[tuple[str, float]] = []  #: of each command

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for terminal in reversed(self._terminals.values()):
            terminal.end()

    def play(self, page: Path) -> list[str]:
        """Plays all of a page.

        Returns:
            A line for each shown line that was not printed; the page stops at the first block with one.
        """
        for block in blocks(page):
            if wrong := self.play_block(block):
                return [f"{page.name}, {where}: {difference}" for where, difference in wrong]
        return []

    def play_block(self, block: Block) -> list[tuple[str, Difference]]:
        """Plays a block; the differences, with the line of the page."""
        terminal = self._terminals.get(block.terminal)
        if terminal is None:
            terminal = self._terminals[block.terminal] = Terminal(
                block.terminal, self._folder, self._environment
            )
        wrong = [(f"line {block.line}", each) for each in self._goes_on(terminal, block)]
        for place, command in enumerate(block.commands):
            if wrong:
                break
            began = time.monotonic()
            if self._echo is not None:
                print(f"[{block.terminal}] $ {command.text}", file=self._echo, flush=True)
            terminal.start(command.text)
            runs_on = block.runs_on and place == len(block.commands) - 1
            difference = self._wait(terminal, command.shown, block, runs_on=runs_on)
            self.seconds.append((command.text, time.monotonic() - began))
            if difference is not None:
                wrong.append((f"line {command.line}: $ {command.text}", difference))
        return wrong

    def _goes_on(self, terminal: Terminal, block: Block) -> list[Difference]:
        """Waits for the lines that a running command prints; sends it Ctrl-C where the page does."""
        lines = list(block.goes_on)
        while lines:
            if lines[0] == INTERRUPT:
                terminal.interrupt()
                lines = lines[1:]
                continue
            stop = lines.index(INTERRUPT) if INTERRUPT in lines else len(lines)
            # Of the last lines the command may have ended: then they are all that there is.
            ends = stop == len(lines) and not block.runs_on
            difference = self._wait(terminal, lines[:stop], block, runs_on=not ends)
            if difference is not None:
                return [difference]
            lines = lines[stop:]
        return []

    def _wait(
        self, terminal: Terminal, shown: tuple[str, ...] | list[str], block: Block, *, runs_on: bool
    ) -> Difference | None:
        """Waits until a command has printed what the page shows, or has ended."""
        outcome: tuple[Difference | None, int] = (None, 0)

        def settled() -> bool:
            nonlocal outcome
            ended = terminal.ended()  # before its lines are read
            outcome = compare(shown, terminal.lines(), block.varies, ended=ended and not runs_on)
            return ended or (runs_on and outcome[0] is None)

        try:
            until(settled, lambda: outcome[0], seconds=self._patience_seconds)
        except AssertionError:
            if outcome[0] is None:
                return Difference("(its end)", tuple(terminal.lines()[-20:]))
            return outcome[0]
        if self._echo is not None:
            print("\n".join(terminal.lines()[: outcome[1] if runs_on else None]), file=self._echo, flush=True)
        terminal.shown(outcome[1])
        if outcome[0] is None:
            self.checked_lines += len(shown)
        return outcome[0]
