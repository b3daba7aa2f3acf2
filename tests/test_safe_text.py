"""What others chose is shown without what a terminal or a log would obey."""

from __future__ import annotations

import json
import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elasticd.codec.safe_text import for_terminal, in_one_line, json_for_terminal
from elasticd.system.logs import Seldom, TextLines

HOSTILE = "a\n\tb\x1b[2J\x9b\u202e\r\x7f\x00 \\n \\u001b é"


def test_control_characters_are_written_out() -> None:
    assert in_one_line(HOSTILE) == r"a\n\tb\x1b[2J\x9b\u202e\r\x7f\x00 \n \u001b é"
    assert for_terminal(HOSTILE) == "a\n\tb" + r"\x1b[2J\x9b\u202e\r\x7f\x00 \n \u001b é"


@given(st.text() | st.text(alphabet=HOSTILE), st.booleans())
def test_json_becomes_what_its_texts_become(text: str, ascii_only: bool) -> None:
    data = json.dumps({"k": [text, 1]}, ensure_ascii=ascii_only).encode(errors="surrogatepass")
    assert json.loads(json_for_terminal(data)) == {"k": [for_terminal(text), 1]}


def test_line_of_the_log_is_one_line_and_a_traceback_keeps_its_own() -> None:
    formatter = TextLines("%(levelname)s %(name)s: %(message)s")
    record = logging.LogRecord(
        "elasticd", logging.WARNING, "f", 1, "%s died", ("x\nINFO y: forged\x1b[2J",), None
    )
    assert formatter.format(record) == r"WARNING elasticd: x\nINFO y: forged\x1b[2J died"
    try:
        raise ValueError("\x1b]0;title\x07")
    except ValueError as error:
        record.exc_info = (type(error), error, error.__traceback__)
    lines = formatter.format(record).splitlines()
    assert lines[-1] == r"ValueError: \x1b]0;title\x07"
    assert len(lines) > 3


def test_what_comes_again_and_again_is_logged_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    now = 0.0
    seldom = Seldom(logging.getLogger("elasticd.test"), 60.0, lambda: now)
    for now in (0.0, 1.0, 59.0, 60.0, 61.0):
        seldom.warn(f"it happened at {now:g}")
    said = [record.getMessage() for record in caplog.records]
    assert said == ["it happened at 0", "it happened at 60 (and 2 more like this one before it)"]
