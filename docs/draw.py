"""Writes what the documentation takes from the program: diagrams, the map of the tree and the reference pages.

python docs/draw.py           writes docs/map.md, docs/reference/, docs/layouts/, the types of the dashboard's
                              values for its pages, and between the marks of README.md,
                              docs/architecture.md, docs/batches.md and docs/layouts.md
python docs/draw.py --check   exits with 1 when one of them is stale
"""

from __future__ import annotations

import ast
import enum
import inspect
import io
import itertools
import json
import re
import sys
import textwrap
import tokenize
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import batch_picture
import msgspec
from elasticd_planner.value import Value
from layout_pictures import EXAMPLES, picture, steps_as_text
from page_types import declarations

from elasticd.config.tree import Config
from elasticd.coordinator.live_config import SECTIONS as LIVE
from elasticd.coordinator.metrics import FAMILIES
from elasticd.machines.agent import machine
from elasticd.machines.job import machine as job_machine
from elasticd.machines.job.state import events
from elasticd.machines.job.state.job_state import TRANSITIONS, JobPhase
from elasticd.machines.worker import switch

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
PACKAGES = ("planner/elasticd_planner", "migration/elasticd_migration", "elasticd", "agent/elasticd_agent")
WRITTEN = "<!-- Written by docs/draw.py. Do not edit. -->\n"


# -- tables ------------------------------------------------------------------------------------------------


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A Markdown table."""
    head = list(head)
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    lines += ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    return "\n".join(lines)


def code(words: Iterable[str]) -> str:
    """Words as code, in one cell."""
    return ", ".join(f"`{word}`" for word in words)


# -- state machines ----------------------------------------------------------------------------------------


def job() -> str:
    """The phases of a job and which may follow which, what each event does in them, and what becomes due."""
    lines = ["```mermaid", "stateDiagram-v2", "    [*] --> gathering"]
    for phase, followers in TRANSITIONS.items():
        lines += [f"    {phase.value} --> {after.value}" for after in sorted(followers, key=lambda p: p.value)]
        if not followers:
            lines.append(f"    {phase.value} --> [*]")
    due = {
        (_in_module(act), phase.value): "once settled" if settled else "yes"
        for act, phases, settled in job_machine.DUE
        for phase in phases
    }
    rows, columns = dict.fromkeys(row for row, _ in due), [phase.value for phase in JobPhase]
    return "\n\n".join(
        [
            "\n".join([*lines, "```"]),
            "Each event in each phase, and the function of `machines/job` that takes it. Empty: the phase has "
            "nothing for the event, and the log has a line of it.",
            _events(job_machine.TABLE, JobPhase, _in_module),
            "What becomes due after an event, in this order. Once settled: a leader that took over knows by "
            "then which workers there are.",
            _table(due, rows, columns, "what"),
        ]
    )


def _name(handler: Callable[..., Any]) -> str:
    return handler.__name__.strip("_").replace("_", " ")


def _in_module(handler: Callable[..., Any]) -> str:
    """With the file that it is in, for a machine of many files."""
    module = handler.__module__.rpartition(".")[2]
    return _name(handler) if module == "machine" else f"{module.replace('_', ' ')}: {_name(handler)}"


def _table(
    cells: Mapping[tuple[str, str], str], rows: Iterable[str], columns: Iterable[str], corner: str = "event"
) -> str:
    columns = list(columns)
    lines = [f"| {corner} | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
    lines += [f"| {row} | " + " | ".join(cells.get((row, c), "") for c in columns) + " |" for row in rows]
    return "\n".join(lines)


def _events(
    table: Mapping[tuple[Any, type], Callable[..., Any]],
    phases: Iterable[Any],
    name: Callable[[Callable[..., Any]], str] = _name,
) -> str:
    cells = {(event.__name__, phase.value): name(handler) for (phase, event), handler in table.items()}
    rows = dict.fromkeys(event.__name__ for _, event in table)
    return _table(cells, rows, [phase.value for phase in phases])


# -- the map -----------------------------------------------------------------------------------------------


def first_sentence(path: Path) -> str:
    """The first sentence of a module's docstring."""
    paragraph = " ".join((ast.get_docstring(ast.parse(path.read_text())) or "").split("\n\n")[0].split())
    return re.split(r"(?<=\.)\s", paragraph)[0]


