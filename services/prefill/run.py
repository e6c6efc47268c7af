"""One hand-off in the making, as its prefill worker sees it."""

from __future__ import annotations

from dataclasses import dataclass

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import Status, StatusCode

from shared.contracts.errors import BatonError, to_wire
from shared.contracts.grants import Scope
from shared.contracts.ids import WorkerId
from shared.engine.batcher import Reservation
from shared.kv.handoff import Source, SourceEffect
from shared.telemetry import attributes as a


@dataclass(slots=True)
class Run:
    """One hand-off in the making."""

    seq_id: str
    source: Source
    scope: Scope
    context: Context
    span: trace.Span
    started_at: float
    reservation: Reservation | None = None
    computed: int = 0
    chunks: int = 0
    naming: bool = False  # digests are being computed in the digest thread
    ended: bool = False  # computed; its blocks wait to be pulled

    def fail(self, error: BatonError, now: float) -> SourceEffect:
        """Tell the decode worker, which goes on alone from what it has pulled, and the span."""
        self.span.set_attribute(a.ERROR_CODE, error.code)
        self.span.set_status(Status(StatusCode.ERROR))
        return self.source.fail(to_wire(error), now)

    def end_span(self, now: float, worker: WorkerId, *, fake: bool) -> None:
        """End the span, once, with what is known of the run."""
        if not self.span.is_recording():
            return
        self.span.set_attributes(
            {
                a.PROMPT_TOKENS: self.source.num_tokens,
                a.CACHED_TOKENS: self.reservation.num_cached_tokens if self.reservation is not None else 0,
                a.CHUNKS: self.chunks,
                a.COMPUTED_TOKENS: self.computed,
                a.PREFILL_S: now - self.started_at,
                a.WORKER: str(worker),
                a.FAKE: fake,
            }
        )
        self.span.end()
