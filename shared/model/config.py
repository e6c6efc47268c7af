"""What a model folder says about its model: `config.json` and `generation_config.json`.

Accepts what the decoder computes exactly and refuses the rest by name. Knows no tensors.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kernels.tile_layouts import LEAST_BLOCK, ROWS
from shared.contracts.errors import SettingsError
from shared.kv.layout import ITEM_BYTES, LayerGroup
from shared.model.family import LLAMA, TIED_BY_DEFAULT, Family, parse_family
from shared.model.fields import Fields, read_fields
from shared.model.packing import FIELD, Packing, parse_packing
from shared.model.rope import Rope, parse_rope

GENERATION = "generation_config.json"


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A model's sizes. Head counts are the model's; a worker's own share comes from `TensorParallel`.

    Attributes:
        max_positions: most tokens of prompt and output together, with what the rotary scaling adds.
        attention_bias, mlp_bias: whether the linear layers of attention and of the feed-forward block have biases.
        dtype: of the checkpoint, such as "bfloat16".
        family: in what the model differs from Llama.
        packing: how the checkpoint keeps those matrices that are integers; None: it has floats alone.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int
    rms_norm_eps: float
    rope: Rope
    tied_embeddings: bool
    attention_bias: bool
    mlp_bias: bool
    dtype: str
    eos_token_ids: tuple[int, ...]
    family: Family = LLAMA
    packing: Packing | None = None

    @property
    def scale(self) -> float:
        """Factor of attention scores."""
        return float((self.family.query_scalar or self.head_dim) ** -0.5)


def load_config(folder: Path) -> ModelConfig:
    """Read a model folder's configuration.

    Raises:
        SettingsError: a file is missing or malformed, or asks for what this build does not do; names file and field.
    """
    path = folder / "config.json"
    raw = read_fields(path).raw
    generation = folder / GENERATION
    if generation.exists() and (eos := read_fields(generation).raw.get("eos_token_id")) is not None:
        return parse_config(raw, path, eos, generation)
    return parse_config(raw, path, raw.get("eos_token_id"))


def packed_as(folder: Path) -> str:
    """What a checkpoint of integers is computed as, in the words of quality records; "" for one of floats.

    Raises:
        SettingsError: as `load_config`.
    """
    packing = load_config(folder).packing
    return "" if packing is None else packing.name


def require_kept(config: ModelConfig, folder: Path, quant: str) -> None:
    """Raise SettingsError (param `quant`) where a setting would have other integers than those a checkpoint holds."""
    if config.packing is not None and quant != "none":
        told = f"{folder / 'config.json'}: {FIELD}: its weights are {config.packing.name} and stay so"
        raise SettingsError(f"quant {quant!r}: {told}, which is what quant 'none' means", param="quant")


def parse_config(raw: dict[str, Any], path: Path, eos: object = None, eos_path: Path | None = None) -> ModelConfig:
    """`load_config` on a parsed `config.json`; paths are only named in errors.

    Args:
        eos: one token id, a list of them, or None.
        eos_path: the file `eos` stands in, where it is another.
    """
    fields = Fields(raw, path)
    family = parse_family(fields)
    hidden, num_q_heads = fields.positive("hidden_size"), fields.positive("num_attention_heads")
    num_kv_heads = fields.positive("num_key_value_heads", num_q_heads)
    head_dim = fields.positive("head_dim", hidden // num_q_heads)
    if raw.get("head_dim") is None and hidden % num_q_heads:
        raise fields.error("hidden_size", f"{hidden} is not a multiple of {num_q_heads} attention heads")
    if head_dim % 2:
        raise fields.error("head_dim", f"{head_dim} is odd")
    if num_q_heads % num_kv_heads:
        raise fields.error("num_key_value_heads", f"{num_kv_heads} does not divide {num_q_heads} attention heads")
    vocab_size, rope = fields.positive("vocab_size"), parse_rope(fields)
    return ModelConfig(
        vocab_size=vocab_size,
        hidden_size=hidden,
        intermediate_size=fields.positive("intermediate_size"),
        num_layers=fields.positive("num_hidden_layers"),
        num_q_heads=num_q_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_positions=rope.context(fields.positive("max_position_embeddings")),
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        rope=rope,
        tied_embeddings=_tied(fields, family),
        attention_bias=fields.flag("attention_bias"),
        mlp_bias=fields.flag("mlp_bias"),
        dtype=str(raw.get("dtype") or raw.get("torch_dtype") or "float32").removeprefix("torch."),
        eos_token_ids=_eos_token_ids(eos, vocab_size, Fields(raw, eos_path or path)),
        family=family,
        packing=parse_packing(fields),
    )


def layer_groups(
    config: ModelConfig, block_size: int, kv_dtype: str, tp_size: int = 1, tile_layout: str = ROWS
) -> tuple[LayerGroup, ...]:
    """The layer groups of this model's KV: one group of full attention.

    Args:
        block_size: token slots in a block, a power of two from 1.
        kv_dtype: a key of `ITEM_BYTES`.
        tile_layout: of the kernels that compute, `KernelChoice.tile_layout`.
    """
    if kv_dtype not in ITEM_BYTES:
        raise SettingsError(f"KV dtype {kv_dtype!r} is none of {', '.join(ITEM_BYTES)}", param="kv_dtype")
    if block_size < 1 or block_size & (block_size - 1):
        raise SettingsError(f"block size {block_size} is not a power of two", param="block_size")
    if block_size < LEAST_BLOCK[tile_layout]:
        raise SettingsError(
            f"block size {block_size} is below {LEAST_BLOCK[tile_layout]}, the least that these kernels read",
            param="block_size",
        )
    return (
        LayerGroup(
            name="full",
            layers=tuple(range(config.num_layers)),
            num_kv_heads=config.num_kv_heads // tp_size,
            head_dim=config.head_dim,
            block_size=block_size,
            dtype=kv_dtype,
            tile_layout=tile_layout,
        ),
    )


def _tied(fields: Fields, family: Family) -> bool:
    if family.architecture in TIED_BY_DEFAULT and "tie_word_embeddings" not in fields.raw:
        return True
    return fields.flag("tie_word_embeddings")


def _eos_token_ids(eos: object, vocab_size: int, fields: Fields) -> tuple[int, ...]:
    ids = [] if eos is None else eos if isinstance(eos, list) else [eos]
    for token_id in ids:
        if not isinstance(token_id, int) or isinstance(token_id, bool) or not 0 <= token_id < vocab_size:
            raise fields.error("eos_token_id", f"{token_id!r} is not a token id below {vocab_size}")
    return tuple(dict.fromkeys(ids))
