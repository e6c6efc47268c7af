"""The Llama decoder whose steps are one call of the native library each.

The same model as `shared.model.decoder.Decoder`, with one difference in arithmetic: the residual stream is float32.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.dispatch import KernelChoice
from kernels.linear.quantize import NONE, Matrix, Quant, Unquantizable, floats_of
from kernels.native.arena import Arena
from kernels.native.library import NativeLibrary, Team
from kernels.native.model import GroupPlan, NativeLayer, NativeModel, Rechecks, Shape, require_runnable
from kernels.native.packed import PackedLinear, QuickHead, pack_linear, pack_quick_head
from kernels.native.sampling import NativeSampler
from kernels.sampling import Sampler
from shared.engine.forward_batch import ForwardBatch
from shared.kv.layout import LayerGroup
from shared.model.checkpoint import EMBEDDING, HEAD
from shared.model.config import ModelConfig
from shared.model.pack_cache import PackCache, in_huge_pages, new_arena, packing_digest
from shared.model.quantization import TensorParallel
from shared.model.rope_table import rope_table
from shared.model.weights import Weights

Tensors = Callable[[str], Matrix]
"""A checkpoint's tensors by name, as they are kept there; of some only the shape is looked at."""
LayerLinears = tuple[PackedLinear, PackedLinear, PackedLinear, PackedLinear]
"""qkv, o, gate and up, down."""


@dataclass(frozen=True, slots=True)
class Kept:
    """Where a model's packed weights are kept, and the digest of the model they come from."""

    packs: PackCache
    model_digest: str


@dataclass(frozen=True, slots=True)
class _Layout:
    """A model's linear layers, and the bytes of those that a step reads which wants all logits."""

    layers: list[LayerLinears]
    head: PackedLinear | None
    quick: QuickHead | None
    weight_bytes: int