def rooms() -> Iterator[tuple[Path, str, list[Path]]]:
    """Each folder of the packages, what it is for, and its files."""
    for package in PACKAGES:
        for start in sorted((ROOT / package).rglob("__init__.py")):
            folder = start.parent
            yield folder, first_sentence(start), sorted(set(folder.glob("*.py")) - {start})


def room_table() -> str:
    """The folders alone, for docs/architecture.md."""
    rows = []
    for folder, purpose, files in rooms():
        path = folder.relative_to(ROOT).as_posix()
        rows.append([f"[`{path}/`](map.md#{anchor(path)})", purpose, str(len(files))])
    return table(["folder", "what it is for", "files"], rows)


def anchor(heading: str) -> str:
    """The fragment that Markdown viewers make of a heading in backticks."""
    return re.sub(r"[^a-z0-9_-]", "", heading.lower())


def map_page() -> str:
    """docs/map.md: every file with the first sentence of its docstring."""
    parts = [WRITTEN, "# The map: every file and what it is for\n"]
    parts.append("The folders alone are in [architecture.md](architecture.md#the-map).\n")
    for folder, purpose, files in rooms():
        parts.append(f"## `{folder.relative_to(ROOT).as_posix()}`\n\n{purpose}\n")
        if files:
            parts.append(table(["file", "what it is for"], ([f"`{f.stem}`", first_sentence(f)] for f in files)))
            parts.append("")
    return "\n".join(parts)


# -- the reference -----------------------------------------------------------------------------------------


