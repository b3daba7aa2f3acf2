"""The profile that a job is given in a file: what `elasticd profile` wrote, checked to be of its model."""

from __future__ import annotations

import msgspec

from elasticd_planner.cost.model_profile import WORKING, ModelProfile, SectionProfile, derive
from elasticd_planner.problem_files.times import TimedModel, profile_of
from elasticd_planner.spec.model import ModelSpec
from elasticd_planner.value import FILE_VERSION, Invalid, Value, check_file_version, refuse

#: Bytes of parameters, which shapes alone decide.
_PARAMETERS = ("cut_bytes", "grouped_bytes", "whole_bytes")


class _Module(Value, frozen=True, kw_only=True):
    """A module of items, whatever else there is of it."""

    name: str
    model: TimedModel
    rows_an_item: float = 0.0


class _File(Value, frozen=True, kw_only=True):
    """A profile, or a whole problem: whatever else there is of it."""

    model: TimedModel
    modules: tuple[_Module, ...] = ()
    version: int = FILE_VERSION

    def __post_init__(self) -> None:
        check_file_version(self.version)


#: Made with the module: two threads that first decode a class at one moment end the process (msgspec 0.22).
_decoder = msgspec.json.Decoder(_File)


def given_rows(text: bytes, module: str) -> float:
    """The mean rows of an item of a module in such a file; 0: it does not say."""
    return next((each.rows_an_item for each in _file(text).modules if each.name == module), 0.0)


def given_profile(
    text: bytes, spec: ModelSpec, sample_tokens: float, micro_batch: int, module: str = ""
) -> ModelProfile:
    """The file's seconds and kept bytes for this model, whose micro-batches have `micro_batch` samples of
    `sample_tokens`. It counts as not fitted: what workers measure later is believed more.

    Args:
        text: of the file.
        spec: the model, or the module of items.
        sample_tokens: of a sample in the mean, or the rows of an item.
        micro_batch: samples of a micro-batch; of a module of items 1.
        module: the name of a module of items; empty: the module with the loss, or the model where it has one.

    Raises:
        Invalid: the file is no profile, or is one of another model.
    """
    file = _file(text)
    of_items = {each.name: each.model for each in file.modules}
    model = of_items.get(module) if module else file.model
    if model is None:
        refuse(f"it has no module {module!r}: run `elasticd profile` on the script of this job")
    base = derive(spec, sample_tokens, micro_batch)
    if (model.name, model.layers) != (base.name, base.layers):
        refuse(
            f"it is of {model.name} with {model.layers} layers, and this job trains {base.name} with "
            f"{base.layers}: run `elasticd profile` on this model"
        )
    # The job's own shapes say how it can be cut.
    cut = msgspec.structs.replace(model, units=base.share_units, groups=base.groups, uneven_shares=True)
    found = profile_of(cut, base.tokens)
    sections = {
        name: _section(name, base, found, model.state is not None) for name in ("embed", "block", "head")
    }
    return msgspec.structs.replace(
        found,
        **sections,
        tied_bytes=base.tied_bytes,
        boundary_bytes=base.boundary_bytes,
        query_bytes=base.query_bytes,
        widths=(),  # those between and beyond the measured ones are interpolated
        fitted=False,
    )


def _file(text: bytes) -> _File:
    try:
        return _decoder.decode(text)
    except (msgspec.DecodeError, RecursionError, UnicodeError) as error:
        raise Invalid(f"it is no profile of `elasticd profile`: {error}") from None


def _section(name: str, base: ModelProfile, found: ModelProfile, stated: bool) -> SectionProfile:
    """The file's section, with the model's bytes of parameters and collectives."""
    ours: SectionProfile = getattr(base, name)
    theirs: SectionProfile = getattr(found, name)
    same = {field: getattr(ours, field) for field in (*_PARAMETERS, "collectives")}
    if not stated:
        of_activations = ("cut_activation", "whole_activation", "recomputed_activation")
        for field in (*of_activations, *WORKING):
            same[field] = getattr(ours, field)
    elif any(getattr(theirs, field) != same[field] for field in _PARAMETERS):
        refuse(
            f"its {name} has {theirs.parameter_bytes:,} bytes of parameters, and that of this job's "
            f"{base.name} {ours.parameter_bytes:,}: run `elasticd profile` on this model"
        )
    return msgspec.structs.replace(theirs, **same)
