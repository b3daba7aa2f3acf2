"""What every release wrote is decoded for ever, field by field; nothing is written that has no golden line."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal

import msgspec
import pytest
from elasticd_planner.value import StoredValue, explicit_tag

from elasticd import recording
from elasticd.codec.message import WIRE_VERSION, Message
from elasticd.wire.coordinator import to_agent, to_leader
from elasticd.wire.worker import from_worker, to_worker
from tests.releases import kept, write
from tests.releases.samples import (
    BODIES,
    Alternative,
    Golden,
    Omitting,
    all_alternatives,
    alternatives,
    alternatives_in,
    decoded,
    encoded,
    found_in,
    goldens,
    kinds,
    read_back,
    sample,
)

ROOT = Path(__file__).resolve().parent.parent.parent
FILES = write.files()
#: Files without a class of their own, by tag.
FILE_TAGS = {"planning-answer", "profile"}


def missing(golden: Any, again: Any, path: str = "$") -> Iterator[str]:
    """What of the golden JSON is not in that of the decoded value. Types count: true is not 1, nor is 1.0."""
    if isinstance(golden, dict) and isinstance(again, dict):
        for key, value in golden.items():
            if key not in again:
                yield f"{path}.{key}"
            else:
                yield from missing(value, again[key], f"{path}.{key}")
    elif isinstance(golden, list) and isinstance(again, list) and len(golden) == len(again):
        for i, (value, other) in enumerate(zip(golden, again, strict=True)):
            yield from missing(value, other, f"{path}[{i}]")
    elif golden != again or type(golden) is not type(again):
        yield f"{path}: {golden!r} is {again!r} now"


def added(golden: Any, again: Any, before: Any, full: Any, path: str = "$") -> Iterator[str]:
    """Keys that are written now and were left out, of objects whose class omitted defaults, or does so now.

    Args:
        golden: JSON as the release wrote it.
        again: the same value as this release writes it.
        before: all fields that the release's reader kept.
        full: all fields that this release's reader keeps.
    """
    if isinstance(golden, dict) and isinstance(again, dict):
        for key in again.keys() - golden.keys():
            if key in before or isinstance(full, Omitting):
                yield f"{path}.{key} is written now"
        for key in golden.keys() & again.keys() & before.keys() & full.keys():
            yield from added(golden[key], again[key], before[key], full[key], f"{path}.{key}")
    elif isinstance(golden, list) and isinstance(again, list):
        for i, values in enumerate(zip(golden, again, before, full, strict=False)):
            yield from added(*values, f"{path}[{i}]")


def alternatives_of(golden: Golden) -> set[Alternative]:
    return {found.alternative for found in found_in(golden)}


def lacking(lines: Iterable[set[Alternative]]) -> list[str]:
    """The alternatives of fields that no line has, by the alternatives of each line."""
    return sorted(str(each) for each in all_alternatives().difference(*lines))


def findings(golden: Golden) -> list[str]:
    """What this release reads, or writes again, in another way than the release that wrote the line."""
    raw = msgspec.json.decode(golden.text)
    if golden.tag == "recording-line" and raw["kind"] in recording.GONE:
        return []
    full = read_back(golden)
    expected = msgspec.json.decode(golden.full) if golden.full else raw
    if golden.tag in FILE_TAGS:  # what writes them is no class that a reader has
        return list(missing(expected, full))
    again = msgspec.json.decode(encoded(decoded(golden)))
    return [*missing(raw, again), *added(raw, again, expected, full), *missing(expected, full)]


def lines(path: Path) -> list[tuple[str, int, Golden]]:
    return [(path.parent.name, number, golden) for number, golden in enumerate(write.read(path), start=1)]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.parent.name)
def test_what_a_release_wrote_is_decoded_field_by_field(path: Path) -> None:
    wrong = []
    for release, number, golden in lines(path):
        if golden.tag not in FILE_TAGS:
            assert msgspec.json.decode(golden.text)["type"] == golden.tag
        wrong += [f"{release}, line {number}, {golden.tag}: {each}" for each in findings(golden)]
    assert wrong == []


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.parent.name)
def test_the_readers_of_this_release_decode_each_message_of_a_release(path: Path) -> None:
    """A receiver's own reader skips a message whose tag is gone, so that one reader must give its class."""
    readers = (from_worker, to_worker, to_leader, to_agent)
    for _, _, golden in lines(path):
        kind = kinds().get(golden.tag)
        if kind is None or not issubclass(kind, Message) or golden.tag.startswith("stream-"):
            continue
        heard = []
        for read in readers:
            try:
                heard.append(read(golden.text))
            except msgspec.DecodeError as error:
                pytest.fail(f"{golden.tag}: {error}")
        assert any(type(message) is kind for message in heard), golden.tag


