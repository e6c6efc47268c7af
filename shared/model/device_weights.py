"""A model's weights on a device, joined as its kernels read them. Knows names and shapes; computes nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from kernels.arguments import KernelArgumentError
from kernels.linear.quantize import NONE, Matrix, Quant, Unquantizable
from kernels.linear.triton_weights import DeviceWeight, plain
from kernels.moe.triton_kernel import stacked
from shared.contracts.errors import SettingsError
from shared.model.checkpoint import EMBEDDING, HEAD, MOE
from shared.model.config import ModelConfig
from shared.model.device_packing import kept, on_device, packed


class TensorSource(Protocol):
    """Where tensors come from by their names in a checkpoint: an open checkpoint, or something made up."""

    def __getitem__(self, name: str) -> Tensor: ...

    def kept(self, name: str) -> Matrix:
        """A matrix as it is kept there, integers as integers."""
        ...


@dataclass(frozen=True, slots=True)
class Experts:
    """A mixture's feed-forward blocks and the router that picks among them."""

    router: DeviceWeight  # [num_experts, hidden], never of integers
    gate_up: DeviceWeight  # [num_experts, 2 * width, hidden], gate first
    down: DeviceWeight  # [num_experts, hidden, width]


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One decoder layer. Norms that a family lacks are None."""

    attention_norm: Tensor
    qkv: DeviceWeight
    q_norm: Tensor | None
    k_norm: Tensor | None
    o: DeviceWeight
    after_attention_norm: Tensor | None
    mlp_norm: Tensor
    gate_up: DeviceWeight | None  # None: a mixture
    down: DeviceWeight | None
    experts: Experts | None
    after_mlp_norm: Tensor | None


@dataclass(frozen=True, slots=True)
class DeviceWeights:
    """A whole model. `head` is None for one who only makes KV, and over the embedding itself where the two are tied and
    weights are no integers."""

    embedding: Tensor  # [vocab_size, hidden]
    layers: tuple[LayerWeights, ...]
    norm: Tensor  # [hidden]
    head: DeviceWeight | None  # [vocab_size, hidden]

    @property
    def step_bytes(self) -> int:
        """Bytes of weights that a step of few rows reads: all but the embedding, of which it reads a row a token."""
        return sum(_bytes(part) for part in (*self.layers, self.norm, self.head))

    @property
    def reordered(self) -> bool:
        """Whether some weight's inputs are not in the order of its rows of x."""
        parts = [part for layer in self.layers for part in (layer.qkv, layer.o, layer.gate_up, layer.down)]
        return any(part is not None and part.permutation is not None for part in parts)


def load_weights(
    config: ModelConfig,
    source: TensorSource,
    device: torch.device,
    dtype: torch.dtype,
    with_head: bool = True,
    quant: Quant = NONE,
) -> DeviceWeights:
    """Copy a model to the device, tensor by tensor: at no time is more than one of them on the host.

    Args:
        quant: how the weights of layers are kept, and by its `head` that of the output head; the embedding, a router
            and norms are of `dtype`.

    Raises:
        SettingsError: a weight has no such integers; names it (param `quant`).
    """
    loader = _Loader(config, source, device, dtype, quant)
    embedding = loader.tensor(EMBEDDING)
    layers = tuple(loader.layer(i) for i in range(config.num_layers))
    head = None
    if with_head:
        tied = config.tied_embeddings
        # integers of the weight as it was kept: of what the embedding was rounded to they might be others
        shared = tied and not quant.head.bits
        head = plain(embedding) if shared else loader.packed(quant.head, EMBEDDING if tied else HEAD)
    return DeviceWeights(embedding, layers, loader.tensor("model.norm.weight"), head)


