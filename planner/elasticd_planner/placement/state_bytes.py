"""The bytes of a model's state, section by section, by which the traffic between plans is counted."""

from __future__ import annotations

from elasticd_planner.cost.model_profile import ModelProfile, SectionProfile
from elasticd_planner.value import Value

#: Parts that shares are counted in where a problem has no units: every group of up to ten divides it.
PARTS = 2520 * 64


class SectionBytes(Value, frozen=True, kw_only=True):
    """Bytes of the parameters of a whole layer, embedding or head: cut with the shares, cut by kv-heads, held
    by every member of a group."""

    cut: int = 0
    grouped: int = 0
    whole: int = 0


class StateBytes(Value, frozen=True, kw_only=True):
    """The sections' bytes of parameters, and `optimizer` bytes of state for each of them; `tied` bytes of the
    head are the embedding's. Shares are in `units`. `holds` says what the bytes are, for people."""

    units: int = PARTS
    layer: SectionBytes
    embedding: SectionBytes = SectionBytes()
    head: SectionBytes = SectionBytes()
    tied: int = 0
    optimizer: float = 0.0
    holds: str = "parameters and optimizer state"

    def profile(self, layers: int) -> ModelProfile:
        """A profile of bytes alone."""
        return ModelProfile(
            name="bytes",
            layers=layers,
            share_units=self.units,
            tokens=1.0,
            block=_section(self.layer, seconds=1.0),
            embed=_section(self.embedding),
            head=_section(self.head),
            tied_bytes=self.tied,
            optimizer_factor=self.optimizer,
        )


def _section(held: SectionBytes, seconds: float = 0.0) -> SectionProfile:
    return SectionProfile(
        seconds=seconds, cut_bytes=held.cut, grouped_bytes=held.grouped, whole_bytes=held.whole
    )


def weights_of(profile: ModelProfile) -> StateBytes:
    """The bytes of the state by a profile."""

    def section(of: SectionProfile) -> SectionBytes:
        return SectionBytes(cut=of.cut_bytes, grouped=of.grouped_bytes, whole=of.whole_bytes)

    return StateBytes(
        units=profile.share_units,
        layer=section(profile.block),
        embedding=section(profile.embed),
        head=section(profile.head),
        tied=profile.tied_bytes,
        optimizer=profile.optimizer_factor,
    )