def test_every_message_and_stored_value_has_a_line_in_the_newest_file() -> None:
    """If this fails because of a new one, run `python -m tests.releases.write --anew`."""
    assert {golden.tag for golden in write.read(FILES[-1])} == kinds().keys() | FILE_TAGS


def test_a_recording_is_read_without_events_that_are_gone() -> None:
    found = [golden.text for golden in write.read(FILES[0]) if golden.tag == "recording-line"]
    kinds = [line.kind for line in recording.read(found, "the first release's")]
    assert len(kinds) == len(found) - 1
    assert {*kinds} <= {"", *recording.EVENTS}


def test_the_newest_file_has_every_event_of_a_recording() -> None:
    found = [msgspec.json.decode(golden.text) for golden in write.read(FILES[-1])]
    events = {line["kind"] for line in found if line["type"] == "recording-line" and line["what"] == "heard"}
    assert events == recording.EVENTS.keys()
    assert {line["what"] for line in found if line["type"] == "recording-line"} == BODIES.keys()


def test_the_newest_file_has_every_alternative_of_a_field() -> None:
    """If this fails because of a new one, run `python -m tests.releases.write --anew`."""
    assert lacking(map(alternatives_of, write.read(FILES[-1]))) == []


def test_the_file_of_the_release_under_way_is_what_the_program_writes_today() -> None:
    path = write.FOLDER / write.under_way() / write.NAME
    if write.under_way() not in kept.RELEASED and path.exists():
        assert path.read_bytes() == write.written(), "run python -m tests.releases.write --anew"


def test_every_release_has_its_golden_file() -> None:
    assert set(kept.RELEASED) <= {path.parent.name for path in FILES}


# -- the comparison itself -------------------------------------------------------------------------------------


def test_a_field_that_is_gone_or_other_is_found() -> None:
    raw = {"a": 1, "b": {"c": [1, {"d": 2}]}}
    assert list(missing(raw, {"a": 1, "b": {"c": [1, {"d": 2, "e": 3}], "f": 4}})) == []
    assert list(missing(raw, {"b": {"c": [1, {"d": 5}]}})) == ["$.a", "$.b.c[1].d: 2 is 5 now"]
    assert list(missing(raw, {"a": 1, "b": {"c": [1]}})) == ["$.b.c: [1, {'d': 2}] is [1] now"]


def test_a_sample_is_decoded_as_it_was_made() -> None:
    for tag, kind in kinds().items():
        if kind is not recording.Line:
            assert decoded(Golden(tag, msgspec.json.encode(sample(kind)))) == sample(kind), tag


def test_a_value_of_another_type_is_found() -> None:
    for one, other in ((True, 1), (1, 1.0), (False, 0), (0.0, False)):
        assert list(missing([one], [other])) == [f"$[0]: {one!r} is {other!r} now"]
        assert list(missing([one], [one])) == []


def test_a_key_more_is_found_where_the_class_omits_defaults() -> None:
    golden = {"stages": [{"start": 0}], "reason": ""}
    again = {"stages": [{"start": 0, "stop": 1}], "reason": "", "more": 1}
    assert list(added(golden, again, golden, again)) == []
    omits_now = again | {"stages": [Omitting(start=0, stop=1)]}
    assert list(added(golden, again, golden, omits_now)) == ["$.stages[0].stop is written now"]
    omitted = golden | {"stages": [{"start": 0, "stop": 1}]}
    assert list(added(golden, again, omitted, again)) == ["$.stages[0].stop is written now"]


def _edited(golden: Golden, path: str, value: Any) -> Golden:
    """The line as of a release whose reader kept this value there: keys and indices with dots between."""
    full = msgspec.json.decode(golden.full or golden.text)
    *outer, last = path.split(".")
    holder = full
    for key in outer:
        holder = holder[int(key)] if isinstance(holder, list) else holder[key]
    holder[last] = value
    return golden._replace(full=msgspec.json.encode(full))


