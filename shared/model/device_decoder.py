"""The decoder on a device: one flat batch through Triton kernels, without a look at any value on the host.

Everything a step needs lies in device memory, so that a step can be captured as a graph and replayed. On a CPU the same
code runs in Triton's interpreter, for proofs. Families differ as `shared.model.family` says.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.activation.triton_kernel import Gate, gate_mul
from kernels.attention.triton_attention import TritonPlan, attend
from kernels.attention.triton_tuning import HEAD_DIMS, TuningError, require_table
from kernels.chip import FP8_CAPABILITY, capability
from kernels.dispatch import KernelChoice, UnknownKernels, choose
from kernels.embedding.triton_kernel import embed
from kernels.linear.quantize import GPU_QUANTS, NONE, Quant
from kernels.linear.triton_few_rows import MAX_ROWS, few_rows_linear
from kernels.linear.triton_kernel import linear
from kernels.linear.triton_weights import DeviceWeight
from kernels.moe.triton_kernel import experts, route
from kernels.norm.triton_kernel import add_rms_norm, rms_norm
from kernels.rotary.triton_kernel import HeadNorm, rotary_store_kv
from shared.contracts.errors import SettingsError
from shared.kv.device_spans import KvView
from shared.kv.layout import LayerGroup
from shared.model.config import ModelConfig, load_config
from shared.model.device_weights import DeviceWeights, LayerWeights, load_weights
from shared.model.kept_quant import quant_for
from shared.model.rope_table import rope_table
from shared.model.weights import Weights

ROW_CLASSES = (16, 32, 64, 128, 256)
"""Rows of a step for which our own products, experts' included, are compiled apart: up to each of these."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
FUSED_HIDDEN = 2048
"""Widest model whose steps of a few rows are fused: beyond, products of the library gain more than launches cost."""
EXACT = "exact"
"""Of plain matrix products: computed by `kernels.linear.triton_kernel`, not by a library."""


@dataclass(frozen=True, slots=True)
class DeviceStep:
    """A step's inputs on the device, as `shared.engine.device_batch.parts_of` tells them."""

    token_ids: Tensor  # [num_rows] int32
    token_source: Tensor  # [num_rows] int32
    positions: Tensor  # [num_rows] int32
    logit_rows: Tensor  # [num_logits] int32
    slots: tuple[Tensor, ...]  # per group [num_rows] int32


LayerKv = tuple[Tensor, Tensor | None]
"""A layer's view of the pool, and of its scales where it has some."""
Plans = Mapping[tuple[int, int], TritonPlan]
"""A step's attention by (layer group, window)."""


