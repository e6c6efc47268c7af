"""What sets a model family apart from Llama's, read from `config.json`. Without torch.

Llama (and what shares its class), Qwen 3 (norms of query and key heads), Gemma 2 (sliding windows, soft caps, norms on
both sides of a block, weights of norms kept minus one), Mixtral (experts).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from shared.model.fields import Fields

_GELU = ("gelu_pytorch_tanh",)
_SILU = ("silu",)
_FULL, _SLIDING = "full_attention", "sliding_attention"


@dataclass(frozen=True, slots=True)
class Family:
    """Defaults are Llama's.

    Attributes:
        qk_norm: query and key heads are normalized before they are rotated.
        norm_offset: norms multiply by 1 + weight.
        post_norms: what attention and feed-forward give is normalized too, before it is added.
        gelu: the gate's activation is GELU by tanh, not SiLU.
        scaled_embedding: embeddings are multiplied by sqrt(hidden_size).
        query_scalar: attention scores are divided by its square root; 0 = by that of the head's size.
        score_cap, logit_cap: c in c * tanh(x / c) of attention scores and of logits; 0 = none.
        windows: per layer the tokens it sees, itself included; 0 = all. () = all layers see all.
        num_experts: of each feed-forward block; 0 = it is a single one.
        experts_per_token: of them a token passes.
    """

    architecture: str = "LlamaForCausalLM"
    qk_norm: bool = False
    norm_offset: bool = False
    post_norms: bool = False
    gelu: bool = False
    scaled_embedding: bool = False
    query_scalar: float = 0.0
    score_cap: float = 0.0
    logit_cap: float = 0.0
    windows: tuple[int, ...] = ()
    num_experts: int = 0
    experts_per_token: int = 0

    def window(self, layer: int) -> int:
        """Tokens that layer sees, itself included; 0 = all."""
        return self.windows[layer] if self.windows else 0


LLAMA = Family()


def parse_family(fields: Fields) -> Family:
    """The family of a parsed `config.json`.

    Raises:
        SettingsError: an architecture or a field of it that is not computed here.
    """
    given = fields.raw.get("architectures")
    known = given[0] if isinstance(given, list) and len(given) == 1 else None
    if known not in _FAMILIES:
        raise fields.error("architectures", f"{given!r} is not supported, only one of {', '.join(_FAMILIES)}")
    model_type, parse = _FAMILIES[known]
    if fields.raw.get("model_type", model_type) != model_type:
        raise fields.error("model_type", f"{fields.raw['model_type']!r} is not supported, only {model_type!r}")
    return parse(fields)


def _llama(fields: Fields) -> Family:
    _require_activation(fields, "hidden_act", _SILU)
    _require_no_window(fields)
    return LLAMA


def _qwen3(fields: Fields) -> Family:
    _require_activation(fields, "hidden_act", _SILU)
    if fields.flag("use_sliding_window"):
        raise fields.error("use_sliding_window", "is not supported")
    return Family("Qwen3ForCausalLM", qk_norm=True)


def _gemma2(fields: Fields) -> Family:
    _require_activation(fields, "hidden_activation", _GELU)
    if fields.flag("use_bidirectional_attention"):
        raise fields.error("use_bidirectional_attention", "is not supported")
    return Family(
        "Gemma2ForCausalLM",
        norm_offset=True,
        post_norms=True,
        gelu=True,
        scaled_embedding=True,
        query_scalar=fields.number("query_pre_attn_scalar", 256.0),
        score_cap=_cap(fields, "attn_logit_softcapping", 50.0),
        logit_cap=_cap(fields, "final_logit_softcapping", 30.0),
        windows=_windows(fields),
    )


def _mixtral(fields: Fields) -> Family:
    _require_activation(fields, "hidden_act", _SILU)
    _require_no_window(fields)
    experts, each = fields.positive("num_local_experts", 8), fields.positive("num_experts_per_tok", 2)
    if each > experts:
        raise fields.error("num_experts_per_tok", f"{each} is more than the {experts} experts there are")
    return Family("MixtralForCausalLM", num_experts=experts, experts_per_token=each)


_FAMILIES: dict[str, tuple[str, Callable[[Fields], Family]]] = {
    "LlamaForCausalLM": ("llama", _llama),
    "Qwen3ForCausalLM": ("qwen3", _qwen3),
    "Gemma2ForCausalLM": ("gemma2", _gemma2),
    "MixtralForCausalLM": ("mixtral", _mixtral),
}
TIED_BY_DEFAULT = frozenset({"Gemma2ForCausalLM"})
"""Families whose configuration leaves `tie_word_embeddings` out when it is true."""


def _cap(fields: Fields, name: str, default: float) -> float:
    """A soft cap: null is none, missing is the family's default."""
    return 0.0 if name in fields.raw and fields.raw[name] is None else fields.number(name, default)


def _windows(fields: Fields) -> tuple[int, ...]:
    """Gemma 2's: every second layer, from the first on, unless `layer_types` says otherwise."""
    window, count = fields.positive("sliding_window", 4096), fields.positive("num_hidden_layers")
    kinds = fields.raw.get("layer_types") or [_FULL if i % 2 else _SLIDING for i in range(count)]
    if not isinstance(kinds, list) or len(kinds) != count or not set(kinds) <= {_FULL, _SLIDING}:
        raise fields.error("layer_types", f"does not name {_FULL!r} or {_SLIDING!r} for each of {count} layers")
    return tuple(window if kind == _SLIDING else 0 for kind in kinds)


def _require_activation(fields: Fields, name: str, known: tuple[str, ...]) -> None:
    if (given := fields.raw.get(name, known[0])) not in known:
        raise fields.error(name, f"{given!r} is not supported, only {known[0]!r}")


def _require_no_window(fields: Fields) -> None:
    if fields.raw.get("sliding_window"):
        raise fields.error("sliding_window", "is not supported")
