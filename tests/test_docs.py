"""The documentation is true where a test can tell."""

from __future__ import annotations

import doctest
import itertools
import os
import re
import shlex
from pathlib import Path
from xml.etree import ElementTree

import click
import pytest

from elasticd.cli.app import elasticd
from tests import forkserver
from tests.pages import commands

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("planner/elasticd_planner", "migration/elasticd_migration", "elasticd", "agent/elasticd_agent")
#: How much of a text in a picture is to the left of its place.
BEFORE = {"start": 0.0, "middle": 0.5, "end": 1.0}


def test_what_is_drawn_from_the_program_is_as_the_program_is_now(tmp_path: Path) -> None:
    """Diagrams, the map of the tree, and the reference of configuration, metrics and events."""
    variables = {**os.environ, "PYTHONPATH": str(ROOT)}
    check = forkserver.start(ROOT / "docs/draw.py", "--check", environment=variables, output=tmp_path / "said")
    assert check.wait(300) == 0, (tmp_path / "said").read_text()


def test_every_number_of_the_configuration_has_a_unit() -> None:
    page = (ROOT / "docs/reference/configuration.md").read_text()
    rows = re.findall(r"^\| `([^`]+)` \| (?:integer|number) \| [^|]* \| ([^|]*) \|", page, re.MULTILINE)
    assert len(rows) > 30
    assert {key for key, unit in rows if not unit.strip()} == {"port"}


def test_modules_that_pages_name_exist() -> None:
    """A path in backticks that begins with a folder of a package is a module, a folder or a file."""
    folders = {path.parent for package in PACKAGES for path in (ROOT / package).rglob("*.py")}
    paths = {path.with_suffix("") for folder in folders for path in folder.glob("*.py")} | folders
    known = {"/" + path.relative_to(ROOT).as_posix() for path in paths}
    rooms = {folder.name for folder in folders} | {"planner", "migration", "agent"}
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]:
        for name in re.findall(r"`([a-z_]+(?:/[a-z_]+)+)/?(?:\.py)?`", page.read_text()):
            if name.split("/")[0] in rooms and not (ROOT / name).exists():
                assert any(path.endswith("/" + name) for path in known), f"{page.name}: {name}"


#: What docs/status.md alone says: what has run where, and what is missing.
OF_STATUS = re.compile(
    r"\b(not yet|exist yet|for now|(no|not an?) GPU (was|is) at hand|was at hand|do(es)? not exist"
    r"|(was|were|has|have)( not|n't) (been )?(run|tried|tested)( \w+)? (on|under|by us)"
    r"|never (run|been run|tried)|(have|has) (not|never) (run|been run) on|not implemented"
    r"|on one (H100|GPU)\b(?! (each|per))|on an H100|\bGPU has (not )?run|device alone"
    r"|(not there|does not do) yet)",
    re.IGNORECASE,
)


def test_status_alone_says_what_has_run_where_and_what_is_missing() -> None:
    """One page of truth: the others say what the program does, and link to it."""
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    sentences = [
        f"{page.relative_to(ROOT)}: ... {match.string[max(match.start() - 60, 0) : match.end() + 60]} ..."
        for page in pages
        if page.name != "status.md"
        for match in OF_STATUS.finditer(" ".join(page.read_text().split()))
    ]
    assert not sentences, "say it in docs/status.md, and link there:\n" + "\n".join(sentences)
    assert OF_STATUS.search((ROOT / "docs/status.md").read_text())
    for page in ("README.md", "docs/gpu.md", "docs/profile.md", "docs/operations.md", "docs/sensing.md"):
        assert "status.md" in (ROOT / page).read_text(), page


@pytest.mark.parametrize(
    "sentence",
    [
        "No GPU was at hand.",
        "Context and expert parallelism do not exist yet",
        "the planner does not use the speed of single links: not yet",
        "it was not run on a GPU",
        "This was\nnot run under Slurm by us",
        "that path has never run",
        "For now each piece is a whole sample.",
        "No GPU has run it yet",
        "that was run on an emulated device alone",
        "they were compared with float64 on an H100",
    ],
)
def test_a_sentence_of_status_is_found_on_another_page(sentence: str) -> None:
    assert OF_STATUS.search(" ".join(sentence.split()))


def test_idioms_that_change_for_rules_are_those_of_the_examples() -> None:
    """Each line of training.md, before and after, stands in the example of that side."""
    section = (ROOT / "docs/training.md").read_text().split("### Three idioms that must change for rules")[1]
    block = section.split("### ")[0]
    pairs = re.findall(r"^    ([qky]\b[^#\n]*\S) {4,}(\S[^\n]*)$", block, re.MULTILINE)
    assert len(pairs) == 3
    before, after = ((ROOT / f"examples/tutorial/{name}.py").read_text() for name in ("gpt", "gpt_tp"))
    for old, new in pairs:
        assert old in before, old
        assert new in after, new
        assert old not in after, old