class DeviceDecoder:
    """A loaded model. One thread uses it; steps run in order on the current stream.

    Args:
        fuse: whether steps of a few rows run norms, gates and residuals within matrix products; None = where it pays.
            Never with `exact`, nor where inputs of a weight have an order of their own.
        quant: how `weights` are kept.
        exact: multiply by kernels whose rows do not depend on how many there are: then no bit of a row does.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: DeviceWeights,
        kernels: KernelChoice,
        fuse: bool | None = None,
        quant: Quant = NONE,
        exact: bool = False,
    ) -> None:
        family = config.family
        self.config = config
        self.dtype = weights.embedding.dtype
        # part of the numerics id
        self.kernels = replace(kernels, linear=EXACT) if exact else kernels
        self.quant = quant
        self.exact = exact
        self.weights = weights
        self.device = weights.embedding.device
        self._rotary = rope_table(config.rope, config.head_dim, config.max_positions, torch.float32).to(self.device)
        self._offset = 1.0 if family.norm_offset else 0.0
        self._gate: Gate = "gelu_tanh" if family.gelu else "silu"
        can_fuse = not (family.post_norms or family.num_experts or exact or weights.reordered)
        self._fused = can_fuse and (config.hidden_size <= FUSED_HIDDEN if fuse is None else fuse)
        # rounded as the checkpoint's own code rounds it
        scale = torch.tensor(config.hidden_size**0.5).to(self.dtype).item()
        self._embedding_scale = float(scale) if family.scaled_embedding else 1.0

    @property
    def compiles_by_rows(self) -> bool:
        """Whether its products are kernels compiled for classes of rows, and not a library's."""
        return self.exact or self.quant.bits > 0 or self.config.family.num_experts > 0

    @torch.inference_mode()
    def forward(
        self,
        step: DeviceStep,
        samples: Tensor,
        groups: tuple[LayerGroup, ...],
        pools: tuple[KvView, ...],
        plans: Plans,
    ) -> Tensor:
        """Compute a step: KV of every row into the pools, and the wanted logits.

        Args:
            samples: [any] int32, the tokens the last step drew.
            pools: one for each group.
            plans: for every group and every window that a layer of it has.

        Returns:
            [num_logits, vocab_size], of the model's dtype, or float32 where logits are capped.
        """
        place = {layer: (g, i) for g, group in enumerate(groups) for i, layer in enumerate(group.layers)}
        if step.token_ids.shape[0] <= MAX_ROWS and self._fused:
            return self._few_rows(step, samples, place, pools, plans)
        residual = embed(step.token_ids, step.token_source, samples, self.weights.embedding, self._embedding_scale)
        update: Tensor | None = None
        for index, layer in enumerate(self.weights.layers):
            if update is None:
                x = self._norm(residual, layer.attention_norm)
            else:
                x = self._add_norm(update, residual, layer.attention_norm)
            group, position = place[index]
            plan = plans[group, self.config.family.window(index)]
            update = self._attend(x, layer, step, plan, step.slots[group], pools[group].layer(position))
            if layer.after_attention_norm is not None:
                update = self._norm(update, layer.after_attention_norm)
            update = self._feed_forward(self._add_norm(update, residual, layer.mlp_norm), layer)
            if layer.after_mlp_norm is not None:
                update = self._norm(update, layer.after_mlp_norm)
        assert update is not None
        return self._logits(update, residual, step.logit_rows)

    def _few_rows(
        self,
        step: DeviceStep,
        samples: Tensor,
        place: Mapping[int, tuple[int, int]],
        pools: tuple[KvView, ...],
        plans: Plans,
    ) -> Tensor:
        """`forward` for a handful of rows: norms, gate and residual are part of the matrix products' launches."""
        config, weights = self.config, self.weights
        residual = embed(step.token_ids, step.token_source, samples, weights.embedding, self._embedding_scale)
        for index, layer in enumerate(weights.layers):
            assert layer.gate_up is not None
            assert layer.down is not None
            group, position = place[index]
            plan, kv = plans[group, config.family.window(index)], pools[group].layer(position)
            qkv = self._few(residual, layer.qkv, norm=layer.attention_norm)
            heads = self._heads(qkv, layer, step, plan, step.slots[group], kv)
            self._few(heads, layer.o, residual=residual)
            x = self._few(residual, layer.gate_up, norm=layer.mlp_norm, gate=self._gate)
            self._few(x, layer.down, residual=residual)
        if step.logit_rows.shape[0] == 0 or weights.head is None:
            return self._logits(residual, residual, step.logit_rows)
        wanted = residual.index_select(0, step.logit_rows)
        logits = self._few(wanted, weights.head, norm=weights.norm)
        return self._capped(logits)

    def _attend(
        self, x: Tensor, layer: LayerWeights, step: DeviceStep, plan: TritonPlan, slots: Tensor, kv: LayerKv
    ) -> Tensor:
        """Self-attention of normalized rows: [num_rows, hidden] → the same; their K and V go to the pool."""
        return self._linear(self._heads(self._linear(x, layer.qkv), layer, step, plan, slots, kv), layer.o)

    def _heads(
        self, qkv: Tensor, layer: LayerWeights, step: DeviceStep, plan: TritonPlan, slots: Tensor, kv: LayerKv
    ) -> Tensor:
        """From queries, keys and values of all heads, one behind the other, to the heads' outputs side by side."""
        config, (pool, scales) = self.config, kv
        heads, head_dim = config.num_q_heads, config.head_dim
        qkv = qkv.view(qkv.shape[0], heads + 2 * config.num_kv_heads, head_dim)
        norm = None
        if layer.q_norm is not None and layer.k_norm is not None:
            norm = HeadNorm(layer.q_norm, layer.k_norm, config.rms_norm_eps, self._offset)
        rotary_store_kv(qkv, self._rotary, step.positions, pool, slots, heads, norm, scales)
        out = attend(qkv[:, :heads], pool, plan, config.scale, config.family.score_cap, kv_scales=scales)
        return out.view(qkv.shape[0], heads * head_dim)

    def _feed_forward(self, x: Tensor, layer: LayerWeights) -> Tensor:
        """The gated feed-forward block, or the mixture of such, of normalized rows: [num_rows, hidden] → the same."""
        if layer.experts is not None:
            mixture = layer.experts
            ids, shares = route(self._linear(x, mixture.router), self.config.family.experts_per_token)
            return experts(x, mixture.gate_up, mixture.down, ids, shares, self._gate)
        assert layer.gate_up is not None
        assert layer.down is not None
        return self._linear(gate_mul(self._linear(x, layer.gate_up), self._gate), layer.down)

    def _logits(self, update: Tensor, residual: Tensor, rows: Tensor) -> Tensor:
        head = self.weights.head
        if rows.shape[0] == 0:
            return residual.new_empty((0, self.config.vocab_size))
        if head is None:
            raise ValueError(f"{rows.shape[0]} rows of logits asked of a model loaded without its head")
        wanted = residual.index_select(0, rows)
        return self._capped(self._linear(self._add_norm(update.index_select(0, rows), wanted, self.weights.norm), head))

    def _capped(self, logits: Tensor) -> Tensor:
        cap = self.config.family.logit_cap
        return torch.tanh(logits.float() / cap).mul_(cap) if cap else logits

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return rms_norm(x, weight, self.config.rms_norm_eps, self._offset)

    def _add_norm(self, x: Tensor, residual: Tensor, weight: Tensor) -> Tensor:
        return add_rms_norm(x, residual, weight, self.config.rms_norm_eps, self._offset)

    def _linear(self, x: Tensor, weight: DeviceWeight) -> Tensor:
        if weight.kind == "plain" and not self.exact:
            return F.linear(x, weight.data, weight.bias)
        return linear(x, weight)

    def _few(
        self,
        x: Tensor,
        weight: DeviceWeight,
        norm: Tensor | None = None,
        gate: Gate | None = None,
        residual: Tensor | None = None,
    ) -> Tensor:
        eps, offset = self.config.rms_norm_eps, self._offset
        return few_rows_linear(x, weight, norm=norm, eps=eps, offset=offset, gate=gate, residual=residual)


