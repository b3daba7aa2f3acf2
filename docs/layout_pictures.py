"""Pictures of layouts and of the steps between them, as `resolve` gives them: SVG for docs/layouts.md.

A picture has a column for each device. On top is what each holds before, at the bottom what each holds after,
and between them a line for each step. docs/draw.py writes them; a picture is the same text on every machine.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

from elasticd_planner.layout.resolve import Cell, Communication, Operation, dual, resolve
from elasticd_planner.spec.box import Box, Holding, TensorLayout

ROWS = 12
#: Colours that people tell apart who see few colours (Okabe and Ito, 2008), on white in light and dark pages.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#b8860b", "#a64d8a", "#3f7f9f")
#: Degrees by which the hatching of the terms of a sum is turned.
ANGLES = (45, -45, 0, 90)
WIDTH, LEFT, TOP = 800, 176, 34
#: Of a tensor as it is drawn, and of a line with one step.
TENSOR_WIDTH, TENSOR_HEIGHT, STEP = 60, 84, 32


@dataclass(frozen=True, kw_only=True)
class Example:
    """Two layouts of one tensor; `before` and `after` are words beside them, line by line."""

    before: Sequence[str]
    after: Sequence[str]
    source: TensorLayout
    target: TensorLayout
    agree: bool = False  # see `resolve`

    @property
    def steps(self) -> tuple[Communication, ...]:
        """What `resolve` makes of the two."""
        return resolve(self.source, self.target, agree=self.agree)

    @property
    def devices(self) -> tuple[str, ...]:
        """All that have a column, in the order of their names."""
        return tuple(sorted({h.device for h in (*self.source.holdings, *self.target.holdings)}))


def rows(**parts: str) -> TensorLayout:
    """`rows(a0="0:8", b0="8:12 of left")`: rows [0, 8) on a/0, and on b/0 rows [8, 12) of the term "left"."""
    holdings = []
    for name, text in parts.items():
        part, _, term = text.partition(" of ")
        start, stop = map(int, part.split(":"))
        box = Box(start=(start,), stop=(stop,))
        holdings.append(Holding(device=f"{name[:-1]}/{name[-1]}", box=box, partial=term or None))
    return TensorLayout(name="x", shape=(ROWS,), dtype="float32", holdings=tuple(holdings))


_TP_3 = rows(a0="0:5", a1="5:9", a2="9:12")
_TERMS = rows(a0="0:12 of 1", a1="0:12 of 2", a2="0:12 of 3")
_KEPT = rows(a0="0:6", b0="6:12", c0="0:6")
_COMPUTED = rows(a0="0:12", b0="0:12")

#: By the name of the file.
EXAMPLES = {
    "gradients": Example(
        before=("gradient:", "pipeline a has TP 3,", "pipeline b has TP 2"),
        after=("the sum, wherever", "the parameter is"),
        source=rows(a0="0:4 of a", a1="4:8 of a", a2="8:12 of a", b0="0:6 of b", b1="6:12 of b"),
        target=rows(a0="0:4", a1="4:8", a2="8:12", b0="0:6", b1="6:12"),
        agree=True,
    ),
    "gather": Example(
        before=("activation in slices", "of unequal size"),
        after=("all of it on all",),
        source=_TP_3,
        target=rows(a0="0:12", a1="0:12", a2="0:12"),
    ),
    "slice": Example(
        before=("its gradient,", "the same on all"),
        after=("each its slice",),
        source=dual(rows(a0="0:12", a1="0:12", a2="0:12")),
        target=dual(_TP_3),
    ),
    "scatter": Example(
        before=("each member has", "a term of the output"),
        after=("slices of the sum",),
        source=_TERMS,
        target=_TP_3,
    ),
    "boundary": Example(
        before=("output of a stage", "of TP 3, in slices"),
        after=("input of the next", "stage, of TP 2"),
        source=rows(a0="0:4", a1="4:8", a2="8:12"),
        target=rows(b0="0:6", b1="6:12"),
    ),
    "boundary-whole": Example(
        before=("output of a stage", "of TP 3, complete"),
        after=("input of the next", "stage, of TP 2"),
        source=rows(a0="0:12", a1="0:12", a2="0:12"),
        target=rows(b0="0:12", b1="0:12"),
    ),
    "zero-gradients": Example(
        before=("reduced gradient:", "a/0 and b/0 compute"),
        after=("where the optimizer", "state is: c/0 keeps", "a replica"),
        source=_COMPUTED,
        target=_KEPT,
    ),
    "zero-values": Example(
        before=("updated values", "where the state is"),
        after=("where the next step", "computes with them"),
        source=rows(a0="0:6", b0="6:12"),
        target=_COMPUTED,
    ),
    "switch": Example(
        before=("old plan: TP 2",),
        after=("new plan: a/1 left,", "b/0 is slower"),
        source=rows(a0="0:6", a1="6:12"),
        target=rows(a0="0:8", b0="8:12"),
    ),
}


def steps_as_text(example: Example) -> str:
    """A line for each step: what it is, over which devices, and which rows go where."""
    lines = []
    for step in example.steps:
        cells = "; ".join(_words(step.operation, cell) for cell in step.cells)
        lines.append(f"    {_name(step.operation):<15}{' '.join(step.devices):<13}{cells}")
    return "\n".join(line.rstrip() for line in lines)


def _words(operation: Operation, cell: Cell) -> str:
    if operation in ("keep", "all_reduce"):
        return _range(cell.box)
    if operation == "all_gather":
        return f"{_range(cell.box)} from {cell.sources[0]}"
    return f"{_range(cell.box)} to {' '.join(cell.needers)}"


def _name(operation: Operation) -> str:
    return operation.replace("_", "-")


def _range(box: Box) -> str:
    """As a tensor is indexed."""
    return "[" + ", ".join(f"{start}:{stop}" for start, stop in zip(box.start, box.stop, strict=True)) + "]"


# -- the picture --------------------------------------------------------------------------------------------


def picture(example: Example) -> str:
    """The example as SVG."""
    return "\n".join(_Picture(example).lines()) + "\n"


class _Picture:
    def __init__(self, example: Example) -> None:
        self._example = example
        devices = example.devices
        width = min(150.0, (WIDTH - LEFT - 16) / len(devices))
        self._x = {device: LEFT + width * (number + 0.5) for number, device in enumerate(devices)}
        self._colour = {device: COLOURS[number % len(COLOURS)] for number, device in enumerate(devices)}
        terms = dict.fromkeys(h.partial for h in (*example.source.holdings, *example.target.holdings))
        self._angle = {term: ANGLES[i % len(ANGLES)] for i, term in enumerate(filter(None, terms))}

    def lines(self) -> Iterator[str]:
        """Line by line."""
        example, y = self._example, TOP
        drawn = [_text(x, 24, device, bold=True, colour=self._colour[device]) for device, x in self._x.items()]
        drawn += self._layout(example.source, example.before, y)
        y += TENSOR_HEIGHT + self._captions(example.source)
        for step in example.steps:
            y += STEP
            drawn += self._step(step, y - STEP / 2 + 6)
        y += 20
        drawn += self._layout(example.target, example.after, y)
        y += TENSOR_HEIGHT + self._captions(example.target)
        drawn += self._legend(y + 18)
        height = y + 32
        yield (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:g}" width="{WIDTH}" '
            f'height="{height:g}" font-family="system-ui, Helvetica, Arial, sans-serif" role="img">'
        )
        before, after = " ".join(example.before), " ".join(example.after)
        yield f"<title>{escape(before)}, then {escape(after)}</title>"
        yield "<!-- Written by docs/draw.py. Do not edit. -->"
        yield from self._hatchings()
        yield (
            f'<rect x="0.5" y="0.5" width="{WIDTH - 1}" height="{height - 1:g}" rx="8" fill="#ffffff" '
            'stroke="#c8ccd0"/>'
        )
        yield from drawn
        yield "</svg>"

    def _hatchings(self) -> Iterator[str]:
        """A pattern for each device and term that it holds."""
        used = dict.fromkeys(
            (h.device, h.partial) for h in (*self._example.source.holdings, *self._example.target.holdings)
        )
        for device, term in used:
            if term is not None:
                yield (
                    f'<pattern id="{_id(device, term)}" width="7" height="7" patternUnits="userSpaceOnUse" '
                    f'patternTransform="rotate({self._angle[term]})">'
                    '<rect width="7" height="7" fill="#ffffff"/>'
                    f'<rect width="3" height="7" fill="{self._colour[device]}"/></pattern>'
                )

    def _layout(self, layout: TensorLayout, words: Sequence[str], y: float) -> Iterator[str]:
        """Each device's part of the tensor, in its place in the complete one, and words to the left."""
        for number, line in enumerate(words):
            yield _text(16, y + 20 + 18 * number, line, anchor="start")
        scale = TENSOR_HEIGHT / layout.shape[0]
        for device, x in self._x.items():
            mine = [holding for holding in layout.holdings if holding.device == device]
            left = x - TENSOR_WIDTH / 2
            for holding in mine:
                top, high = y + scale * holding.box.start[0], scale * holding.box.shape[0]
                fill = (
                    self._colour[device] if holding.partial is None else f"url(#{_id(device, holding.partial)})"
                )
                yield _rectangle(left, top, TENSOR_WIDTH, high, fill, self._colour[device])
            yield _rectangle(left, y, TENSOR_WIDTH, TENSOR_HEIGHT, "none", "#8c959f" if mine else "#d8dce0")
            for number, holding in enumerate(mine):
                caption = _range(holding.box)
                caption += f" of term {holding.partial}" if holding.partial else ""
                yield _text(x, y + TENSOR_HEIGHT + 16 + 15 * number, caption, size=12)

    def _captions(self, layout: TensorLayout) -> int:
        """How high the captions below a layout are."""
        devices = [holding.device for holding in layout.holdings]
        return 15 * max(devices.count(device) for device in devices) + 8

    def _step(self, step: Communication, y: float) -> Iterator[str]:
        """A line over the devices of a step: who gives to it, and who gets what from it."""
        label = _name(step.operation)
        if step.operation == "all_reduce":
            label += " " + " ".join(_range(cell.box) for cell in step.cells)
        yield _text(16, y + 4, label, anchor="start", bold=True)
        ends = sorted(self._x[device] for device in step.devices)
        if len(ends) > 1:
            at = f'x1="{ends[0]:g}" y1="{y:g}" x2="{ends[-1]:g}" y2="{y:g}"'
            yield f'<line {at} stroke="#57606a" stroke-width="2"/>'
        gives = {device for cell in step.cells for device in cell.sources}
        gets = {device for cell in step.cells for device in cell.needers}
        for device in step.devices:
            yield from self._mark(device, y, gives=device in gives, gets=device in gets)
            beside = self._beside(step, device)
            if beside:
                yield _text(self._x[device] + 11, y - 6, beside, anchor="start", size=11)

    def _beside(self, step: Communication, device: str) -> str:
        """The rows that a device gets from a step; of an all-gather, which gives all to all, those it gives."""
        if step.operation == "all_reduce":
            return ""
        gives = step.operation == "all_gather"
        mine = [cell.box for cell in step.cells if device in (cell.sources if gives else cell.needers)]
        return " ".join([*(["gives"] if gives and mine else []), *map(_range, mine)])

    def _mark(self, device: str, y: float, *, gives: bool, gets: bool) -> Iterator[str]:
        x, colour = self._x[device], self._colour[device]
        if gets:
            yield f'<circle cx="{x:g}" cy="{y:g}" r="7" fill="#ffffff" stroke="{colour}" stroke-width="2"/>'
        if gives:
            yield f'<circle cx="{x:g}" cy="{y:g}" r="{4 if gets else 7}" fill="{colour}"/>'

    def _legend(self, y: float) -> Iterator[str]:
        grey = "#57606a"
        yield f'<circle cx="22" cy="{y - 4:g}" r="6" fill="{grey}"/>'
        yield _text(34, y, "gives", anchor="start", size=12, colour=grey)
        yield f'<circle cx="88" cy="{y - 4:g}" r="6" fill="#ffffff" stroke="{grey}" stroke-width="2"/>'
        yield _text(100, y, "gets the rows beside it", anchor="start", size=12, colour=grey)
        yield f'<circle cx="290" cy="{y - 4:g}" r="6" fill="#ffffff" stroke="{grey}" stroke-width="2"/>'
        yield f'<circle cx="290" cy="{y - 4:g}" r="3.5" fill="{grey}"/>'
        yield _text(302, y, "both", anchor="start", size=12, colour=grey)
        words = "filled: the value; hatched: one term of a sum" if self._angle else "filled: the value"
        yield _text(WIDTH - 16, y, words, anchor="end", size=12, colour=grey)


def _id(device: str, term: str) -> str:
    return f"{device.replace('/', '')}-{term}"


def _rectangle(x: float, y: float, width: float, height: float, fill: str, stroke: str) -> str:
    return (
        f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" fill="{fill}" stroke="{stroke}" '
        'stroke-width="1"/>'
    )


def _text(
    x: float,
    y: float,
    words: str,
    *,
    anchor: str = "middle",
    size: int = 13,
    bold: bool = False,
    colour: str = "#1f2328",
) -> str:
    weight = ' font-weight="600"' if bold else ""
    return (
        f'<text x="{x:g}" y="{y:g}" font-size="{size}" text-anchor="{anchor}"{weight} fill="{colour}">'
        f"{escape(words)}</text>"
    )
