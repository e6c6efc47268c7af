"""The Llama decoder whose steps are one call of the native library each.

The same model as `shared.model.decoder.Decoder`, with one difference in arithmetic: the residual stream is float32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.dispatch import KernelChoice
from kernels.native.arena import Arena
from kernels.native.library import NativeLibrary, Team
from kernels.native.model import GroupPlan, NativeLayer, NativeModel, Shape, require_runnable
from kernels.native.packed import PackedLinear, pack_linear, packed_bytes
from shared.engine.forward_batch import ForwardBatch
from shared.kv.layout import LayerGroup
from shared.model.checkpoint import EMBEDDING, HEAD
from shared.model.config import ModelConfig
from shared.model.quantization import TensorParallel
from shared.model.rope_table import rope_table
from shared.model.weights import Weights


class NativeDecoder:
    """A loaded model: packed weights are its only copy, and the embedding stays mapped in the checkpoint.

    Args:
        threads: that compute together.

    Raises:
        NativeUnavailable: the library cannot run such a model, or the system gives no more threads.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        dtype: torch.dtype,
        kernels: KernelChoice,
        library: NativeLibrary,
        threads: int,
        tp: TensorParallel,
        with_head: bool = True,
    ) -> None:
        self.config = config
        self.dtype = dtype
        self.kernels = kernels
        require_runnable(dtype, config.head_dim)
        self._team = Team(library, threads)
        self._shape = Shape(
            hidden=config.hidden_size,
            intermediate=config.intermediate_size,
            vocab=config.vocab_size,
            q_heads=tp.local(config.num_q_heads),
            kv_heads=tp.local(config.num_kv_heads),
            head_dim=config.head_dim,
            eps=config.rms_norm_eps,
            scale=config.scale,
        )
        self._arena = Arena(_arena_bytes(self._shape, config.num_layers, dtype, with_head))
        self._weights = weights
        embedding = weights.mapped(EMBEDDING)
        self._embedding = embedding.float() if embedding.dtype == torch.float64 else embedding
        self._rotary = rope_table(config.rope, config.head_dim, config.max_positions, dtype)
        self._final_norm = self._norm("model.norm")
        self._layers = [self._layer(i) for i in range(config.num_layers)]
        head = EMBEDDING if config.tied_embeddings else HEAD
        self._head = self._pack([head], [], bias=False) if with_head else None
        del self._weights
        self._groups: tuple[LayerGroup, ...] = ()
        self._model: NativeModel | None = None

    def forward(self, batch: ForwardBatch, groups: tuple[LayerGroup, ...], pools: tuple[Tensor, ...]) -> Tensor:
        """As `Decoder.forward`: KV of every token into the pools, and the wanted logits, float32.

        Raises:
            ValueError: the batch points outside pool, vocabulary or context, or asks a model without a head for logits.
        """
        plans = [GroupPlan(part.block_tables, part.slot_mapping) for part in batch.groups]
        return self.native(groups).step(
            batch.token_ids, batch.positions, batch.cu_seqlens_q, batch.seq_lens, batch.logit_rows, plans, pools
        )

    def native(self, groups: tuple[LayerGroup, ...]) -> NativeModel:
        """The library's model, with its layers' places in the pools of these groups."""
        if self._model is None or groups != self._groups:
            self._model, self._groups = self._in_groups(groups), groups
        return self._model

    @property
    def weight_bytes(self) -> int:
        """Bytes of packed weights: what a step reads."""
        return self._arena.used

    def _in_groups(self, groups: tuple[LayerGroup, ...]) -> NativeModel:
        place = {layer: (g, i) for g, group in enumerate(groups) for i, layer in enumerate(group.layers)}
        layers = [NativeLayer(*parts, *place[i]) for i, parts in enumerate(self._layers)]
        return NativeModel(
            self._team,
            self.dtype,
            self._shape,
            self._embedding,
            self._rotary,
            layers,
            self._final_norm,
            self._head,
        )

    def _layer(self, index: int) -> tuple[Tensor, Tensor, PackedLinear, PackedLinear, PackedLinear, PackedLinear]:
        prefix, config = f"model.layers.{index}", self.config
        qkv = [f"{prefix}.self_attn.{name}_proj" for name in "qkv"]
        return (
            self._norm(f"{prefix}.input_layernorm"),
            self._norm(f"{prefix}.post_attention_layernorm"),
            self._fused(qkv, config.attention_bias),
            self._fused([f"{prefix}.self_attn.o_proj"], config.attention_bias),
            self._fused([f"{prefix}.mlp.gate_proj", f"{prefix}.mlp.up_proj"], config.mlp_bias, gated=True),
            self._fused([f"{prefix}.mlp.down_proj"], config.mlp_bias),
        )

    def _fused(self, names: list[str], bias: bool, gated: bool = False) -> PackedLinear:
        return self._pack([f"{name}.weight" for name in names], [f"{name}.bias" for name in names], bias, gated)

    def _pack(self, names: list[str], bias_names: list[str], bias: bool, gated: bool = False) -> PackedLinear:
        parts = [self._weights[name] for name in names]
        biases = [self._weights[name] for name in bias_names] if bias else []
        return pack_linear(self._team, self._arena, parts, biases, self.dtype, gated)

    def _norm(self, name: str) -> Tensor:
        """A copy: the tensor as read is part of the whole file's mapping, which would stay in memory with it."""
        return self._weights[f"{name}.weight"].to(torch.float32, copy=True)


def _arena_bytes(shape: Shape, num_layers: int, dtype: torch.dtype, with_head: bool) -> int:
    q, kv = shape.q_heads * shape.head_dim, shape.kv_heads * shape.head_dim
    layer = (
        packed_bytes(q + 2 * kv, shape.hidden, dtype)
        + packed_bytes(shape.hidden, q, dtype)
        + packed_bytes(2 * shape.intermediate, shape.hidden, dtype, gated=True)
        + packed_bytes(shape.hidden, shape.intermediate, dtype)
    )
    return num_layers * layer + (packed_bytes(shape.vocab, shape.hidden, dtype) if with_head else 0)