def test_seconds_that_pages_name_are_keys_metrics_or_fields_of_files() -> None:
    """A name in backticks that ends in `_seconds` can be looked up."""
    references = "".join(page.read_text() for page in (ROOT / "docs/reference").glob("*.md"))
    code = "".join(path.read_text() for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
    for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        for name in re.findall(r"`(?:\w+\.)?(\w+_seconds)`", page.read_text()):
            assert f"`{name}`" in references or re.search(rf"\b(def )?{name}[:(]", code), f"{page.name}: {name}"


def test_the_changelog_has_a_line_for_each_item_under_way() -> None:
    text = (ROOT / "CHANGELOG.md").read_text()
    lines = text[text.index("## Unreleased") : text.index("## 0.1.0\n")].splitlines()[3:]
    assert [line for line in lines if line and not re.match(r"(  )?- |\||###", line)] == []
    items = [line for line in lines if re.match(r"(  )?- ", line)]
    assert len(items) == len(set(items))
    assert [line for line in items if len(line) > 280] == []


def test_relative_links_lead_somewhere() -> None:
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]:
        for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_commands_and_options_that_pages_show_exist() -> None:
    """Lines of code blocks that begin with `elasticd`."""
    seen = 0
    for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        for line in re.findall(r"^ {4,}(elasticd [a-z].*)", page.read_text(), re.MULTILINE):
            words = shlex.split(line, comments=True)[1:]
            command: click.Command = elasticd
            while isinstance(command, click.Group):
                assert words[0] in command.commands, f"{page.name}: {line}"
                command = command.commands[words.pop(0)]
            options = {name for option in command.params for name in (*option.opts, *option.secondary_opts)}
            named = {word.partition("=")[0] for word in words if word.startswith("-")}
            if command.name != "run":  # what follows its script are the script's own options
                assert named <= options, f"{page.name}: {line}"
            seen += 1
    assert seen > 40


def test_each_command_of_a_page_is_run_by_a_test_or_says_why_not() -> None:
    """The tables are in tests/pages/commands.py; each of their lines stands on a page."""
    shown = commands.shown_commands()
    run = {*commands.ALONE, *commands.OF_A_CLUSTER}
    unknown = [f"{each.page}:{each.line}: {each.text}" for each in shown if not _classified(each.text, run)]
    assert not unknown, "say in tests/pages/commands.py where it is run, or why not:\n" + "\n".join(unknown)
    texts = {each.text for each in shown}
    assert not (run - texts), "no page shows these any more"
    idle = [regex for regex in commands.NOT_HERE if not any(re.fullmatch(regex, t, re.DOTALL) for t in texts)]
    assert not idle, "no page shows these any more"


def _classified(text: str, run: set[str]) -> bool:
    return text in run or commands.reason(text) is not None


def test_commands_within_sentences_exist() -> None:
    """Code of a line that begins with `elasticd`; brackets and capitals stand for what the user gives."""
    seen = 0
    for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        for text in re.findall(r"`elasticd ([a-z][^`]*)`", " ".join(page.read_text().split())):
            words = re.sub(r"[\[\]|\\]", " ", text).split()
            command: click.Command = elasticd
            while isinstance(command, click.Group) and words:
                if words[0] not in command.commands:
                    assert command is not elasticd, f"{page.name}: elasticd {text}"
                    break
                command = command.commands[words.pop(0)]
            options = {name for option in command.params for name in (*option.opts, *option.secondary_opts)}
            named = {word.partition("=")[0] for word in words if word.startswith("-")}
            assert command.name == "run" or named <= {*options, "--help"}, f"{page.name}: elasticd {text}"
            seen += 1
    assert seen > 100


def test_elasticd_is_never_installed_from_an_index() -> None:
    """It is in none, so that anybody may register its name there."""
    for page in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.py")]:
        assert not re.search(r"pip install[^`\n]* ['\"]?elasticd", page.read_text()), page.name


def test_examples_that_pages_show_run_as_they_are() -> None:
    """Lines that begin with >>>, with what follows them."""
    tried = 0
    for page in (ROOT / "docs").rglob("*.md"):
        result = doctest.testfile(str(page), module_relative=False)
        assert result.failed == 0, page.name
        tried += result.attempted
    assert tried > 5


@pytest.mark.parametrize("picture", sorted((ROOT / "docs/layouts").glob("*.svg")), ids=lambda path: path.stem)
def test_words_of_a_picture_are_inside_of_it_and_apart(picture: Path) -> None:
    root = ElementTree.parse(picture).getroot()
    _, _, width, height = map(float, root.attrib["viewBox"].split())
    areas = []
    for text in root.iter("{http://www.w3.org/2000/svg}text"):
        size, words = float(text.attrib["font-size"]), text.text or ""
        wide = 0.62 * size * len(words)  # wider than the fonts that pages are read in
        left = float(text.attrib["x"]) - wide * BEFORE[text.attrib["text-anchor"]]
        base = float(text.attrib["y"])
        areas.append((words, left, left + wide, base - 0.8 * size, base + 0.25 * size))
    assert len(areas) > 5
    for words, left, right, top, bottom in areas:
        assert left >= 0, words
        assert right <= width, words
        assert top >= 0, words
        assert bottom <= height, words
    for (one, a, b, c, d), (other, e, f, g, h) in itertools.combinations(areas, 2):
        assert b <= e or f <= a or d <= g or h <= c, f"{one} lies on {other}"