def load_device_decoder(
    folder: Path, dtype: str, device: str, with_head: bool = True, quant: str = NONE.name, exact: bool = False
) -> DeviceDecoder:
    """Load a model folder onto a device.

    Args:
        dtype: compute dtype; the checkpoint may hold another.
        device: "cuda", or "cpu" in Triton's interpreter.
        with_head: False for one who only makes KV: saves the head's memory, and no logits can be asked for.
        quant: a key of `GPU_QUANTS`: how the weights of layers are kept, and by its `head` the output head's.
        exact: see `DeviceDecoder`.

    Raises:
        SettingsError: folder, dtype or quant cannot be used, the kernels cannot run there, or their table of launch
            shapes is none.
    """
    if quant not in GPU_QUANTS:
        raise SettingsError(f"quant {quant!r} is none of {', '.join(GPU_QUANTS)}", param="quant")
    if dtype not in DTYPES:
        raise SettingsError(f"dtype {dtype!r} is none of {', '.join(DTYPES)} on a GPU", param="dtype")
    try:
        choice, place = choose("triton"), torch.device(device)
        require_table(place)
    except (UnknownKernels, TuningError) as exc:
        raise SettingsError(str(exc), param="kernels") from exc
    config = load_config(folder)
    kept = quant_for(config, folder, quant, GPU_QUANTS)
    require_float8(kept, place)
    _require_sizes(config, folder)
    with Weights(folder, config) as weights:
        loaded = load_weights(config, weights, place, DTYPES[dtype], with_head, kept)
    return DeviceDecoder(config, loaded, choice, quant=kept, exact=exact)


def require_float8(quant: Quant, device: torch.device) -> None:
    """Raise `SettingsError` where a card does not multiply what `quant` keeps."""
    if quant.on_gpu == "fp8" and capability(device) < FP8_CAPABILITY:
        has, needs = ("sm_{}{}".format(*pair) for pair in (capability(device), FP8_CAPABILITY))
        raise SettingsError(f"quant 'fp8' needs {needs} or newer, this GPU is {has}: w8a8 works on it", param="quant")


def _require_sizes(config: ModelConfig, folder: Path) -> None:
    if config.head_dim not in HEAD_DIMS:
        sizes = ", ".join(map(str, HEAD_DIMS))
        raise SettingsError(
            f"{folder}/config.json: head_dim: {config.head_dim} has no Triton kernels, only {sizes}", param="head_dim"
        )
