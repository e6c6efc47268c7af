"""The Llama decoder over a flat, ragged batch (Touvron et al. 2023, arXiv 2302.13971).

Keys and values are stored in the pool first and attention reads only the pool. Knows no requests and no sampling.
"""

from __future__ import annotations

import logging
import math
import os
from pathlib import Path
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.activation import silu_mul
from kernels.attention import AttentionPlan, attention, plan_attention
from kernels.dispatch import KernelChoice, UnknownKernels, choose
from kernels.linear import padded_rows
from kernels.linear.quantize import GPU_QUANTS, NONE, QUANTS, Quant, Unquantizable
from kernels.native.compiler import NativeUnavailable
from kernels.norm import add_rms_norm, rms_norm
from kernels.rotary import rotary
from kernels.sampling import ReferenceSampler, Sampler
from kernels.store_kv import StorePlan, plan_store, store_kv
from shared.contracts.errors import SettingsError
from shared.engine.forward_batch import ForwardBatch
from shared.kv.layout import LayerGroup
from shared.model.checkpoint import EMBEDDING, HEAD, expected_shapes
from shared.model.config import ModelConfig, load_config
from shared.model.digest import model_digest
from shared.model.family import LLAMA
from shared.model.fetch import cache_dir
from shared.model.kept_quant import quant_for
from shared.model.native_decoder import Kept, NativeDecoder
from shared.model.pack_cache import PackCache
from shared.model.quality_gate import AUTO, SAME, Configuration, open_gate
from shared.model.quantization import Linear, QuantMethod, TensorParallel, Unquantized
from shared.model.room import require_room
from shared.model.rope_table import rope_table
from shared.model.weights import Weights

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}

log = logging.getLogger(__name__)


class Model(Protocol):
    """A loaded model, whatever computes it."""

    config: ModelConfig
    dtype: torch.dtype
    kernels: KernelChoice
    quant: Quant
    sampler: Sampler

    def forward(self, batch: ForwardBatch, groups: tuple[LayerGroup, ...], pools: tuple[Tensor, ...]) -> Tensor:
        """As `Decoder.forward`."""
        ...


class DecoderLayer:
    """One layer's weights and arithmetic."""

    def __init__(
        self, config: ModelConfig, weights: Weights, index: int, method: QuantMethod, tp: TensorParallel
    ) -> None:
        prefix = f"model.layers.{index}"

        def fused(*names: str, bias: bool) -> Linear:
            biases = [weights[f"{prefix}.{name}.bias"] for name in names] if bias else []
            return Linear(method, [weights[f"{prefix}.{name}.weight"] for name in names], tp, biases)

        self.num_q_heads = tp.local(config.num_q_heads)
        self.num_kv_heads = tp.local(config.num_kv_heads)
        self.head_dim = config.head_dim
        self.scale = config.scale
        qkv = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
        self.qkv = fused(*qkv, bias=config.attention_bias)
        self.o = fused("self_attn.o_proj", bias=config.attention_bias)
        self.gate_up = fused("mlp.gate_proj", "mlp.up_proj", bias=config.mlp_bias)
        self.down = fused("mlp.down_proj", bias=config.mlp_bias)

    def attend(self, x: Tensor, table: Tensor, pool: Tensor, stores: StorePlan, plan: AttentionPlan) -> Tensor:
        """Self-attention of normalized rows: [num_tokens, hidden] → the same.

        Args:
            table: [num_tokens, 2, head_dim], the rotary rows of the tokens' positions.
            pool: [num_blocks, 2, num_kv_heads, block_size, head_dim], this layer's view.
        """
        num_tokens = x.shape[0]
        num_qk = self.num_q_heads + self.num_kv_heads
        qkv = self.qkv(x).view(num_tokens, num_qk + self.num_kv_heads, self.head_dim)
        rotary(qkv[:, :num_qk], table)
        kv = qkv[:, self.num_q_heads :].view(num_tokens, 2, self.num_kv_heads, self.head_dim)
        store_kv(kv, pool, stores)
        heads = attention(qkv[:, : self.num_q_heads], pool, plan, self.scale)
        return self.o(heads.view(num_tokens, -1))

    def feed_forward(self, x: Tensor) -> Tensor:
        """The gated feed-forward block of normalized rows: [num_tokens, hidden] → the same."""
        return self.down(silu_mul(self.gate_up(x)))


