"""What a model folder says about its model: `config.json` and `generation_config.json`.

Accepts what the decoder computes exactly and refuses the rest by name. Knows no tensors.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shared.contracts.errors import SettingsError
from shared.kv.layout import ITEM_BYTES, LayerGroup

ARCHITECTURE = "LlamaForCausalLM"
_DEFAULT_ROPE = ("default", None)


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A Llama model's sizes. Head counts are the model's; a worker's own share comes from `TensorParallel`."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int
    rms_norm_eps: float
    rope_theta: float
    tied_embeddings: bool
    dtype: str  # of the checkpoint, such as "bfloat16"
    eos_token_ids: tuple[int, ...]

    @property
    def scale(self) -> float:
        """Factor of attention scores."""
        return float(self.head_dim**-0.5)


def load_config(folder: Path) -> ModelConfig:
    """Read a model folder's configuration.

    Raises:
        SettingsError: a file is missing or malformed, or asks for what this build does not do; names file and field.
    """
    path = folder / "config.json"
    raw = _read_json(path)
    generation_path = folder / "generation_config.json"
    generation = _read_json(generation_path) if generation_path.exists() else {}
    eos = generation.get("eos_token_id")
    return parse_config(raw, path, eos if eos is not None else raw.get("eos_token_id"))


def parse_config(raw: dict[str, Any], path: Path, eos: object = None) -> ModelConfig:
    """`load_config` on a parsed `config.json`; `path` is only named in errors.

    Args:
        eos: one token id, a list of them, or None.
    """
    fields = _Fields(raw, path)
    _refuse_unsupported(fields)
    hidden, num_q_heads = fields.positive("hidden_size"), fields.positive("num_attention_heads")
    num_kv_heads = fields.positive("num_key_value_heads", num_q_heads)
    head_dim = fields.positive("head_dim", hidden // num_q_heads)
    if "head_dim" not in raw and hidden % num_q_heads:
        raise fields.error("hidden_size", f"{hidden} is not a multiple of {num_q_heads} attention heads")
    if head_dim % 2:
        raise fields.error("head_dim", f"{head_dim} is odd")
    if num_q_heads % num_kv_heads:
        raise fields.error("num_key_value_heads", f"{num_kv_heads} does not divide {num_q_heads} attention heads")
    vocab_size = fields.positive("vocab_size")
    return ModelConfig(
        vocab_size=vocab_size,
        hidden_size=hidden,
        intermediate_size=fields.positive("intermediate_size"),
        num_layers=fields.positive("num_hidden_layers"),
        num_q_heads=num_q_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_positions=fields.positive("max_position_embeddings"),
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        rope_theta=_rope_theta(fields),
        tied_embeddings=bool(raw.get("tie_word_embeddings", False)),
        dtype=str(raw.get("dtype") or raw.get("torch_dtype") or "float32").removeprefix("torch."),
        eos_token_ids=_eos_token_ids(eos, vocab_size, fields),
    )


def layer_groups(config: ModelConfig, block_size: int, kv_dtype: str, tp_size: int = 1) -> tuple[LayerGroup, ...]:
    """The layer groups of this model's KV: one group of full attention.

    Args:
        block_size: token slots in a block, a power of two from 1.
        kv_dtype: a key of `ITEM_BYTES`.
    """
    if kv_dtype not in ITEM_BYTES:
        raise SettingsError(f"KV dtype {kv_dtype!r} is none of {', '.join(ITEM_BYTES)}", param="kv_dtype")
    if block_size < 1 or block_size & (block_size - 1):
        raise SettingsError(f"block size {block_size} is not a power of two", param="block_size")
    return (
        LayerGroup(
            name="full",
            layers=tuple(range(config.num_layers)),
            num_kv_heads=config.num_kv_heads // tp_size,
            head_dim=config.head_dim,
            block_size=block_size,
            dtype=kv_dtype,
        ),
    )


class _Fields:
    """Typed access to `config.json` with errors that name file and field."""

    def __init__(self, raw: dict[str, Any], path: Path) -> None:
        self.raw = raw
        self.path = path

    def error(self, field: str, what: str) -> SettingsError:
        return SettingsError(f"{self.path}: {field}: {what}", param=field)

    def positive(self, field: str, default: int | None = None) -> int:
        value = self.raw.get(field)
        if value is None:
            if default is None:
                raise self.error(field, "is missing")
            return default
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self.error(field, f"{value!r} is not a positive whole number")
        return value

    def number(self, field: str, default: float) -> float:
        value = self.raw.get(field, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or value <= 0:
            raise self.error(field, f"{value!r} is not a positive number")
        return float(value)


def _refuse_unsupported(fields: _Fields) -> None:
    raw = fields.raw
    architectures = raw.get("architectures")
    if architectures != [ARCHITECTURE]:
        raise fields.error("architectures", f"{architectures!r} is not supported, only [{ARCHITECTURE!r}]")
    if raw.get("model_type", "llama") != "llama":
        raise fields.error("model_type", f"{raw['model_type']!r} is not supported, only 'llama'")
    if raw.get("hidden_act", "silu") != "silu":
        raise fields.error("hidden_act", f"{raw['hidden_act']!r} is not supported, only 'silu'")
    for field in ("attention_bias", "mlp_bias"):
        if raw.get(field):
            raise fields.error(field, "biases are not supported")
    if raw.get("quantization_config") is not None:
        raise fields.error("quantization_config", "quantized checkpoints are not supported")
    if raw.get("sliding_window"):
        raise fields.error("sliding_window", "is not supported")


def _rope_theta(fields: _Fields) -> float:
    """The rotary base: `rope_parameters` (transformers 5) first, then `rope_theta`. Scaled variants are refused."""
    for field in ("rope_parameters", "rope_scaling"):
        value = fields.raw.get(field)
        if value is None:
            continue
        if not isinstance(value, dict):
            raise fields.error(field, f"{value!r} is not an object")
        kind = value.get("rope_type", value.get("type"))
        if kind not in _DEFAULT_ROPE:
            raise fields.error(field, f"rope type {kind!r} is not supported, only 'default'")
        if value.get("partial_rotary_factor", 1.0) != 1.0:
            raise fields.error(field, "partial_rotary_factor is not supported")
        if "rope_theta" in value:
            return _Fields(value, fields.path).number("rope_theta", 10_000.0)
    return fields.number("rope_theta", 10_000.0)


def _eos_token_ids(eos: object, vocab_size: int, fields: _Fields) -> tuple[int, ...]:
    ids = [] if eos is None else eos if isinstance(eos, list) else [eos]
    for token_id in ids:
        if not isinstance(token_id, int) or isinstance(token_id, bool) or not 0 <= token_id < vocab_size:
            raise fields.error("eos_token_id", f"{token_id!r} is not a token id below {vocab_size}")
    return tuple(dict.fromkeys(ids))


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as exc:
        raise SettingsError(f"cannot read {path}: {exc.strerror}", param=path.name) from exc
    except ValueError as exc:
        raise SettingsError(f"{path} is not JSON: {exc}", param=path.name) from exc
    if not isinstance(value, dict):
        raise SettingsError(f"{path} does not hold an object", param=path.name)
    return value