def line_comments(source: str) -> dict[int, str]:
    """The comments of a source text by line."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return {t.start[0]: t.string.lstrip("#: ") for t in tokens if t.type == tokenize.COMMENT}


def field_notes(kind: type) -> dict[str, tuple[str, str]]:
    """Unit and meaning of each field of a class and of the one that it extends, from the comment above it or
    behind it: `# [unit] Meaning.`

    Raises:
        SystemExit: a field has no comment.
    """
    source = textwrap.dedent(inspect.getsource(kind))
    comments, lines = line_comments(source), source.splitlines()
    base = kind.__base__
    extended = base is not None and base not in (Value, msgspec.Struct) and issubclass(base, Value)
    notes: dict[str, tuple[str, str]] = field_notes(base) if base is not None and extended else {}
    (body,) = ast.parse(source).body
    for node in body.body if isinstance(body, ast.ClassDef) else ():
        if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name):
            continue
        above, at = list[str](), node.lineno - 1
        while lines[at - 1].lstrip().startswith("#"):
            above.insert(0, comments[at])
            at -= 1
        text = " ".join(above) or comments.get(node.lineno, "")
        found = re.fullmatch(r"(?:\[(.+?)\] )?(.+)", text)
        if found is None:
            raise SystemExit(f"{kind.__name__}.{node.target.id} has no comment with its unit and meaning")
        notes[node.target.id] = (found[1] or "", found[2])
    return notes


def type_name(kind: Any) -> str:
    """A type as somebody who writes TOML reads it."""
    if typing.get_origin(kind) in (types.UnionType, typing.Union):
        return " or ".join(type_name(part) for part in typing.get_args(kind) if part is not type(None))
    if typing.get_origin(kind) is typing.Literal:
        return " or ".join(f'"{value}"' for value in typing.get_args(kind))
    if typing.get_origin(kind) is tuple:
        of = type_name(typing.get_args(kind)[0])
        return f"list of {of.replace('list of', 'lists of', 1) if of.startswith('list of') else of + 's'}"
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return " or ".join(f'"{value.value}"' for value in kind)
    return {str: "string", int: "integer", float: "number", bool: "true or false"}.get(kind, str(kind))


def toml(value: Any) -> str:
    """A default as TOML writes it; nothing for a key that may be left out."""
    if value is None or value is msgspec.NODEFAULT:
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return "[" + ", ".join(toml(item) for item in value) + "]"
    return f'"{value}"' if isinstance(value, str) else f"{value:g}" if isinstance(value, float) else str(value)


def keys(kind: type[msgspec.Struct], prefix: str = "", base: Any = None) -> Iterator[list[str]]:
    """A row for each key of a section; the keys of an inline table are dotted."""
    notes = field_notes(kind)
    for field in msgspec.structs.fields(kind):
        unit, meaning = notes[field.name]
        default = getattr(base, field.name) if base is not None else field.default
        if isinstance(field.type, type) and issubclass(field.type, msgspec.Struct):
            for row in keys(field.type, f"{prefix}{field.name}.", default):
                yield [*row[:-1], f"{meaning.rstrip('.')}: {row[-1][0].lower()}{row[-1][1:]}"]
            continue
        of = typing.get_args(field.type)[0] if typing.get_origin(field.type) is tuple else None
        if isinstance(of, type) and issubclass(of, msgspec.Struct):
            yield [f"`{prefix}{field.name}`", "list of tables", "", unit, meaning]
            yield from keys(of, f"{prefix}{field.name}[].")
            continue
        if field.encode_name != field.name:
            meaning += f" Before release 0.2: `{field.encode_name}`."
        default = f"`{toml(default)}`" if toml(default) else ""
        yield [f"`{prefix}{field.name}`", type_name(field.type), default, unit, meaning]


def configuration_page() -> str:
    """docs/reference/configuration.md, from the configuration tree."""
    parts = [WRITTEN, "# Configuration\n"]
    parts.append(
        "Every daemon and command reads one TOML file: `--config FILE`, else `$ELASTICD_CONFIG`. Without a\n"
        "file the defaults hold. A key without a default may be left out. A wrong section, key or value is\n"
        "refused with a message that says what would be right.\n"
    )
    for section in msgspec.structs.fields(Config):
        purpose = (inspect.getdoc(section.type) or "").split("\n\n")[0]
        live = " `elasticd config set` changes its keys while the cluster runs." if section.name in LIVE else ""
        parts.append(f"## `[{section.name}]`\n\n{purpose}{live}\n")
        parts.append(table(["key", "type", "default", "unit", "meaning"], keys(section.type)))
        parts.append("")
    return "\n".join(parts)


def metrics_page() -> str:
    """docs/reference/metrics.md, from the table of metric families."""
    rows = []
    for name, family in FAMILIES.items():
        shown = name + "_total" if family.type == "counter" else name
        rows.append([f"`{shown}`", family.type, code(family.labels), family.help])
    text = (
        "The leader serves them at `GET /metrics`, in the format of Prometheus. A coordinator that stands by\n"
        "refuses connections. Each series has the label `cluster` too. Scrape with `honor_labels: true`,\n"
        "since `job` is the name of a job here. A dashboard of all of them is\n"
        "[`docs/grafana/elasticd.json`](../grafana/elasticd.json).\n"
    )
    return "\n".join([WRITTEN, "# Metrics\n", text, table(["metric", "type", "labels", "meaning"], rows), ""])


def events_page() -> str:
    """docs/reference/events.md, from the kinds of events and the calls that tell them."""
    source = inspect.getsource(events)
    comments = line_comments(source)
    kinds = {
        item.value: comments.get(item.lineno, "")
        for node in ast.parse(source).body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "EventKind"
        for item in ast.walk(node.value)
        if isinstance(item, ast.Constant) and isinstance(item.value, str)
    }
    if silent := [kind for kind, meaning in kinds.items() if not meaning]:
        raise SystemExit(f"kinds of events without a comment: {', '.join(silent)}")
    data = event_data(kinds)
    rows = [[f"`{kind}`", meaning, code(data[kind])] for kind, meaning in kinds.items()]
    text = (
        "`elasticd logs` shows them; `elasticd logs --json` and `GET /v1/events` give them to programs.\n\n"
        "| key | meaning |\n|---|---|\n"
        "| `id` | integer; grows with each event, also from leader to leader |\n"
        "| `time` | unix seconds |\n"
        "| `kind` | one of the words below |\n"
        "| `job` | the job's name; empty for events of the cluster |\n"
        "| `text` | one line for people |\n"
        "| `data` | the keys below, where they apply |\n"
    )
    return "\n".join([WRITTEN, "# Events\n", text, table(["kind", "what happened", "data"], rows), ""])


def event_data(kinds: Iterable[str]) -> dict[str, list[str]]:
    """The keys of each kind's data, as the calls that make such events name them."""
    found: dict[str, dict[str, None]] = {kind: {} for kind in kinds}
    for path in sorted((ROOT / "elasticd").rglob("*.py")):
        for function in ast.walk(ast.parse(path.read_text())):
            if not isinstance(function, ast.FunctionDef):
                continue
            nodes = list(ast.walk(function))
            made = {ast.unparse(node.targets[0]): node.value for node in nodes if isinstance(node, ast.Assign)}
            for node in nodes:
                called = ast.unparse(node.func).split(".")[-1] if isinstance(node, ast.Call) else ""
                if isinstance(node, ast.Call) and called in ("note", "told", "CoordinatorNote"):
                    _add_keys(found, node, made)
    return {kind: list(names) for kind, names in found.items()}


