"""What every release wrote is decoded for ever, field by field; nothing is written that has no golden line."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from elasticd_planner import formats
from elasticd_planner.given import _File
from elasticd_planner.plan import Plan
from elasticd_planner.value import StoredValue, explicit_tag

from elasticd import messages, recording
from elasticd.cli.moves import answered
from elasticd.decoding import decode_stored
from elasticd.wire import WIRE_VERSION, Message
from tests.releases import write
from tests.releases.samples import Golden, goldens, kinds, sample

ROOT = Path(__file__).resolve().parent.parent.parent
FILES = write.files()
#: Files without a class of their own, by tag.
FILE_TAGS = {"planning-answer", "profile"}
BODIES = {"began": recording.Line.state, "heard": recording.Line.event, "told": recording.Line.note}


def decoded(golden: Golden) -> Any:
    """By the decoder that a receiver has today."""
    if golden.tag == "profile":
        return msgspec.json.decode(golden.text, type=_File)
    if golden.tag == "planning-answer":
        return answered(golden.text, "golden").plan
    kind = kinds()[golden.tag]
    if issubclass(kind, Message):
        return msgspec.json.decode(golden.text, type=kind)
    if kind is Plan:
        return Plan.from_json(golden.text)
    if kind is formats.TableProblem:
        return formats.load(golden.text)
    return decode_stored(golden.text, kind)


def missing(golden: Any, again: Any, path: str = "$") -> Iterator[str]:
    """What of the golden JSON is not in that of the decoded value."""
    if isinstance(golden, dict) and isinstance(again, dict):
        for key, value in golden.items():
            if key not in again:
                yield f"{path}.{key}"
            else:
                yield from missing(value, again[key], f"{path}.{key}")
    elif isinstance(golden, list) and isinstance(again, list) and len(golden) == len(again):
        for i, (value, other) in enumerate(zip(golden, again, strict=True)):
            yield from missing(value, other, f"{path}[{i}]")
    elif golden != again:
        yield f"{path}: {golden!r} is {again!r} now"


def lines(path: Path) -> list[tuple[str, int, Golden]]:
    return [(path.parent.name, number, golden) for number, golden in enumerate(write.read(path), start=1)]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.parent.name)
def test_what_a_release_wrote_is_decoded_field_by_field(path: Path) -> None:
    wrong = []
    for release, number, golden in lines(path):
        value = decoded(golden)
        if golden.tag in FILE_TAGS:
            continue
        raw, again = msgspec.json.decode(golden.text), msgspec.json.decode(msgspec.json.encode(value))
        assert raw["type"] == golden.tag
        if isinstance(value, recording.Line):
            body = BODIES[value.what](value)
            again["body"] = msgspec.json.decode(recording.began(body, 0.0, 0.0))["body"]
        wrong += [f"{release}, line {number}, {golden.tag}: {each}" for each in missing(raw, again)]
    assert wrong == []


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.parent.name)
def test_what_a_release_said_is_understood_by_who_hears_it(path: Path) -> None:
    """Each message by a receiver's own reader, too, which skips it where its tag is gone."""
    readers = (messages.from_worker, messages.to_worker, messages.to_leader, messages.to_agent)
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


def test_the_newest_file_has_every_event_of_a_recording() -> None:
    found = [msgspec.json.decode(golden.text) for golden in write.read(FILES[-1])]
    events = {line["kind"] for line in found if line["type"] == "recording-line" and line["what"] == "heard"}
    assert events == recording.EVENTS.keys()
    assert {line["what"] for line in found if line["type"] == "recording-line"} == BODIES.keys()


def test_a_field_that_is_gone_or_other_is_found() -> None:
    raw = {"a": 1, "b": {"c": [1, {"d": 2}]}}
    assert list(missing(raw, {"a": 1, "b": {"c": [1, {"d": 2, "e": 3}], "f": 4}})) == []
    assert list(missing(raw, {"b": {"c": [1, {"d": 5}]}})) == ["$.a", "$.b.c[1].d: 2 is 5 now"]
    assert list(missing(raw, {"a": 1, "b": {"c": [1]}})) == ["$.b.c: [1, {'d': 2}] is [1] now"]


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
    assert count == len(before.splitlines()) == len(list(goldens()))
    with pytest.raises(FileExistsError):
        write.write(path, anew=False)
    path.write_bytes(b"")
    assert write.write(path, anew=True) == count
    assert path.read_bytes() == before
    assert write.read(path) == list(goldens())