class Decoder:
    """A loaded model. Raises SettingsError if its weights do not fit into memory."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        dtype: torch.dtype,
        kernels: KernelChoice,
        tp: TensorParallel,
        with_head: bool = True,
    ) -> None:
        head = EMBEDDING if config.tied_embeddings else HEAD
        kept = {name: math.prod(shape) for name, shape in expected_shapes(config).items()}
        own = sum(kept.values()) - kept[EMBEDDING] - kept.get(HEAD, 0) + with_head * kept[head]
        require_room(own * dtype.itemsize)
        method = Unquantized(dtype, kernels.linear)
        self.config = config
        self.dtype = dtype
        self.kernels = kernels
        self.quant = NONE
        self.sampler: Sampler = ReferenceSampler()
        self._tp = tp
        # As stored: a step looks at few rows, and those are converted then.
        self._embedding = weights.mapped(EMBEDDING)
        self._layers = [DecoderLayer(config, weights, i, method, tp) for i in range(config.num_layers)]
        norms = ("input_layernorm", "post_attention_layernorm")
        self._norms = [
            [_copied(weights[f"model.layers.{i}.{name}.weight"], dtype) for name in norms]
            for i in range(config.num_layers)
        ]
        self._final_norm = _copied(weights["model.norm.weight"], dtype)
        self._head = Linear(method, [weights[head]], tp) if with_head else None
        self._rotary = rope_table(config.rope, config.head_dim, config.max_positions, dtype)

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, groups: tuple[LayerGroup, ...], pools: tuple[Tensor, ...]) -> Tensor:
        """Compute a step: KV of every token into the pools, and the wanted logits.

        Args:
            batch: token ids without placeholders.
            groups: the layer groups, in the order of `batch.groups`.
            pools: per group [num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim].

        Returns:
            [num_logit_rows, vocab_size] float32 (float64 in float64 mode), in the order of `batch.logit_rows`.
        """
        lowered = [self._lower(batch, i, group) for i, group in enumerate(groups)]
        place = {layer: (g, i) for g, group in enumerate(groups) for i, layer in enumerate(group.layers)}
        table = self._rotary.index_select(0, batch.positions)
        eps = self.config.rms_norm_eps
        hidden = F.embedding(batch.token_ids, self._embedding).to(self.dtype)
        update: Tensor | None = None
        for index, (layer, (attention_norm, mlp_norm)) in enumerate(zip(self._layers, self._norms, strict=True)):
            if update is None:
                x = rms_norm(hidden, attention_norm, eps)
            else:
                x = add_rms_norm(update, hidden, attention_norm, eps)
            group, position = place[index]
            update = layer.attend(x, table, pools[group][:, position], *lowered[group])
            update = layer.feed_forward(add_rms_norm(update, hidden, mlp_norm, eps))
        assert update is not None
        return self._logits(hidden.add_(update), batch.logit_rows)

    def _lower(self, batch: ForwardBatch, index: int, group: LayerGroup) -> tuple[StorePlan, AttentionPlan]:
        part = batch.groups[index]
        plan = plan_attention(
            batch.cu_seqlens_q,
            batch.seq_lens,
            part.block_tables,
            group.block_size,
            self._tp.local(self.config.num_q_heads),
            group.num_kv_heads,
        )
        return plan_store(part.slot_mapping, group.block_size), plan

    def _logits(self, hidden: Tensor, rows: Tensor) -> Tensor:
        num_rows = rows.shape[0]
        work = torch.float64 if self.dtype == torch.float64 else torch.float32
        if num_rows == 0:
            return hidden.new_empty((0, self.config.vocab_size), dtype=work)
        wanted = hidden.new_zeros(padded_rows(num_rows), hidden.shape[1])
        torch.index_select(hidden, 0, rows, out=wanted[:num_rows])
        x = rms_norm(wanted, self._final_norm, self.config.rms_norm_eps)
        if self._head is None:
            raise ValueError(f"{num_rows} rows of logits asked of a model loaded without its head")
        return self._head(x)[:num_rows].to(work)


def configuration_of(model: Model, kv_dtype: str = "") -> Configuration:
    """What of a loaded model its quality depends on, as records of `quality_gate` name it.

    Args:
        kv_dtype: of its pool; "" for the one that it computes in.
    """
    kernels = "native" if model.kernels.native else "triton" if model.kernels.triton else "torch"
    dtype = str(model.dtype).removeprefix("torch.")
    return Configuration(kernels, dtype, model.quant.name, SAME if kv_dtype in ("", dtype) else kv_dtype)


def _copied(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """A copy: the tensor as read is part of the whole file's mapping, which would stay in memory with it."""
    return weight.to(dtype, copy=True)


