"""The account of one request: a cumulative total stamped with the epoch, and compute per (attempt, worker). Pure.

`lua/settle.lua` does the same inside Redis, together with the quota, in one step.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from shared.contracts import messages as m
from shared.contracts.parts import ComputeRow, Totals

MAX_COUNT = 1_000_000_000
MAX_SECONDS = 1e9


@dataclass(frozen=True, slots=True)
class LedgerRow:
    """One request. `compute` is keyed by `compute_name`."""

    epoch: int
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    finish: str
    compute: dict[str, Totals] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True, slots=True)
class Booked:
    """What a settlement changed: whether its totals count, by how many tokens, and how many compute rows are new."""

    replaced: bool
    token_change: int
    compute_rows: int


def compute_name(row: ComputeRow) -> str:
    """Which compute this is. Epoch and dispatch are numbers and worker ids hold no `/`, so names cannot collide."""
    return f"{row.attempt.epoch}/{row.attempt.dispatch}/{row.worker}"


def plausible(settle: m.Settle) -> bool:
    """False for numbers no request comes to. Redis would stop at one half way, with the account changed in part."""
    counts = [settle.attempt.epoch, settle.prompt_tokens, settle.completion_tokens, settle.cached_tokens]
    for row in settle.compute:
        counts += [row.totals.computed_tokens, row.totals.wasted_tokens]
    seconds = [value for row in settle.compute for value in (row.totals.prefill_s, row.totals.decode_s)]
    # a comparison with NaN is false
    return all(0 <= count <= MAX_COUNT for count in counts) and all(0 <= value <= MAX_SECONDS for value in seconds)


def apply(row: LedgerRow | None, settle: m.Settle) -> tuple[LedgerRow, Booked]:
    """The row after a settlement. A higher epoch replaces the totals, an equal or lower one leaves them.

    A compute row counts once, whatever settlement brings it and however often.
    """
    known = {} if row is None else row.compute
    fresh = {compute_name(c): c.totals for c in reversed(settle.compute) if compute_name(c) not in known}
    compute = {**known, **fresh}
    if row is not None and settle.attempt.epoch <= row.epoch:
        kept = LedgerRow(row.epoch, row.prompt_tokens, row.completion_tokens, row.cached_tokens, row.finish, compute)
        return kept, Booked(replaced=False, token_change=0, compute_rows=len(fresh))
    new = LedgerRow(
        epoch=settle.attempt.epoch,
        prompt_tokens=settle.prompt_tokens,
        completion_tokens=settle.completion_tokens,
        cached_tokens=settle.cached_tokens,
        finish=settle.finish,
        compute=compute,
    )
    change = new.tokens - (0 if row is None else row.tokens)
    return new, Booked(replaced=True, token_change=change, compute_rows=len(fresh))
