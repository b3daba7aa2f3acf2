"""The rows of an item: those on which the blocks of its module work.

They cost time and memory, so that telemetry, profiles, plans and the order of passes count them alone. A head
may give another number: Qwen's joins four rows in one, and that of a CLIP tower drops one. A dataset may say
either in its attribute `rows`: the first of its items, embedded once, tells by how many times they differ.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import NamedTuple

import torch
from elasticd_planner.spec.plan import Stage

from elasticd.runtime.accelerator import CPU, Accelerator
from elasticd.runtime.data.collate import Unlike, pad
from elasticd.runtime.data.loader import item_counts, item_rows, items_of
from elasticd.runtime.data.prefetch import Dataset, SampleError
from elasticd.runtime.engine.mixed_precision import Precision, converted
from elasticd.runtime.model.bundle import Bundle, sizes, tensors
from elasticd.runtime.model.local_model import local_model
from elasticd.runtime.model.model import Module
from elasticd.runtime.model.rng import begun_at
from elasticd.system.user_line import described

log = logging.getLogger(__name__)


class FirstItem(NamedTuple):
    """The first item of a dataset."""

    rows: int = 0  #: on which blocks work; 0: not known
    listed: int = 0  #: rows that the dataset says of it; 0: nothing
    output_bytes: int = 0  #: of what the head gives of it; 0: not known

    @property
    def ratio(self) -> float:
        """Rows on which blocks work for each that the dataset says."""
        return self.rows / self.listed if self.rows and self.listed else 1.0

    @property
    def whole_ratio(self) -> float:
        """The same as a whole number, or one over it: a dataset that draws the size of an item as it is read
        gives every rank the same."""
        return float(round(self.ratio)) if self.ratio >= 1 else 1 / round(1 / self.ratio)


def first_item(dataset: Dataset, module: Module, precision: Precision | None = None) -> FirstItem:
    """The first item that a module runs on.

    Args:
        dataset: says how many items each sample has.
        module: of items.
        precision: that it computes in; None: that which its parameters have.

    Raises:
        ValueError: the item cannot be read.
    """
    counts, known = item_counts(dataset, module.items), item_rows(dataset, module.items)
    first = next((index for index, count in enumerate(counts) if count), None)
    if first is None:
        return FirstItem()
    listed = int(known[first][0]) if known is not None and len(known[first]) else 0
    rows, output = _made(dataset, first, module, counts, precision)
    return FirstItem(rows, listed, sum(part.nbytes for part in tensors(output)) if output is not None else 0)


def first_output(dataset: Dataset, module: Module) -> Bundle | None:
    """The output of the module's head for that item, by shapes alone, on the meta device; None: it is not
    known, or there is no item. Arguments and errors of `first_item`."""
    counts = item_counts(dataset, module.items)
    first = next((index for index, count in enumerate(counts) if count), None)
    return None if first is None else _made(dataset, first, module, counts, None)[1]


def _made(
    dataset: Dataset, index: int, module: Module, counts: Sequence[int], precision: Precision | None
) -> tuple[int, Bundle | None]:
    """The rows that `embed` gives of the first item of a sample: by shapes alone, or else by a pass on the host
    with parameters of zeros; and what the head gives, by shapes. 0 and None where that fails."""
    with begun_at(0):
        part = getattr(dataset, "part", None)
        try:
            sample = dataset[index] if part is None else part(index, (module.items,))
        except Exception as error:
            raise ValueError(f"sample {index} of the dataset cannot be read: {described(error)}") from error
        try:
            batch = pad([items_of(sample, index, module.items, counts)[0]])
        except SampleError as error:
            raise ValueError(str(error)) from None
        except Unlike as error:
            raise ValueError(
                f"sample {index} of the dataset: {module.items}[0] must be a tensor, or a mapping of tensors, "
                f"of equal shape in every one: {error}"
            ) from None
        batch = precision.entering(batch) if precision is not None else batch
        stage = Stage(start=0, stop=module.layers, devices=("alone/0",), shares=(1,))
        for accelerator in (Accelerator("meta"), CPU):
            try:
                local = local_model(module, stage, 0, accelerator, only=("embed",))
                for each in (*local.buffers.values(), *(held.tensor for held in local.parameters.values())):
                    each.detach().zero_()
                given = converted(batch, lambda x, to=accelerator.device: x.to(to))  # type: ignore[misc]
                with torch.no_grad():
                    x = local.passes["embed"](given)
                sequences, length = sizes(x, of_item=True)
                return sequences * length, _output(module, x)
            except Exception:
                log.debug("the rows of an item could not be found on %s", accelerator, exc_info=True)
    return 0, None


def _output(module: Module, x: Bundle) -> Bundle | None:
    """The output of a module for an item, by shapes alone; None: not known."""
    x = converted(x, lambda part: part.to("meta"))
    try:
        with torch.no_grad():
            for name, section in module.sections.items():
                x = x if name == "embed" else section(x)
        return x
    except Exception:
        log.debug("an output could not be found by shapes", exc_info=True)
        return None
