"""Which rotary embedding a `config.json` asks for, in both spellings, read as transformers 5 reads it. Without torch.

`rope_parameters` is what transformers 5 writes, `rope_scaling` with `rope_theta` beside it is older.

The dynamic kind scales with the length of the sequence. Here it is a rule of the position alone: the token at position
p turns by the frequencies of a sequence of p + 1 tokens. transformers computes just that for tokens one at a time. When
it gets a prompt beyond the original context in one call, it turns all of it by the frequencies of that call's
length, so that its results depend on how a prompt was cut; ours do not, and KV can be shared and handed off.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from shared.model.fields import Fields

DEFAULT_THETA = 10_000.0
DEFAULT, LINEAR, DYNAMIC, LLAMA3, YARN = KINDS = ("default", "linear", "dynamic", "llama3", "yarn")

_COMMON = frozenset({"rope_type", "type", "rope_theta", "partial_rotary_factor", "finetuned"})
"""`finetuned` tells how a checkpoint was made and changes nothing."""
_OWN: dict[str, frozenset[str]] = {
    DEFAULT: frozenset(),
    LINEAR: frozenset({"factor"}),
    DYNAMIC: frozenset({"factor"}),
    LLAMA3: frozenset({"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}),
    YARN: frozenset(
        {
            *("factor", "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow"),
            *("mscale", "mscale_all_dim", "truncate"),
        }
    ),
}


@dataclass(frozen=True, slots=True)
class Rope:
    """A rotary embedding, with every default filled in. Fields that a kind does not use keep theirs.

    Attributes:
        kind: one of `KINDS`.
        positions: tokens the model was first trained on, which the scaling stretches.
        attention_factor: multiplies cos and sin (yarn).
    """

    kind: str = DEFAULT
    theta: float = DEFAULT_THETA
    factor: float = 1.0
    positions: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    attention_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True

    def context(self, max_positions: int) -> int:
        """Tokens that can be served, given `max_position_embeddings`.

        Linear, dynamic and yarn stretch the original context by their factor; llama3 checkpoints state the whole.
        """
        if self.kind in (LINEAR, DYNAMIC, YARN):
            return int(self.positions * self.factor)
        return max_positions


def parse_rope(fields: Fields) -> Rope:
    """The rotary embedding of a parsed `config.json`.

    Raises:
        SettingsError: a kind or a field that is not computed here, or two spellings that contradict each other.
    """
    found = {}
    for name in ("rope_scaling", "rope_parameters"):
        value = fields.raw.get(name)
        if value is None or value == {}:
            continue
        if not isinstance(value, dict):
            raise fields.error(name, f"{value!r} is not an object")
        found[name] = _parse(fields, fields.within(name, value))
    if not found:
        return Rope(theta=fields.number("rope_theta", DEFAULT_THETA))
    if len(set(found.values())) > 1:
        raise fields.error("rope_scaling", "contradicts rope_parameters")
    return next(iter(found.values()))


def _parse(top: Fields, given: Fields) -> Rope:
    kind = given.raw.get("rope_type", given.raw.get("type", DEFAULT))
    if kind not in KINDS:
        raise given.error("rope_type", f"{kind!r} is not supported, only {', '.join(KINDS)}")
    if given.raw.get("partial_rotary_factor", top.raw.get("partial_rotary_factor")) not in (None, 1, 1.0):
        raise given.error("partial_rotary_factor", "is not supported")
    if unknown := sorted(given.raw.keys() - _COMMON - _OWN[kind]):
        raise given.error(unknown[0], f"is not known for rope type {kind!r}")
    theta = given.number("rope_theta", top.number("rope_theta", DEFAULT_THETA))
    if theta <= 1:
        raise given.error("rope_theta", f"{theta:g} is not above 1")
    if kind == DEFAULT:
        return Rope(theta=theta)
    max_positions = top.positive("max_position_embeddings")
    if kind in (LINEAR, DYNAMIC):
        return Rope(kind, theta, _factor(given), max_positions)
    # transformers lets the field beside the table win over the one within
    original = top.positive(
        "original_max_position_embeddings", given.positive("original_max_position_embeddings", max_positions)
    )
    if kind == LLAMA3:
        return _llama3(given, theta, original)
    return _yarn(given, theta, original, max_positions)


def _llama3(given: Fields, theta: float, original: int) -> Rope:
    low, high = given.number("low_freq_factor"), given.number("high_freq_factor")
    if high <= low:
        raise given.error("high_freq_factor", f"{high:g} is not above low_freq_factor, {low:g}")
    return Rope(LLAMA3, theta, _factor(given), original, low, high)


def _yarn(given: Fields, theta: float, original: int, max_positions: int) -> Rope:
    if "factor" not in given.raw:
        raise given.error("factor", "is missing")
    factor = max_positions / original if given.raw["factor"] is None else _factor(given)
    truncate = given.raw.get("truncate", True)
    if not isinstance(truncate, bool):
        raise given.error("truncate", f"{truncate!r} is not true or false")
    return Rope(
        YARN,
        theta,
        factor,
        original,
        attention_factor=_attention_factor(given, factor),
        beta_fast=_or_default(given, "beta_fast", 32.0),
        beta_slow=_or_default(given, "beta_slow", 1.0),
        truncate=truncate,
    )


def _factor(given: Fields) -> float:
    factor = given.number("factor")
    if factor < 1:
        raise given.error("factor", f"{factor:g} is below 1")
    return factor


def _attention_factor(given: Fields, factor: float) -> float:
    """As the paper suggests (Peng et al. 2023, arXiv 2309.00071, section 3.4), unless the checkpoint says otherwise."""

    def scale(by: float) -> float:
        return 0.1 * by * math.log(factor) + 1.0 if factor > 1 else 1.0

    if given.raw.get("attention_factor") is not None:
        return given.number("attention_factor")
    mscale, mscale_all_dim = (_or_default(given, name, 0.0) for name in ("mscale", "mscale_all_dim"))
    return scale(mscale) / scale(mscale_all_dim) if mscale and mscale_all_dim else scale(1.0)


def _or_default(given: Fields, name: str, default: float) -> float:
    """A field for which null and 0 mean the default, as in transformers."""
    value: Any = given.raw.get(name)
    return default if not value else given.number(name)
