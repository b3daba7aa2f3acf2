"""A page as a session: the commands of its blocks of a terminal, and what the page shows that they print.

    ```console cluster runs on
    $ elasticd up
    starting etcd, ...
    ```

The word after `console` names the terminal. "runs on": the last command of the block is not waited for to end.
"goes on": what the running command of that terminal prints later, and `^C` for the key. A line "..." stands for
any lines, and at the end of a line for any text. A comment before a block or at the top of the page says what
differs from run to run, by regular expressions (`<!-- varies: step \\d+ -->`); times, speeds, sizes, ports and
process ids always do (`VARIES`), and losses by 2 in their fourth digit.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

#: What differs from run to run on every page.
VARIES = (
    r"\d\d:\d\d:\d\d",  # the time of day
    r"https?://[\w.]+:\d+",
    r"127\.0\.0\.1:\d+",
    r"pid \d+",
    r"[\d,]+(?:\.\d+)? ?(?:ms|µs|s|KiB|MiB|GiB|tokens/s|steps/s|%)(?![\w])",
    r"(?:tokens/s|steps/s|tokens a second:?) +[\d,.]+",
)
#: A loss, which may differ by so much in its last digit: sums in another order round otherwise.
_LOSS, _LAST_DIGIT = r"(?<=loss )\d+\.\d{4}", 2
ANY_LINES = "..."
INTERRUPT = "^C"


@dataclass(frozen=True)
class Command:
    """A command of a page, and the lines that the page shows of what it prints."""

    text: str
    shown: tuple[str, ...]
    line: int  #: of the page


@dataclass(frozen=True)
class Block:
    """A block of a terminal."""

    terminal: str
    commands: tuple[Command, ...]
    runs_on: bool  #: the last command is not waited for
    goes_on: tuple[str, ...]  #: lines of the command that runs on, before the block's own commands
    line: int
    varies: tuple[str, ...] = field(default=())


def blocks(page: Path) -> Iterator[Block]:
    """The blocks of a page in order.

    Raises:
        ValueError: a block is written otherwise than the form that this module's docstring gives.
    """
    varies, everywhere = list[str](), list[str]()
    lines = iter(enumerate(page.read_text().splitlines(), start=1))
    any_block = False
    for number, line in lines:
        if comment := re.fullmatch(r"<!-- varies: (.+) -->", line):
            (varies if any_block else everywhere).append(comment[1])
        elif fence := re.fullmatch(r"```console (\w+)( runs on| goes on)?( runs on)?", line):
            body = []
            for _, inner in lines:
                if inner == "```":
                    break
                body.append(inner)
            flags = f"{fence[2] or ''}{fence[3] or ''}"
            yield _block(fence[1], body, number, flags, (*everywhere, *varies))
            varies, any_block = [], True
        elif line.startswith("```console"):
            raise ValueError(
                f"{page.name}, line {number}: a block is '```console TERMINAL [runs on | goes on]'"
            )


def _block(terminal: str, body: Sequence[str], line: int, flags: str, varies: tuple[str, ...]) -> Block:
    commands, before = list[Command](), list[str]()
    at = 0
    while at < len(body):
        if body[at].startswith("$ "):
            start, text = at, body[at][2:]
            while text.endswith("\\"):
                at += 1
                text = text[:-1] + body[at].removeprefix("> ").strip()
            at += 1
            shown = []
            while at < len(body) and not body[at].startswith("$ "):
                shown.append(body[at])
                at += 1
            commands.append(Command(text, tuple(shown), line + 1 + start))
        else:
            before.append(body[at])
            at += 1
    if before and "goes on" not in flags:
        raise ValueError(f"line {line}: a block begins with a command, or its first line says 'goes on'")
    return Block(terminal, tuple(commands), "runs on" in flags, tuple(before), line, varies)


def pattern(line: str, varies: Sequence[str] = ()) -> re.Pattern[str]:
    """What a shown line stands for: itself, but for what differs from run to run."""
    rest = ".*" if line.endswith(f" {ANY_LINES}") else ""  # of a long line the page shows the beginning
    line = line.removesuffix(ANY_LINES).rstrip() if rest else line
    kinds = (*varies, *VARIES, _LOSS)
    parts, end = [], 0
    for match in re.finditer("|".join(f"(?P<v{place}>{kind})" for place, kind in enumerate(kinds)), line):
        assert match.lastgroup is not None
        kind = kinds[int(match.lastgroup[1:])]
        parts += [re.escape(line[end : match.start()]), _near(match[0]) if kind == _LOSS else f"(?:{kind})"]
        end = match.end()
    text = "".join([*parts, re.escape(line[end:]), rest])
    return re.compile(re.sub(r"(?:\\ )+", r"\\ +", text))  # columns are as wide as what is in them


def _near(loss: str) -> str:
    """The losses that count as this one."""
    last = round(float(loss) * 10_000)
    near = (f"{(last + apart) / 10_000:.4f}" for apart in range(-_LAST_DIGIT, _LAST_DIGIT + 1))
    return f"(?:{'|'.join(map(re.escape, near))})"


@dataclass(frozen=True)
class Difference:
    """The first line of a page that was not printed."""

    shown: str
    printed: tuple[str, ...]  #: the lines among which it should be

    def __str__(self) -> str:
        return f"the page shows\n    {self.shown}\nand these lines came:\n" + "\n".join(
            f"    {line}" for line in self.printed
        )


def compare(
    shown: Sequence[str], printed: Sequence[str], varies: Sequence[str] = (), *, ended: bool = True
) -> tuple[Difference | None, int]:
    """Compares what a page shows with what was printed.

    Args:
        shown: lines of the page; "..." stands for any lines.
        printed: lines of the terminal.
        varies: regular expressions of what differs from run to run.
        ended: nothing may follow. Else more may come.

    Returns:
        The first difference; and the number of printed lines that the shown ones stand for.
    """
    at, skips = 0, False
    for place, line in enumerate(shown):
        if line == ANY_LINES:
            skips = True
            continue
        wanted = pattern(line, varies)
        stop = len(printed) if skips else min(at + 1, len(printed))
        position = next((i for i in range(at, stop) if wanted.fullmatch(printed[i])), None)
        if position is None:
            return Difference(line, tuple(printed[at : max(stop, at + 1)])), at
        at, skips = position + 1, False
        del place
    if ended and not skips and at < len(printed):
        return Difference("(nothing more)", tuple(printed[at:])), at
    return None, at
