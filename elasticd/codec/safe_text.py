"""Text that another process chose, without what a terminal or a log would obey.

A worker's last words, a torchrun's name or a reason may hold any character: one that ends the line could forge
a line of a log, an escape could move the cursor or set a terminal's title, and marks of direction could show
names in another order. Such characters are written out as Python writes them: an escape as \\x1b.
Standard library only.
"""

from __future__ import annotations

import re

#: C0 and C1, delete, the separators of lines and paragraphs, and marks of direction (Unicode TR 36).
_CONTROL = "\\x00-\\x1f\\x7f-\\x9f\\u061c\\u200e\\u200f\\u2028-\\u202e\\u2066-\\u2069"
_IN_LINE = re.compile(f"[{_CONTROL}]")
_IN_TEXT = re.compile(f"(?![\\n\\t])[{_CONTROL}]")
#: In JSON: an escape sequence, or one of these characters as it is.
_IN_JSON = re.compile(rf"\\(?:u([0-9a-fA-F]{{4}})|.)|[{_CONTROL}]")


#: Characters of one text, and what stands where the rest of it was.
MOST_TEXT, MARK = 4000, "... (cut)"


def shortened(text: str, most: int = MOST_TEXT) -> str:
    """At most so many characters of a text, and a mark where some are missing."""
    return text if len(text) <= most else text[: most - len(MARK)] + MARK


def in_one_line(text: str) -> str:
    """Without any control character."""
    return _IN_LINE.sub(_written, text)


def for_terminal(text: str) -> str:
    """The same, but with its lines and tabs."""
    return _IN_TEXT.sub(_written, text)


def json_for_terminal(data: bytes) -> bytes:
    """JSON, of which each text becomes as by `for_terminal` when it is decoded."""

    def written(match: re.Match[str]) -> str:
        character = chr(int(match[1], 16)) if match[1] else match[0]
        if character in ("\\b", "\\f", "\\r"):
            character = {"b": "\b", "f": "\f", "r": "\r"}[character[1]]
        if len(character) == 1 and _IN_TEXT.fullmatch(character):
            return f"\\{_escape(character)}"
        return match[0]

    return _IN_JSON.sub(written, data.decode(errors="replace")).encode()


def _written(match: re.Match[str]) -> str:
    return _escape(match[0])


def _escape(character: str) -> str:
    return character.encode("unicode_escape").decode()