def _add_keys(found: dict[str, dict[str, None]], call: ast.Call, made: Mapping[str, ast.expr]) -> None:
    given = {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg}
    kind, data = given.get("kind", call.args[0] if call.args else None), given.get("data")
    data = made.get(data.id, data) if isinstance(data, ast.Name) else data
    names = [name for name in given if name not in ("kind", "text", "job", "data")]
    if isinstance(data, ast.Dict):
        names += [key.value for key in data.keys if isinstance(key, ast.Constant)]
    words = [*ast.walk(kind)] if kind is not None else []
    named = [word.value for word in words if isinstance(word, ast.Constant)]
    if any(isinstance(word, ast.Name) and word.id == events.slowdown_kind.__name__ for word in words):
        named += events.SLOWDOWN_KINDS
    for name in named:
        if name in found:
            found[name] |= dict.fromkeys(names)


# -- figures -------------------------------------------------------------------------------------------------


def gain() -> str:
    """The demo's throughput by phase, as bars, from the committed results of its benchmark."""
    results = json.loads((ROOT / "benchmarks/results/demo.json").read_text())["rows"]
    values = {row["name"]: row["value"] for row in results}
    after = values["throughput after the replan"]
    without = after / values["after the replan, measured over the best plan without the slow device"]
    phases = {
        "all devices healthy": values["throughput healthy"],
        "one device 3x slow, old plan": values["throughput slowed, before the replan"],
        "one device 3x slow, new plan": after,
        "(best plan without that device)": without,
        "recovered, work given back": values["throughput recovered"],
    }
    most = max(phases.values())
    bars = (
        f"    {name:<32}{speed:6,.0f} tokens/s  {'█' * round(30 * speed / most)}"
        for name, speed in phases.items()
    )
    pause = 1e3 * values["slowdown: pause of the switch"]
    return "\n".join([*bars, "", f"The switch held training up for {pause:.0f} ms."])


def figures(name: str, *others: str) -> str:
    """The rows of a benchmark of parts as they are committed, but for those of the parts `others`."""
    found = json.loads((ROOT / f"benchmarks/results/{name}.json").read_text())
    rows = iter(found["rows"])
    by_part = {part["part"]: list(itertools.islice(rows, part["rows"])) for part in found["parts"]}
    shown = (_figure(row) for part, mine in by_part.items() if part not in others for row in mine)
    return table(["figure", "value", "goal", "kind"], shown)