def load_decoder(
    folder: Path,
    dtype: str,
    kernels: str = "auto",
    tp: TensorParallel | None = None,
    with_head: bool = True,
    threads: int = 0,
    quant: str = "none",
    quick_head: bool = False,
) -> Model:
    """Load a model folder.

    Args:
        dtype: compute dtype, a key of `DTYPES`; the checkpoint may hold another. Or "auto": the fastest whose quality
            passed for these weights on the kernels that compute, else float32.
        kernels: a choice of `kernels.dispatch`. Where native ones cannot be had, a warning says why and torch computes.
        with_head: False for one who only makes KV: saves the head's memory, and no logits can be asked for.
        threads: of native kernels; 0 = as many as torch has.
        quant: a key of `QUANTS`: how the weights of layers are kept. Integers are the native kernels' alone, so they
            are not computed otherwise where those cannot be had. "none" keeps a checkpoint's own integers; torch
            computes from their exact values.
        quick_head: of native kernels: see `NativeDecoder`.

    Raises:
        SettingsError: the folder, the dtype or the choice cannot be used, or the quantization not with them; or the
            weights do not fit into memory.
    """
    if dtype not in (AUTO, *DTYPES):
        raise SettingsError(f"dtype {dtype!r} is none of {AUTO}, {', '.join(DTYPES)}", param="dtype")
    if quant in GPU_QUANTS.keys() - QUANTS.keys():
        raise SettingsError(f"quant {quant!r} needs a GPU, and a CPU computes here", param="quant")
    if quant not in QUANTS:
        raise SettingsError(f"quant {quant!r} is none of {', '.join(QUANTS)}", param="quant")
    asked = QUANTS[quant]
    if asked.bits and (kernels not in ("auto", "native") or dtype == "float64"):
        raise SettingsError(
            f"quant {quant!r} needs the native kernels, which compute in bfloat16 and float32: not kernels {kernels!r} "
            f"with dtype {dtype!r}",
            param="quant",
        )
    try:
        choice = choose("native" if asked.bits else kernels, cache_dir(os.environ) / "kernels")
    except UnknownKernels as exc:
        raise SettingsError(str(exc), param="kernels") from exc
    config, parallel = load_config(folder), tp or TensorParallel()
    integers = quant_for(config, folder, quant, QUANTS)

    def chosen(family: str, quant: Quant = NONE) -> torch.dtype:
        if dtype != AUTO:
            return DTYPES[dtype]
        kept = quant.name if quant.as_kept else NONE.name
        return DTYPES[open_gate(cache_dir(os.environ)).default_dtype(model_digest(folder), family, kept)]

    if choice.triton or config.family != LLAMA:
        what = "kernels 'triton'" if choice.triton else config.family.architecture
        raise SettingsError(f"{folder}: {what}: is computed on a GPU only, see [engine] device", param="device")
    with Weights(folder, config) as weights:
        if choice.native is not None:
            count = threads or torch.get_num_threads()
            kept = Kept(PackCache(cache_dir(os.environ) / "packed"), model_digest(folder))
            try:
                return NativeDecoder(
                    config,
                    weights,
                    chosen("native", integers),
                    choice,
                    choice.native,
                    count,
                    parallel,
                    with_head,
                    kept,
                    integers,
                    quick_head,
                )
            except NativeUnavailable as exc:
                if asked.bits:
                    raise SettingsError(f"quant {quant!r} needs the native kernels: {exc}", param="quant") from exc
                log.warning("%s; torch computes instead, more slowly", exc)
            except Unquantizable as exc:
                raise SettingsError(f"quant {integers.name!r}: {exc}", param="quant") from exc
            choice = KernelChoice(choice.linear)
        if asked.bits:
            raise SettingsError(f"quant {quant!r} needs the native kernels, which cannot be had here", param="quant")
        return Decoder(config, weights, chosen("torch"), choice, parallel, with_head)