class NativeDecoder:
    """A loaded model: packed weights are its only copy, and the embedding stays mapped in the checkpoint.

    Args:
        threads: that compute together.
        kept: None packs in this process's memory.
        quant: how weights of layers are kept, and by its `head` that of the output head.
        quick_head: keep the output head as 8-bit integers too, where it is not already: then steps that only look for
            the largest logit read little of the real one, to the same result.

    Raises:
        NativeUnavailable: the library cannot run such a model, or the system gives no more threads.
        Unquantizable: a weight has no such integers.
        SettingsError: the weights do not fit into memory.
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
        kept: Kept | None = None,
        quant: Quant = NONE,
        quick_head: bool = False,
    ) -> None:
        self.config = config
        self.dtype = dtype
        self.kernels = kernels
        self.quant = quant
        self._wants_quick = quick_head and not quant.head.bits
        require_runnable(dtype, config.head_dim)
        self._team = Team(library, threads)
        self.sampler: Sampler = NativeSampler(self._team)
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
        self._tp = tp
        embedding = weights.mapped(EMBEDDING)
        self._embedding = embedding.float() if embedding.dtype == torch.float64 else embedding
        self._rotary = rope_table(config.rope, config.head_dim, config.max_positions, dtype)
        self._norms = [_layer_norms(weights, i) for i in range(config.num_layers)]
        self._final_norm = _copied(weights["model.norm.weight"])
        self._arena = self._packed(weights, kept, with_head)
        self._laid_out = self._lay_out(self._arena, weights.outline, with_head)
        self._groups: tuple[LayerGroup, ...] = ()
        self._model: NativeModel | None = None

    def forward(self, batch: ForwardBatch, groups: tuple[LayerGroup, ...], pools: tuple[Tensor, ...]) -> Tensor:
        """As `Decoder.forward`: KV of every token into the pools, and the wanted logits, float32.

        Raises:
            ValueError: the batch points outside pool, vocabulary or context, or asks a model without a head for logits.
        """
        plans = [GroupPlan(part.block_tables, part.slot_mapping) for part in batch.groups]
        return self.native(groups).step(
            batch.token_ids,
            batch.positions,
            batch.cu_seqlens_q,
            batch.seq_lens,
            batch.logit_rows,
            plans,
            pools,
            batch.top_only,
            batch.passing,
        )

    def native(self, groups: tuple[LayerGroup, ...]) -> NativeModel:
        """The library's model, with its layers' places in the pools of these groups."""
        if self._model is None or groups != self._groups:
            self._model, self._groups = self._in_groups(groups), groups
        return self._model

    def use_threads(self, threads: int) -> None:
        """Let steps from now on use so many threads, at most those there are; they give the same bits."""
        self._team.use(threads)

    def kernel_cpu_s(self) -> float:
        """Processor seconds spent in the library so far, of all its threads."""
        return self._team.cpu_s()

    def quick_rows(self) -> tuple[int, int]:
        """Rows the quick head was asked first for, so far: those that took few blocks of the real one, and others."""
        rechecks = self._model.rechecks if self._model is not None else Rechecks()
        return rechecks.rows - rechecks.fallbacks, rechecks.fallbacks

    @property
    def weight_bytes(self) -> int:
        """Bytes of packed weights that a step reads which wants all logits."""
        return self._laid_out.weight_bytes

    def _in_groups(self, groups: tuple[LayerGroup, ...]) -> NativeModel:
        place = {layer: (g, i) for g, group in enumerate(groups) for i, layer in enumerate(group.layers)}
        layers = [
            NativeLayer(*norms, *linears, *place[i])
            for i, (norms, linears) in enumerate(zip(self._norms, self._laid_out.layers, strict=True))
        ]
        return NativeModel(
            self._team,
            self.dtype,
            self._shape,
            self._embedding,
            self._rotary,
            layers,
            self._final_norm,
            self._laid_out.head,
            self._laid_out.quick,
        )

    def _packed(self, weights: Weights, kept: Kept | None, with_head: bool) -> Arena:
        """The filled arena: kept on disk, with a head for all who share it, or packed here without one unneeded."""
        own = Arena.plan()
        self._lay_out(own, weights.outline, with_head)
        if kept is not None:
            plan = Arena.plan()
            self._lay_out(plan, weights.outline)
            what, version = self._what(kept), packing_digest()
            found = kept.packs.arena(what, version, plan, lambda arena: self._lay_out(arena, weights.kept))
            if found is not None:
                return in_huge_pages(found, own.used)
        arena = new_arena(own.used)
        self._lay_out(arena, weights.kept, with_head)
        return arena.again()

    def _what(self, kept: Kept) -> dict[str, str]:
        """All that decides the bytes of packed weights, but for how they are packed."""
        return {
            "model": kept.model_digest,
            "dtype": str(self.dtype).removeprefix("torch."),
            "quant": f"{self.quant.name}, quick head" if self._wants_quick else self.quant.name,
            "level": self._team.library.level,
            "tensor parallel": f"{self._tp.rank}/{self._tp.size}",
        }

    def _lay_out(self, arena: Arena, tensors: Tensors, with_head: bool = True) -> _Layout:
        """The linear layers in the arena's pieces, one decoder layer after the other; the head last."""
        config = self.config

        def pack(names: list[str], bias: bool = False, gated: bool = False, quant: Quant = self.quant) -> PackedLinear:
            parts = [tensors(f"{name}.weight") for name in names]
            biases = [floats_of(tensors(f"{name}.bias")) for name in names] if bias else []
            try:
                return pack_linear(self._team, arena, parts, biases, self.dtype, gated, quant)
            except Unquantizable as exc:
                raise Unquantizable(f"{', '.join(names)}: {exc}") from exc

        layers = []
        for i in range(config.num_layers):
            attention, mlp = f"model.layers.{i}.self_attn", f"model.layers.{i}.mlp"
            qkv = pack([f"{attention}.{name}_proj" for name in "qkv"], config.attention_bias)
            o = pack([f"{attention}.o_proj"], config.attention_bias)
            gate_up = pack([f"{mlp}.gate_proj", f"{mlp}.up_proj"], config.mlp_bias, gated=True)
            layers.append((qkv, o, gate_up, pack([f"{mlp}.down_proj"], config.mlp_bias)))
        if not with_head:
            return _Layout(layers, None, None, arena.used)
        name = EMBEDDING if config.tied_embeddings else HEAD
        head, used = pack([name.removesuffix(".weight")], quant=self.quant.head), arena.used
        quick = pack_quick_head(self._team, arena, floats_of(tensors(name)), self.dtype) if self._wants_quick else None
        return _Layout(layers, head, quick, used)


def _layer_norms(weights: Weights, index: int) -> tuple[Tensor, Tensor]:
    prefix = f"model.layers.{index}"
    return _copied(weights[f"{prefix}.input_layernorm.weight"]), _copied(
        weights[f"{prefix}.post_attention_layernorm.weight"]
    )


def _copied(tensor: Tensor) -> Tensor:
    """The tensor as read is part of the whole file's mapping, which would stay in memory with it."""
    return tensor.to(torch.float32, copy=True)