def _figure(row: Mapping[str, Any]) -> list[str]:
    value = row["value"]
    said = "–" if value is None else f"{value:.3g}" if isinstance(value, float) else f"{value}"
    met = " (missed)" if row["met"] is False else ""
    return [row["name"], f"{said} {row['unit']}".strip(), f"{row['goal'] or ''}{met}", row["kind"]]


# -- layouts -------------------------------------------------------------------------------------------------


def layout_example(name: str) -> str:
    """A picture of two layouts, and the steps between them as text."""
    example = EXAMPLES[name]
    words = f"{' '.join(example.before)}; {' '.join(example.after)}"
    return f"![{words}](layouts/{name}.svg)\n\n{steps_as_text(example)}\n"


# -- writing --------------------------------------------------------------------------------------------

#: What is drawn between marks, by the mark's name.
DRAWINGS: dict[str, Callable[[], str]] = {
    "gain": gain,
    "map": room_table,
    "job": job,
    "switch": lambda: _events(switch.TABLE, switch.SwitchPhase),
    "agent": lambda: _events(machine.TABLE, machine.AgentPhase),
    "layout figures": partial(figures, "layouts", "lines"),
    **{f"layout {name}": partial(layout_example, name) for name in EXAMPLES},
    "published figures": partial(figures, "published"),
    "batch figures": partial(
        figures, "batch", "planning", "gap", "stages", "published", "pool", "slowdown", "forms"
    ),
    "batch": lambda: (
        f"![A step's rows: lanes down, time across](layouts/batch.svg)\n\n{batch_picture.numbers()}"
    ),
}


def drawn(page: Path, *names: str) -> str:
    """A page with these drawings as the program has them now."""
    text = page.read_text()
    for name in names:
        mark = re.compile(rf"(<!-- drawn: {name} -->\n).*?(<!-- end -->)", re.DOTALL)
        found = mark.search(text)
        if found is None:
            raise SystemExit(f"{page.name} has no place for <!-- drawn: {name} --> ... <!-- end -->")
        text = f"{text[: found.start()]}{found[1]}{DRAWINGS[name]()}\n{found[2]}{text[found.end() :]}"
    return text


PAGES: dict[str, Callable[[], str]] = {
    "../README.md": lambda: drawn(ROOT / "README.md", "gain"),
    "architecture.md": lambda: drawn(DOCS / "architecture.md", "map", "job", "switch", "agent"),
    "layouts.md": lambda: drawn(
        DOCS / "layouts.md", "layout figures", *(f"layout {name}" for name in EXAMPLES)
    ),
    "batches.md": lambda: drawn(DOCS / "batches.md", "batch", "batch figures"),
    "planner.md": lambda: drawn(DOCS / "planner.md", "published figures"),
    "layouts/batch.svg": batch_picture.picture,
    **{f"layouts/{name}.svg": partial(picture, example) for name, example in EXAMPLES.items()},
    "map.md": map_page,
    "reference/configuration.md": configuration_page,
    "reference/metrics.md": metrics_page,
    "reference/events.md": events_page,
    "../elasticd/dashboard/tools/api.d.ts": declarations,
}


def main() -> None:
    """Write the pages, or with --check exit with 1 where one is stale."""
    stale = []
    for name, made in PAGES.items():
        path, text = DOCS / name, made()
        if not path.exists() or path.read_text() != text:
            stale.append(name)
            if "--check" not in sys.argv:
                path.parent.mkdir(exist_ok=True)
                path.write_text(text)
    if "--check" in sys.argv and stale:
        raise SystemExit(f"stale: {', '.join(stale)}; run python docs/draw.py")


if __name__ == "__main__":
    main()
