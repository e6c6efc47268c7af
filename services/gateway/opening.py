"""Plans of one client request to what answers it: a session, or several that are answered as one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from opentelemetry import trace
from opentelemetry.trace import Span

from services.gateway.service import GatewayService, Origin
from shared.ingress.answer import Answered
from shared.ingress.error_body import as_baton_error
from shared.ingress.failed_span import end_failed
from shared.ingress.request_group import RequestGroup
from shared.ingress.request_plan import RequestPlan
from shared.ingress.session import Session
from shared.telemetry import attributes as a


async def open_plans(
    service: GatewayService,
    plans: Sequence[RequestPlan],
    key_hash: bytes,
    *,
    span: Span,
    arrived: float,
    origin: Callable[[int], Origin | None] = lambda number: None,
) -> Answered:
    """Admit and submit every plan, or none. Raises as `GatewayService.open` does, which then leaves `span` open.

    Several sessions have spans of their own below `span`, which ends here. `origin`: of each plan, by its number.
    """
    span.set_attributes({a.STREAM: plans[0].stream, a.MAX_TOKENS: plans[0].sampling.max_tokens})
    if len(plans) == 1:
        return await service.open(plans[0], key_hash, span=span, arrived=arrived, origin=origin(0))
    news = asyncio.Event()
    sessions: list[Session] = []
    context = trace.set_span_in_context(span)
    for number, plan in enumerate(plans):
        own = service.telemetry.tracer.start_span("gateway.request", context=context)
        try:
            session = await service.open(plan, key_hash, span=own, arrived=arrived, news=news, origin=origin(number))
            sessions.append(session)
        except BaseException as exc:
            end_failed(own, as_baton_error(exc))
            for session in sessions:
                session.cancel("another_prompt_failed")
            raise
    span.end()
    return RequestGroup(sessions, news)
