"""Configurations of transformers made small, and with their numbers changed.

A small copy keeps what the model computes: every kind of layer, every flag, every scale and cap. Widths, heads,
layers, experts and vocabulary are few, and windows are shorter than the few tokens that the copy is tried on.
"""

from __future__ import annotations

import copy
import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

#: Layers that a small copy has at most for what depends on their index.
MOST_LAYERS = 12
#: Sizes of a small copy.
HEAD, HEADS, FEED_FORWARD, VOCABULARY, WINDOW, POSITIONS = 16, 4, 48, 96, 3, 512

_LAYERS = re.compile(r"(num_hidden_layers|n_layers?|num_layers|layers|(de|en)coder_layers|num_hidden_groups)")
_HEADS = re.compile(r"(num_attention_heads|n_heads?|num_heads|attention_heads|(de|en)coder_attention_heads)")
_KV = re.compile(r"(num_key_value_heads|num_kv_heads|n_head_kv|n_kv_heads)")
_WIDTH = re.compile(r"(hidden_size|n_embd|d_model|dim)")
_OTHER_WIDTH = re.compile(r"(word_embed_proj_dim|(input_|output_)?embedding_size|embedding_dim|embed_dim)")
_POSITIONS = re.compile(r"(max_position_embeddings|n_positions|n_ctx|max_seq_len|max_sequence_length)")
#: The largest sizes of a small copy, by the names that they have.
_MOST = {
    _HEADS: HEADS,
    _WIDTH: HEADS * HEAD,
    re.compile(
        r"(global_)?(head_dim|attention_head_dim|kv_channels|head_size|v_head_dim|qk_nope_head_dim)"
    ): HEAD,
    re.compile(
        r"(\w*intermediate_size|(de|en)coder_ffn_dim|ffn_dim|n_inner|ffn_hidden_size|expert_ffn_hidden_size"
        r"|mlp_dim|intermediate_dim)(_mlp)?"
    ): FEED_FORWARD,
    re.compile(r"(\w+_)?vocab_size(_\w+)?"): VOCABULARY,
    re.compile(r"(\w*sliding_window|(attention_)?window_size|\w*chunk_size|\w*local_attention)"): WINDOW,
    re.compile(r"(num_experts|num_local_experts|n_routed_experts|moe_num_experts|num_moe_experts)"): 4,
    re.compile(r"(num_experts_per_tok(en)?|top_k_experts|moe_topk|moe_k|moe_top_k|num_experts_per_token)"): 2,
    re.compile(r"\w*(lora_rank|low_rank_dim|d_state|state_size)"): 8,
    re.compile(r"(mamba_(n|num)|n_mamba)_heads"): HEADS,  # of a state-space layer
    re.compile(r"mamba_d_ssm"): 2 * HEADS * HEAD,  # all numbers of its heads
}
#: Which layers are of which kind, by their index.
_PERIODS = re.compile(r".*(period|interval|first_k_dense|sparse_step|pattern|_freq|_every).*")

#: Numbers whose change is no other function of the tokens: randomness, first values, marks.
_IDLE = re.compile(r".*(drop|jitter|initializer|init_|_std|token|aux|router_z|partial|time_step|_id\b|noise).*")
#: Whole numbers that are no sizes.
_SCALARS = re.compile(r".*(window|scal|multiplier|cap|clip|limit|theta|beta|alpha).*")
#: Bounds of values: changed to so little that they act.
_CAPS = re.compile(r".*(cap|clip|limit).*")
#: Fields that a copy is not made with.
_LEFT = {
    *("transformers_version", "architectures", "id2label", "label2id", "problem_type", "dtype", "torch_dtype"),
    *("ignore_keys_at_rope_validation", "distributed_config"),
}


def values_of(config: Any) -> dict[str, Any]:
    """The values that a configuration was made with, or has been given since."""
    fields = {field.name for field in dataclasses.fields(config)} if dataclasses.is_dataclass(config) else set()
    named = {name: value for name, value in vars(config).items() if name in fields or not name.startswith("_")}
    return {name: value for name, value in named.items() if name not in _LEFT}


def remade(config: Any, changes: Mapping[str, Any]) -> Any:
    """The configuration with some values changed; what it works out of them is worked out anew."""
    fresh = type(config)(**copy.deepcopy(values_of(config)) | dict(changes))
    attention = getattr(config, "_attn_implementation", None)
    for name in vars(config).keys() - vars(fresh).keys() - _LEFT:  # what another configuration has given it
        if not name.startswith("_"):
            setattr(fresh, name, copy.deepcopy(getattr(config, name)))
    fresh._attn_implementation = attention if attention in ("eager", "sdpa") else None
    if hasattr(fresh, "_experts_implementation"):
        fresh._experts_implementation = "eager"  # the others' kernels have no double precision
    return fresh