class _Loader:
    def __init__(
        self, config: ModelConfig, source: TensorSource, device: torch.device, dtype: torch.dtype, quant: Quant
    ) -> None:
        self._config = config
        self._source = source
        self._device = device
        self._dtype = dtype
        self._quant = quant

    def tensor(self, *names: str) -> Tensor:
        """Tensors joined along their first dimension."""
        # a copy: what was read is part of its file's mapping, and would keep all of it
        parts = [self._source[name].to(self._device, self._dtype, copy=True) for name in names]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def packed(self, quant: Quant, *names: str, bias: Tensor | None = None) -> DeviceWeight:
        """Matrices joined along their outputs, as `quant` keeps them."""
        if not quant.bits:
            return plain(self.tensor(*names), bias)
        parts = [on_device(self._source.kept(name), self._device) for name in names]
        try:
            return kept(parts, self._dtype, bias) if quant.as_kept else packed(parts, quant, bias)
        except (Unquantizable, KernelArgumentError) as exc:
            raise SettingsError(f"quant {quant.name!r}: {names[0]}: {exc}", param="quant") from exc

    def matrix(self, bias: bool, *names: str) -> DeviceWeight:
        biases = self.tensor(*(f"{name}.bias" for name in names)) if bias else None
        return self.packed(self._quant, *(f"{name}.weight" for name in names), bias=biases)

    def layer(self, index: int) -> LayerWeights:
        config, family = self._config, self._config.family
        prefix = f"model.layers.{index}"
        qkv = [f"{prefix}.self_attn.{name}_proj" for name in "qkv"]
        mixture = family.num_experts > 0
        mlp = [f"{prefix}.mlp.{name}_proj" for name in ("gate", "up", "down")]

        def norm(name: str, there: bool = True) -> Tensor | None:
            return self.tensor(f"{prefix}.{name}.weight") if there else None

        def required(name: str) -> Tensor:
            return self.tensor(f"{prefix}.{name}.weight")

        before_mlp = "pre_feedforward_layernorm" if family.post_norms else "post_attention_layernorm"
        return LayerWeights(
            attention_norm=required("input_layernorm"),
            qkv=self.matrix(config.attention_bias, *qkv),
            q_norm=norm("self_attn.q_norm", family.qk_norm),
            k_norm=norm("self_attn.k_norm", family.qk_norm),
            o=self.matrix(config.attention_bias, f"{prefix}.self_attn.o_proj"),
            after_attention_norm=norm("post_attention_layernorm", family.post_norms),
            mlp_norm=required(before_mlp),
            gate_up=None if mixture else self.matrix(config.mlp_bias, *mlp[:2]),
            down=None if mixture else self.matrix(config.mlp_bias, mlp[2]),
            experts=self._experts(f"{prefix}.{MOE}") if mixture else None,
            after_mlp_norm=norm("post_feedforward_layernorm", family.post_norms),
        )

    def _experts(self, prefix: str) -> Experts:
        count = self._config.family.num_experts
        router = plain(self.tensor(f"{prefix}.gate.weight"))
        if self._quant.bits:
            names = [f"{prefix}.experts.{i}" for i in range(count)]
            gate_up = [self.packed(self._quant, f"{name}.w1.weight", f"{name}.w3.weight") for name in names]
            down = [self.packed(self._quant, f"{name}.w2.weight") for name in names]
            try:
                return Experts(router, stacked(gate_up), stacked(down))
            except KernelArgumentError as exc:
                raise SettingsError(f"quant {self._quant.name!r}: {prefix}.experts: {exc}", param="quant") from exc
        return self._plain_experts(prefix, router)

    def _plain_experts(self, prefix: str, router: DeviceWeight) -> Experts:
        """Read straight to where they stay: joined afterwards, a layer's experts would be there twice."""
        config, count = self._config, self._config.family.num_experts
        width, hidden = config.intermediate_size, config.hidden_size
        gate_up = torch.empty(count, 2 * width, hidden, dtype=self._dtype, device=self._device)
        down = torch.empty(count, hidden, width, dtype=self._dtype, device=self._device)
        for i in range(count):
            expert = f"{prefix}.experts.{i}"
            gate_up[i, :width].copy_(self._source[f"{expert}.w1.weight"])
            gate_up[i, width:].copy_(self._source[f"{expert}.w3.weight"])
            down[i].copy_(self._source[f"{expert}.w2.weight"])
        return Experts(
            router,
            DeviceWeight("plain", gate_up, hidden, 2 * width),
            DeviceWeight("plain", down, width, hidden),
        )


def _bytes(part: object) -> int:
    """Bytes of all tensors in a structure of them."""
    if isinstance(part, Tensor):
        return part.nbytes
    return sum(_bytes(getattr(part, name)) for name in getattr(part, "__slots__", ()))
