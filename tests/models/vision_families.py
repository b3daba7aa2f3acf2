"""Every class of the installed transformers that takes `mm_encoder_outputs`: split exactly, or refused by name.

`python -m tests.models.vision_families` tries them all, or those that are named, and writes the table of
docs/huggingface.md.
"""

from __future__ import annotations

import functools
import importlib
import multiprocessing
import re
import sys
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from elasticd.models.huggingface.small_images import small_config
from elasticd.models.huggingface.split import split_model
from elasticd.models.huggingface.vision_language import LANGUAGE, VISION
from elasticd.runtime.model.validation import ModelError
from tests.models.double import DoubleThroughout
from tests.models.families import said

PAGE = Path(__file__).resolve().parents[2] / "docs" / "huggingface.md"
START, END = (
    "<!-- vision-language families: written by tests/models/vision_families.py -->\n",
    "<!-- end of vision-language families -->\n",
)
LIMIT = 300.0  # seconds for a class
HEAD = "| class | outcome | encoder | a TP group cuts | frozen | packs | why |\n|---|---|---|---|---|---|---|\n"


@functools.cache
def classes() -> dict[str, str]:
    """The names of the classes, and of the modules that have them."""
    import transformers

    made = {}
    for path in sorted((Path(transformers.__file__).parent / "models").glob("*/modeling_*.py")):
        text = path.read_text()
        if "mm_encoder_outputs" in text:
            for name in re.findall(r"^class (\w+)\(", text, re.MULTILINE):
                if name.endswith("ForConditionalGeneration"):
                    made[name] = f"transformers.models.{path.parent.name}.{path.stem}"
    return made


def row(name: str) -> str:
    """What becomes of a class of default configuration, as a row of the table."""
    kind = getattr(importlib.import_module(classes()[name]), name)
    try:
        model = _made(kind)
    except Exception as error:
        return _row(name, "not made", why=said(error))
    try:
        with warnings.catch_warnings(), DoubleThroughout():
            warnings.simplefilter("ignore")
            split = split_model(model)
    except ModelError as error:
        return _row(name, "refused", why=said(error))
    if not split.apart < 1e-12:
        return _row(name, "WRONG", why=f"{split.apart:.0e} off")
    cut = [module for module in (VISION, LANGUAGE) if split.modules[module].rules]
    one, unpackable = split.proof.one_block, split.proof.unpackable
    encoder = "one block" if one else f"{len(split.modules[VISION].blocks)} blocks"
    return _row(
        name,
        "splits",
        encoder,
        ", ".join(cut),
        str(len(split.frozen) or ""),
        f"no: {said(ModelError(unpackable.partition(': ')[2]))}" if unpackable else "yes",
        said(ModelError(one)) if one else "",
    )


def _made(kind: Any) -> Any:
    """A model without storage; a small one where the default configuration makes none."""
    with torch.device("meta"):
        try:
            return kind(kind.config_class())
        except Exception:
            return kind(small_config(kind.config_class(), 5))


def _row(
    name: str, outcome: str, encoder: str = "", cut: str = "", frozen: str = "", packs: str = "", why: str = ""
) -> str:
    return f"| {name} | {outcome} | {encoder} | {cut} | {frozen} | {packs} | {why} |\n"


def apart_from_others(name: str) -> str:
    """The row of a class that is tried in a fork of this process, which is killed after LIMIT seconds."""
    forks = multiprocessing.get_context("fork")
    ours, its = forks.Pipe(duplex=False)
    child = forks.Process(target=lambda: its.send(row(name)))
    child.start()
    its.close()
    try:
        return str(ours.recv()) if ours.poll(LIMIT) else _row(name, "not made", why="no result in time")
    except EOFError:
        return _row(name, "not made", why="its process ended")
    finally:
        child.kill()
        child.join()


def rows() -> dict[str, str]:
    """The table's rows by class."""
    page = PAGE.read_text()
    table = page[page.index(START) + len(START) : page.index(END)].splitlines(keepends=True)
    return {
        each.split("|")[1].strip(): each for each in table if each.startswith("| ") and each[:8] != "| class "
    }


def main() -> int:
    """Tries the classes, and writes the row of each."""
    torch.set_num_threads(1)
    for name in sys.argv[1:] or classes():
        _write(rows() | {name: (found := apart_from_others(name))})
        print(found, end="", flush=True)
    return 0


def _write(known: dict[str, str]) -> None:
    """The page with these rows, and how many there are of each outcome."""
    page = PAGE.read_text()
    known = {name: each for name, each in known.items() if name in classes()}
    outcomes = Counter(each.split("|")[2].strip() for each in known.values())
    counted = ", ".join(f"{outcomes[outcome]} {outcome}" for outcome in ("splits", "refused", "not made"))
    table = f"Of {len(known)} classes: {counted}.\n\n{HEAD}" + "".join(known[name] for name in sorted(known))
    start, end = page.index(START) + len(START), page.index(END)
    PAGE.write_text(page[:start] + table + page[end:])


if __name__ == "__main__":
    sys.exit(main())
