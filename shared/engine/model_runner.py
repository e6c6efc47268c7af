"""Runs planned steps: batch, forward pass, sampling. Knows nothing about queues, block owners or requests' ends."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future

import torch
from torch import Tensor

from shared.contracts.errors import Internal, SettingsError
from shared.contracts.logprobs import TokenLogprob
from shared.engine.decode_lane import DecodeLane
from shared.engine.engine_parts import Limits, Steps
from shared.engine.forward_batch import ForwardBatch, build_forward_batch
from shared.engine.sampler import constrained_rows, logprobs_of, sample_greedily, sample_sequences
from shared.engine.step_plan import StepOutput, StepPlan
from shared.grammar.row_masks import NO_MASKS, RowMasks, StepMasks
from shared.kv.pool import Pool
from shared.model.decoder import Model
from shared.model.kv_dtype import takes_kv
from shared.model.native_decoder import NativeDecoder

log = logging.getLogger("baton.worker")

RecordLogits = Callable[[str, int, Tensor], None]
"""Called as (seq_id, absolute position of the row, [vocab_size] logits): for proofs."""


class ModelRunner:
    """One model over one pool. Used by one thread; steps run in the order they are given.

    Args:
        masks: tells what grammars allow; without it no sequence may have one.

    Raises:
        SettingsError: the pool is not of the model's dtype or its kernels' tile layout, or its groups do not hold the
            model's layers.
    """

    def __init__(
        self, model: Model, pool: Pool, record_logits: RecordLogits | None = None, masks: RowMasks | None = None
    ) -> None:
        self._model = model
        self._masks = masks
        self._groups = pool.layout.groups
        self._pools = pool.views()
        self._record_logits = record_logits
        # what the last step sampled: all that a step planned meanwhile can refer to. () after a bad row
        self._last: dict[str, tuple[int, ...]] = {}
        for group in self._groups:
            if not takes_kv(model, group.dtype):
                raise SettingsError(f"KV dtype {group.dtype} differs from the model's {model.dtype}", param="kv.dtype")
            if group.tile_layout != model.kernels.tile_layout:
                raise SettingsError(
                    f"a KV pool of {group.tile_layout} is not for kernels that read {model.kernels.tile_layout}",
                    param="kernels",
                )
        layers = sorted(layer for group in self._groups for layer in group.layers)
        if layers != list(range(model.config.num_layers)):
            raise SettingsError("the pool's layer groups do not hold the model's layers", param="kv_dir")
        self._lane: DecodeLane | None = None
        if isinstance(model, NativeDecoder):
            self._lane = DecodeLane(model.native(self._groups), self._pools)

    def run(self, plan: StepPlan) -> StepOutput:
        """Compute one step.

        Raises:
            Internal: the plan breaks its contract.
        """
        start, record = time.perf_counter(), self._record_logits
        if self._lane is None or (drawn := self._lane.run(plan, self._last, record is not None)) is None:
            return self._run_any(plan, start)
        if record is not None:
            for row, logits in zip(plan.sequences, self._lane.logits.clone(), strict=False):
                record(row.seq_id, row.start, logits)
        self._last = {row.seq_id: tokens for row, tokens in zip(plan.sequences, drawn.sampled, strict=True)}
        return StepOutput(plan.step, drawn.sampled, drawn.bad, time.perf_counter() - start)

    def again(self, ready: Callable[[], object], limits: Limits) -> Steps | None:
        """As `DecodeLane.again`. No later step may refer to the tokens of the steps run by it."""
        if self._lane is None or self._record_logits is not None:
            return None
        self._last = {}
        return self._lane.again(ready, limits)

    @torch.inference_mode()
    def _run_any(self, plan: StepPlan, start: float) -> StepOutput:
        try:
            batch = build_forward_batch(plan, self._groups, all_logits=self._record_logits is not None)
        except ValueError as exc:
            raise Internal(str(exc)) from exc
        lost = self._resolve(batch, plan)
        # worked out while the model computes
        masks = None if batch.top_only else self._begin_masks(plan, batch, lost)
        logits = self._model.forward(batch, self._groups, self._pools)
        if batch.top_only:
            logprobs: Mapping[int, tuple[TokenLogprob, ...]] = {}
            stuck: frozenset[int] = frozenset()
            sampled, bad = sample_greedily(logits, plan.sequences, batch.logit_ranges, lost)
        else:
            if self._record_logits is not None:
                self._record(plan, batch, logits)
            found = NO_MASKS if masks is None else masks.result()
            bad = lost | _not_finite(logits, plan, batch)
            stuck = self._report(found) - bad
            bad |= stuck
            sampler, ranges = self._model.sampler, batch.logit_ranges
            sampled, bad = sample_sequences(logits, plan.sequences, ranges, bad, _tokens(batch), found.bits, sampler)
            logprobs = logprobs_of(logits, plan.sequences, ranges, sampled, bad, sampler)
        self._last = {
            sequence.seq_id: tokens for sequence, tokens in zip(plan.sequences, sampled, strict=True) if tokens
        } | {plan.sequences[i].seq_id: () for i in bad}
        return StepOutput(plan.step, sampled, bad, time.perf_counter() - start, logprobs, stuck)

    def _begin_masks(self, plan: StepPlan, batch: ForwardBatch, skip: frozenset[int]) -> Future[StepMasks] | None:
        if not any(row.sampling is not None and row.sampling.grammar for row in plan.sequences):
            return None
        rows = constrained_rows(plan.sequences, _tokens(batch), skip)
        if not rows:
            return None
        if self._masks is None:
            raise Internal(f"step {plan.step}: {rows[0].seq_id} has a grammar, and nothing here reads it")
        return self._masks.begin(rows)

    @staticmethod
    def _report(masks: StepMasks) -> frozenset[int]:
        """The sequences that cannot go on under their grammars."""
        for reason in masks.faults.values():
            log.warning("a constrained output ends: %s", reason)
        return frozenset(masks.faults)

    def _resolve(self, batch: ForwardBatch, plan: StepPlan) -> frozenset[int]:
        """Fill in tokens in flight. Returns the sequences whose token never came, because their row was bad."""
        if not batch.in_flight:
            return frozenset()
        lost: set[str] = set()
        token_ids = batch.token_ids.numpy()  # the same memory, written without torch's cost an element
        for token in batch.in_flight:
            tokens = self._last.get(token.seq_id)
            if tokens is None or (tokens and len(tokens) < token.back):
                raise Internal(f"step {plan.step}: {token.seq_id} waits for a token that no step samples")
            if tokens:
                token_ids[token.row] = tokens[-token.back]
            else:
                lost.add(token.seq_id)
        return frozenset(i for i, sequence in enumerate(plan.sequences) if sequence.seq_id in lost)

    def _record(self, plan: StepPlan, batch: ForwardBatch, logits: Tensor) -> None:
        assert self._record_logits is not None
        for sequence, span in zip(plan.sequences, batch.logit_ranges, strict=True):
            end = sequence.start + len(sequence.token_ids)
            for i, row in enumerate(span):
                self._record_logits(sequence.seq_id, end - len(span) + i, logits[row])


def _tokens(batch: ForwardBatch) -> list[list[int]]:
    """Per sequence the tokens of its rows."""
    token_ids, ends = batch.token_ids.numpy(), batch.cu_seqlens_q
    return [token_ids[first:end].tolist() for first, end in itertools.pairwise(ends)]


def _not_finite(logits: Tensor, plan: StepPlan, batch: ForwardBatch) -> frozenset[int]:
    """Sequences with a row that holds a NaN or an infinity as its largest, of those with rows that nothing is drawn
    from: drawing looks for itself.

    Minus infinity is a token that cannot be: a fault in one company and none in another would be worse.
    """
    spans = {i: span for i, span in enumerate(batch.logit_ranges) if len(span) > plan.sequences[i].num_sampled}
    return frozenset(i for i, span in spans.items() if not _are_finite(logits[span.start : span.stop]))


def _are_finite(logits: Tensor) -> bool:
    return bool(torch.isfinite(logits.amax(dim=1)).all())