@pytest.mark.parametrize(
    ("tag", "path", "value"),
    [
        (
            "plan",
            "strategies.0.modules.0.pipelines.0.stages.1.recompute",
            True,
        ),  # left out of the text: a default
        ("plan", "strategies.0.modules.0.pipelines.0.stages.1.recompute", 0),
        ("profile", "model.layers_that_were", 4),
        ("profile", "model.times.forward", 0.125),
        ("planning-answer", "plan.number_that_was", 1),
    ],
)
def test_another_default_and_a_field_that_a_reader_drops_are_found(tag: str, path: str, value: Any) -> None:
    golden = next(golden for golden in goldens() if golden.tag == tag)
    assert findings(golden) == []
    found = findings(_edited(golden, path, value))
    assert len(found) == 1
    assert path.rpartition(".")[2] in found[0]


def test_a_literal_or_an_arm_without_a_line_is_found() -> None:
    fields = [("how", Literal["cut", "kill"]), ("size", int | str | None), ("pair", tuple[int, float | None])]
    kind = msgspec.defstruct("Toy", fields, kw_only=True)
    raw = {"how": "cut", "size": 3, "pair": [1, None]}
    has = {found.alternative for found in alternatives_in(msgspec.inspect.type_info(kind), raw)}
    assert {str(each) for each in has} == {"Toy.how = 'cut'", "Toy.size = Int", "Toy.pair[1] = None"}
    assert {str(each) for each in alternatives(kind) - has} == {
        "Toy.how = 'kill'",
        "Toy.size = Str",
        "Toy.size = None",
        "Toy.pair[1] = Float",
    }


def test_an_alternative_whose_lines_are_gone_is_found() -> None:
    lines = [alternatives_of(golden) for golden in goldens()]
    assert lacking(lines) == []
    for gone in sorted(all_alternatives())[::20]:
        assert str(gone) in lacking(line for line in lines if gone not in line)


# -- tags and versions -----------------------------------------------------------------------------------------


def _tags_in_source() -> list[str]:
    """The tag of each class of a message or stored value that a source file defines."""
    found = []
    for folder in ("agent", "elasticd", "migration", "planner"):
        for path in (ROOT / folder).rglob("*.py"):
            text = path.read_text()
            if "(Message," not in text and "StoredValue," not in text:
                continue  # parsing all of them takes seconds
            for node in ast.walk(ast.parse(text)):
                if not isinstance(node, ast.ClassDef):
                    continue
                bases = {ast.unparse(base) for base in node.bases}
                tags = [ast.unparse(word.value) for word in node.keywords if word.arg == "tag"]
                if bases & {"Message", "StoredValue"} and "explicit_tag" not in tags:
                    found.append(str(ast.literal_eval(tags[0])))
    return found


def test_no_two_have_one_tag_and_all_are_known_here() -> None:
    """A class in a module that `samples` does not import would have no golden line, and nobody would know."""
    assert sorted(_tags_in_source()) == sorted(kinds())


def test_a_tag_is_words_of_its_own_and_no_name_of_a_class() -> None:
    for tag, kind in kinds().items():
        assert re.fullmatch(r"[a-z]+(-[a-z]+)*", tag), tag
        assert tag != kind.__name__


@pytest.mark.parametrize("base", [Message, StoredValue])
def test_a_class_without_a_tag_is_refused_when_it_is_made(base: type) -> None:
    with pytest.raises(TypeError, match="Nameless: name its tag"):
        msgspec.defstruct("Nameless", [("a", int)], bases=(base,), frozen=True, kw_only=True)
    assert explicit_tag("Message") == "message"


def test_every_message_and_stored_value_says_its_version_first_to_whoever_reads_it() -> None:
    for tag, kind in kinds().items():
        raw = msgspec.json.decode(msgspec.json.encode(sample(kind)))
        assert raw["type"] == tag
        assert isinstance(raw["version"], int)
        if issubclass(kind, Message):
            assert raw["version"] == WIRE_VERSION


# -- the program that writes -----------------------------------------------------------------------------------


def test_a_file_that_is_there_is_not_written_again(tmp_path: Path) -> None:
    path = tmp_path / "9.9.9" / "golden.jsonl"
    count = write.write(path, anew=False)
    before = path.read_bytes()
    assert count == len(before.splitlines()) == len(goldens())
    with pytest.raises(FileExistsError):
        write.write(path, anew=False)
    path.write_bytes(b"")
    assert write.write(path, anew=True) == count
    assert path.read_bytes() == before
    assert write.read(path) == list(goldens())