def small(config: Any, layers: int = 2) -> Any:
    """A small copy of the configuration, without dropout, with the first `layers` layers at least."""
    values = values_of(config)
    kept = _kept_layers(values, layers)
    changes: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, bool) or value is None:
            continue
        if isinstance(value, int):
            changes[name] = _small_number(name, value, values, len(kept))
        elif isinstance(value, float) and is_dropout(name):
            changes[name] = 0.0
        elif _is_config(value):
            changes[name] = small(value, layers)
        elif isinstance(value, list | tuple) and kept and len(value) == _first(values, _LAYERS):
            sizes = (_small_number(name, v, values, len(kept)) if type(v) is int else v for v in value)
            changes[name] = type(value)(size for i, size in enumerate(sizes) if i in kept)
    _agree(changes, values, kept)
    return remade(config, {name: value for name, value in changes.items() if value is not values[name]})


def _is_config(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and hasattr(value, "model_type")


def is_dropout(name: str) -> bool:
    """Returns True if a field is the probability of a random draw in training."""
    return re.fullmatch(r".*(drop|jitter).*", name) is not None and not name.startswith(("use_", "no_"))


def dropouts(config: Any, path: str = "") -> dict[str, float]:
    """The dropouts that a configuration has, by name: "attn_pdrop", "attn_config/attn_pdrop"."""
    rates: dict[str, float] = {}
    for name, value in values_of(config).items():
        if _is_config(value):
            rates |= dropouts(value, f"{path}{name}/")
        elif is_dropout(name) and isinstance(value, int | float) and not isinstance(value, bool) and value:
            rates[f"{path}{name}"] = value
    return rates


def numbers(config: Any) -> dict[str, Any]:
    """The numbers that are part of the function, by name ("rope_parameters/rope_theta"), each with another
    value."""
    return dict(_numbers(values_of(config), ""))


def with_numbers(config: Any, changed: Mapping[str, Any]) -> Any:
    """The configuration with these numbers, by name ("rope_parameters/rope_theta")."""
    nested: dict[str, Any] = {}
    for name, value in changed.items():
        *outer, last = name.split("/")
        into = nested
        for key in outer:
            into = into.setdefault(key, {})
        into[last] = value
    return _with(config, nested)


def _with(value: Any, changes: Any) -> Any:
    """A number, a dictionary with some others, or a configuration with some others."""
    if not isinstance(changes, dict):
        return changes
    if isinstance(value, dict):
        return value | {key: _with(value[key], change) for key, change in changes.items()}
    values = values_of(value)
    return remade(value, {key: _with(values[key], change) for key, change in changes.items()})


def _numbers(values: Mapping[Any, Any], path: str) -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        full = f"{path}{name}"
        if isinstance(value, dict) and "rope" in full:
            yield from _numbers(value, f"{full}/")
        elif _is_config(value):
            yield from _numbers(values_of(value), f"{full}/")
        elif _IDLE.fullmatch(str(name)) or isinstance(value, bool) or not value:
            continue
        elif isinstance(value, float) or (
            isinstance(value, int) and _SCALARS.fullmatch(str(name)) and not _POSITIONS.fullmatch(str(name))
        ):
            yield full, _another(str(name), value)


def _another(name: str, value: float) -> float:
    if _CAPS.fullmatch(name):
        return type(value)(max(1, value // 8) if isinstance(value, int) else min(value / 8, 2.0))
    return value + 1 if isinstance(value, int) else value * 1.25


def _kept_layers(values: Mapping[str, Any], least: int) -> list[int]:
    """Which layers a small copy has: the first ones, as far as their kinds depend on their index, and the first
    of each kind that a list with an entry for each layer knows; the last of each where layers share keys."""
    layers = _first(values, _LAYERS)
    periods = [v for n, v in values.items() if _PERIODS.fullmatch(n) and type(v) is int]
    least = min(layers, max([least, *(period + 1 for period in periods)]), MOST_LAYERS)
    lists = [v for v in values.values() if isinstance(v, list | tuple) and layers and len(v) == layers]
    kinds: dict[str, int] = {}
    for index in range(layers):
        kinds.setdefault(repr([entries[index] for entries in lists]), index)
    kept = {*range(least), *sorted(kinds.values())[:6]}
    if values.get("num_kv_shared_layers"):
        kept |= {max(i for i in range(layers) if kind == repr([e[i] for e in lists])) for kind in kinds}
    return sorted(kept)


def _small_number(name: str, value: int, values: Mapping[str, Any], layers: int) -> int:
    turned = name == "head_dim" and value == values.get("qk_rope_head_dim")
    if turned or name in ("qk_rope_head_dim", "rotary_dim"):
        return min(value, HEAD // 2)
    if _LAYERS.fullmatch(name):
        return min(value, layers)
    for pattern, most in _MOST.items():
        if pattern.fullmatch(name):
            return min(value, most)
    if _OTHER_WIDTH.fullmatch(name):  # a projection is between it and the width, where it is another
        width = _first(values, _WIDTH)
        return min(value, HEADS * HEAD // (1 if value == (width or value) else 2))
    if _KV.fullmatch(name):
        heads = _first(values, _HEADS)
        return min(heads, HEADS) if value == heads else 1 if value == 1 else min(value, HEADS // 2)
    if _POSITIONS.fullmatch(name) and not _scaled(values):
        return min(value, POSITIONS)
    if name in ("n_group", "topk_group", "n_groups", "mamba_n_groups"):
        return 1
    if name.endswith(("_token_id", "_token_index", "_token_idx")):
        return value if value < VOCABULARY else value % VOCABULARY
    if is_dropout(name):
        return 0
    return value


def _first(values: Mapping[str, Any], pattern: re.Pattern[str]) -> int:
    """The first whole number above 0 under such a name; 0: there is none."""
    return next((v for name, v in values.items() if pattern.fullmatch(name) and isinstance(v, int) and v), 0)


def _scaled(values: Mapping[str, Any]) -> bool:
    """Returns True if rotary frequencies depend on how many positions there are."""
    return "original_max_position_embeddings" in repr(values.get("rope_parameters"))


def _agree(changes: dict[str, Any], values: Mapping[str, Any], kept: list[int]) -> None:
    """Sizes that follow from others: the rotary parts of a head, special tokens in lists."""
    shared = values.get("num_kv_shared_layers")
    if shared:
        changes["num_kv_shared_layers"] = sum(i >= _first(values, _LAYERS) - shared for i in kept)
    if "state_size" in values and isinstance(values.get("expand"), int) and "num_heads" in values:
        changes["num_heads"] = values["expand"] * HEADS
    for name in ("mamba_d_head", "mamba_head_dim", "mamba_headdim"):
        if isinstance(values.get(name), int):
            changes[name] = int(values.get("mamba_expand") or 2) * HEAD
    for name, value in values.items():
        if name.endswith("_token_id") and isinstance(value, list):
            changes[name] = [v % VOCABULARY for v in value]
        if name == "rope_parameters" and isinstance(value, dict):
            changes[name] = _small_rope(value, _head({**values, **changes}))
    if "qk_head_dim" in values and "qk_nope_head_dim" in changes:
        changes["qk_head_dim"] = changes["qk_nope_head_dim"] + changes.get("qk_rope_head_dim", 0)


def _head(values: Mapping[str, Any]) -> int:
    """The width of a head."""
    given = values.get("head_dim")
    width, heads = _first(values, _WIDTH), _first(values, _HEADS)
    return given if isinstance(given, int) else width // heads if heads else HEAD


def _small_rope(rope: Mapping[str, Any], head: int) -> dict[str, Any]:
    small_rope: dict[str, Any] = {}
    half = int(head * float(rope.get("partial_rotary_factor") or 1.0)) // 2
    for name, value in rope.items():
        if isinstance(value, dict):
            small_rope[name] = _small_rope(value, head)
        elif isinstance(value, list) and name.endswith("_factor"):
            small_rope[name] = value[:half] + value[-1:] * (half - len(value))
        elif isinstance(value, list) and name.endswith("section") and value:
            small_rope[name] = _shared_out(value, half)
        else:
            small_rope[name] = value
    return small_rope


def _shared_out(sections: Iterable[int], total: int) -> list[int]:
    """Sections that sum up to `total`, as near to the old ones' ratios as whole numbers are."""
    old = list(sections)
    sizes = [max(1, size * total // sum(old)) for size in old]
    sizes[0] += total - sum(sizes)
    return sizes
