"""What an engine tells of a sequence: its tokens, its finished blocks, how it ended or what befell it."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from shared.contracts.ids import BlockGeneration
from shared.contracts.logprobs import TokenLogprob
from shared.contracts.parts import Totals

STOP, LENGTH, COMPUTED, CANCELLED, ERROR = "stop", "length", "computed", "cancelled", "error"
"""Finish reasons. COMPUTED ends a `compute_only` sequence; CANCELLED never appears in an update."""
PREEMPTED, REVOKED, RESUMED, ADMITTED = "preempted", "revoked", "resumed", "admitted"
"""Events of a sequence whose blocks are taken: REVOKED when it had not begun to compute. ADMITTED: it has its
first blocks, which others had to give up before."""


@dataclass(frozen=True, slots=True)
class CompletedBlock:
    """A full block whose KV is final: ready to be tagged, or handed over."""

    position: int  # index in the block table: holds token positions [position * b, (position + 1) * b)
    block_id: int
    generation: BlockGeneration
    token_ids: tuple[int, ...]


class SequenceUpdate(msgspec.Struct, frozen=True):
    """What a step changed for one sequence.

    The end-of-sequence token is in `token_ids` and counts as a completion token; it is the last one, and has no text.
    """

    seq_id: str
    first_seq: int  # sequence number of the first new token: output tokens over all attempts count from 0
    token_ids: tuple[int, ...]
    num_computed_tokens: int  # KV of [0, num_computed_tokens) is final
    completed: tuple[tuple[CompletedBlock, ...], ...]  # per layer group, since the last update
    finish: str = ""  # "" | stop | length | computed | error
    totals: Totals | None = None  # with `finish`; wall times and bytes are not the batcher's to know
    detail: str = ""  # with finish == "error": for logs
    event: str = ""  # "" | preempted | revoked | resumed | admitted
    started_at: float = 0.0  # when its first step was planned, on the clock `Batcher.plan` is given
    logprobs: tuple[TokenLogprob, ...] = ()  # of token_ids, where asked for
    prompt_logprobs: tuple[TokenLogprob, ...] = ()  # of the prompt's tokens behind those reported before
