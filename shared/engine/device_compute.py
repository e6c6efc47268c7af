"""What a step launches on a device, over buffers that stay where they are. It never waits for the device."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kernels.attention.triton_attention import SPLIT, TritonPlan, plan_attention, plan_on_device
from kernels.sampling.triton_kernel import sample
from kernels.sampling.triton_logprobs import Top, empty_top, top_logprobs
from kernels.sampling.triton_rows import Bias, Drawn, Mask, Penalties, SamplingRows
from shared.contracts.errors import Internal, SettingsError
from shared.engine.device_batch import (
    SPECIAL,
    Part,
    StepShape,
    buffer_words,
    decode_buckets,
    decode_shape,
    is_decode,
    mixed_shape,
    padded,
    parts_of,
)
from shared.engine.device_sampling import DeviceSampling
from shared.engine.step_plan import StepPlan
from shared.kv.device_spans import KvView
from shared.kv.layout import SCALED, LayerGroup
from shared.model.device_decoder import DeviceDecoder, DeviceStep

PARTIAL_BYTES = 256 * 1024 * 1024
"""Most memory that partial results of attention may take in a captured decode step: it bounds the context of those."""
MAX_TOP = 20
"""Most likely tokens a row can be asked to tell."""
_TORCH = {np.int32: torch.int32, np.int64: torch.int64, np.float32: torch.float32, np.float64: torch.float64}


_DRAWN_BY = ("temperature", "top_k", "top_p", "seed", "draw_position", *(name for name, _, _ in SPECIAL))


@dataclass(frozen=True, slots=True)
class StepLimits:
    """What steps can be."""

    max_rows: int  # tokens of a step
    max_num_seqs: int
    max_len: int  # tokens of a sequence
    depth: int = 1  # steps launched while one runs

    @property
    def max_logits(self) -> int:
        """Most rows of logits in a step, padding included."""
        return padded(max(self.max_rows, decode_buckets(self.max_num_seqs)[-1]))


class DeviceCompute:
    """A model over a pool, and the buffers its steps read and write.

    Args:
        pools: one for each group.

    Raises:
        SettingsError: the pool is neither of the model's dtype nor of 8-bit values, or its groups do not hold the
            model's layers.
    """

    def __init__(
        self, model: DeviceDecoder, groups: tuple[LayerGroup, ...], pools: tuple[KvView, ...], limits: StepLimits
    ) -> None:
        computed = str(model.dtype).removeprefix("torch.")
        for group in groups:
            if group.dtype not in (computed, *SCALED):
                raise SettingsError(f"KV dtype {group.dtype} differs from the model's {computed}", param="kv.dtype")
        if sorted(layer for group in groups for layer in group.layers) != list(range(model.config.num_layers)):
            raise SettingsError("the pool's layer groups do not hold the model's layers", param="kv_dir")
        self.model = model
        self.groups = groups
        self.pools = pools
        self.limits = limits
        self.buckets = decode_buckets(limits.max_num_seqs)
        self.decode_len = _decode_len(model, limits, self.buckets[-1])
        device = model.device
        self.inputs = torch.zeros(most_words(limits, groups, self.decode_len), dtype=torch.int32, device=device)
        self.results = torch.zeros(2, limits.max_logits, dtype=torch.int32, device=device)  # tokens, finite or not
        self.drawn = Drawn(*self.results, *torch.zeros(2, limits.max_logits, device=device))
        self.top: Top = empty_top(limits.max_logits, MAX_TOP, device)
        lines = limits.max_num_seqs if model.weights.head is not None else 0  # nothing is drawn without a head
        self.sampling = DeviceSampling(lines, model.config.vocab_size, device)
        self._tables = [
            torch.zeros(self.buckets[-1], _table_columns(group, self.decode_len), dtype=torch.int32, device=device)
            for group in groups
        ]
        windows = model.config.family.windows
        self._windows = tuple(sorted(set(windows))) if windows else (0,)

    def shape_of(self, plan: StepPlan) -> StepShape:
        """How the plan is laid out. Raises Internal when it exceeds the limits."""
        num_seqs = len(plan.sequences)
        if plan.num_tokens > self.limits.max_rows or num_seqs > self.limits.max_num_seqs:
            raise Internal(f"step {plan.step}: {plan.num_tokens} tokens of {num_seqs} sequences exceed the limits")
        longest = max(sequence.start + len(sequence.token_ids) for sequence in plan.sequences)
        if longest > self.limits.max_len:
            raise Internal(f"step {plan.step}: a sequence of {longest} tokens exceeds {self.limits.max_len}")
        if is_decode(plan) and longest <= self.decode_len:
            bucket = next(bucket for bucket in self.buckets if num_seqs <= bucket)
            return decode_shape(plan, self.groups, self.decode_len, bucket)
        return mixed_shape(plan, len(self.groups))

    def spread_tables(self, shape: StepShape) -> None:
        """Copy the block tables just sent to where decode steps read them."""
        parts = parts_of(shape)
        for g, tables in enumerate(self._tables):
            tables[: shape.num_seqs, : shape.max_blocks].copy_(self._part(parts[f"tables.{g}"]))

    def decode(self, num_seqs: int) -> Tensor:
        """Launch a decode step of that many sequences, padding included, up to its logits.

        Everything it reads lies at the same place every time: it can be captured.
        """
        parts = parts_of(StepShape(num_seqs, num_seqs, num_seqs, len(self.groups), 0))
        step = self._step(parts)
        config = self.model.config
        plans: dict[tuple[int, int], TritonPlan] = {}
        for g, group in enumerate(self.groups):
            for window in self._windows:
                plans[g, window] = plan_on_device(
                    self._part(parts["cu_seqlens_q"]),
                    self._part(parts["seq_lens"]),
                    self._tables[g][:num_seqs],
                    num_rows=num_seqs,
                    max_queries=1,
                    max_len=self.decode_len,
                    block_size=group.block_size,
                    num_q_heads=config.num_q_heads,
                    num_kv_heads=group.num_kv_heads,
                    head_dim=config.head_dim,
                    window=window,
                    quantized=group.dtype in SCALED,
                )
        return self.model.forward(step, self.drawn.tokens, self.groups, self.pools, plans)

    def mixed(self, plan: StepPlan, shape: StepShape) -> Tensor:
        """Launch any step up to its logits, its attention planned here."""
        parts = parts_of(shape)
        config = self.model.config
        ends = np.cumsum([0, *(len(sequence.token_ids) for sequence in plan.sequences)])
        lens = [sequence.start + len(sequence.token_ids) for sequence in plan.sequences]
        plans = {
            (g, window): plan_attention(
                ends.tolist(),
                lens,
                [sequence.block_tables[g] for sequence in plan.sequences],
                group.block_size,
                config.num_q_heads,
                group.num_kv_heads,
                config.head_dim,
                self.model.device,
                window,
                group.dtype in SCALED,
            )
            for g, group in enumerate(self.groups)
            for window in self._windows
        }
        return self.model.forward(self._step(parts), self.drawn.tokens, self.groups, self.pools, plans)

    def draw(self, logits: Tensor, wanted: int | None = None) -> None:
        """Launch the draws of the step just launched, into `drawn` and `top`. They can be captured too.

        Args:
            wanted: rows of logits that are not padding; None: whatever they are, all are drawn from.
        """
        rows = logits.shape[0] if wanted is None else wanted
        if not rows:
            return
        # where these parts lie follows from the number of logits alone
        parts = parts_of(StepShape(0, 0, logits.shape[0], len(self.groups), 0))
        part = {name: self._part(parts[name])[:rows] for name in _DRAWN_BY}
        logits, drawn = logits[:rows], self.drawn.first(rows)
        sample(logits, self._rows(part), drawn)
        top_logprobs(logits, drawn.log_sums, MAX_TOP, part["top"], self.top.first(rows))

    def _rows(self, part: dict[str, Tensor]) -> SamplingRows:
        state = self.sampling
        said = (state.counts, state.prompts)
        return SamplingRows(
            temperature=part["temperature"],
            top_k=part["top_k"],
            top_p=part["top_p"],
            min_p=part["min_p"],
            seed=part["seed"],
            position=part["draw_position"],
            penalties=Penalties(part["repetition"], part["presence"], part["frequency"], part["penalty_line"], *said),
            bias=Bias(part["bias_line"], state.bias_ids, state.bias_values),
            mask=Mask(part["mask_line"], state.masks),
            scored=part["scored"],
        )

    def _step(self, parts: dict[str, Part]) -> DeviceStep:
        return DeviceStep(
            token_ids=self._part(parts["token_ids"]),
            token_source=self._part(parts["token_source"]),
            positions=self._part(parts["positions"]),
            logit_rows=self._part(parts["logit_rows"]),
            slots=tuple(self._part(parts[f"slots.{g}"]) for g in range(len(self.groups))),
        )

    def _part(self, part: Part) -> Tensor:
        return self.inputs[part.begin : part.begin + part.words].view(_TORCH[part.dtype]).view(part.shape)


def most_words(limits: StepLimits, groups: tuple[LayerGroup, ...], decode_len: int) -> int:
    """Words of the largest buffer any step within the limits has."""
    largest = decode_buckets(limits.max_num_seqs)[-1]
    columns = max(_table_columns(group, decode_len) for group in groups)
    decode = StepShape(largest, largest, largest, len(groups), columns)
    mixed = StepShape(padded(limits.max_rows), limits.max_num_seqs, limits.max_logits, len(groups), 0)
    return max(buffer_words(decode), buffer_words(mixed))


def _table_columns(group: LayerGroup, max_len: int) -> int:
    return group.blocks_for(max_len)


def _decode_len(model: DeviceDecoder, limits: StepLimits, most_seqs: int) -> int:
    """Longest sequence of a decode step with fixed buffers."""
    config = model.config
    split_bytes = most_seqs * config.num_q_heads * (config.head_dim + 2) * 4
    return min(limits.max_len, max(1, PARTIAL_BYTES // split_bytes) * SPLIT)
