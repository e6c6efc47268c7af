"""The traces of requests that wait: each keeps the context it came with, so that placing joins its trace."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from opentelemetry import trace
from opentelemetry.context import Context

from services.scheduler.effects import PlacingEnded
from shared.contracts.ids import RequestId
from shared.telemetry import attributes as a

tracer = trace.get_tracer("baton.scheduler")


@dataclass(slots=True)
class _Waiting:
    context: Context
    span: trace.Span | None = None


class PlaceSpans:
    """One `scheduler.place` span per try at placing. Holds nothing of requests that are over."""

    def __init__(self) -> None:
        self._waiting: dict[RequestId, _Waiting] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def queued(self, request_id: RequestId, context: Context) -> None:
        """Remember the context of a request's submit, unless it is known already."""
        self._waiting.setdefault(request_id, _Waiting(context))

    def context(self, request_id: RequestId) -> Context | None:
        waiting = self._waiting.get(request_id)
        return None if waiting is None else waiting.context

    def placing(self, request_id: RequestId) -> trace.Span:
        """The span of the try under way, begun if there is none."""
        waiting = self._waiting.get(request_id)
        if waiting is None:
            return trace.INVALID_SPAN
        if waiting.span is None:
            waiting.span = tracer.start_span("scheduler.place", context=waiting.context)
        return waiting.span

    def ended(self, effect: PlacingEnded) -> None:
        """The try is over: its span ends with the decision's attributes."""
        waiting = self._waiting.get(effect.request_id)
        if waiting is None:
            return
        # an adopted request was never tried here, but its placement belongs on the trace
        span = self.placing(effect.request_id)
        span.set_attribute(a.STATUS, effect.outcome)
        span.set_attributes(effect.attributes)
        span.end()
        waiting.span = None

    def sweep(self, still_waits: Callable[[RequestId], bool]) -> None:
        """Forget requests that will not be placed any more."""
        for request_id in [r for r in self._waiting if not still_waits(r)]:
            waiting = self._waiting.pop(request_id)
            if waiting.span is not None:
                waiting.span.end()
