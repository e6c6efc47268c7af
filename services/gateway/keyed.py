"""Requests under an Idempotency-Key, from the routes' side: what they run, and what their clients are answered."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from types import MappingProxyType
from typing import Any

from fastapi import Request
from opentelemetry.context import Context
from opentelemetry.trace import Span
from starlette.responses import JSONResponse, Response

from services.gateway.answers import SessionResponse
from services.gateway.dialect import CHUNKS, Dialect
from services.gateway.keep_alive import kept_alive
from services.gateway.keyed_answer import KeyedAnswer
from services.gateway.keyed_run import Begun, KeyedRun
from services.gateway.once import Key, Once, idempotency_key, make_key
from services.gateway.opening import open_plans
from services.gateway.planning import PlansOf
from services.gateway.service import GatewayService
from shared.contracts import idempotency_messages as i
from shared.contracts import subjects
from shared.contracts.errors import InvalidInput
from shared.contracts.ids import TenantId
from shared.contracts.messages import Refusal
from shared.ingress.error_body import as_baton_error
from shared.ingress.failed_span import end_failed
from shared.ingress.request_plan import RequestPlan
from shared.telemetry import attributes as a

REPLAYED = "replayed"
"""On the trace of a request that another one's run answered."""


class Keyed:
    """Answers keyed requests of one gateway."""

    def __init__(self, service: GatewayService) -> None:
        self._service = service
        ingress = service.ingress
        self.once = Once(self._ask, self._write, ingress.config.ingress_id, service.config.keyed_linger_s)

    async def key_of(self, request: Request, tenant: TenantId, key_hash: bytes, body: bytes) -> Key | None:
        """The key of a request, if it has one. Raises InvalidInput naming the header."""
        if not idempotency_key(request.headers):
            return None
        return await asyncio.to_thread(make_key, tenant, key_hash, request.url.path, request.headers, body)

    async def generate(
        self,
        key: Key,
        plans_of: PlansOf,
        *,
        span: Span,
        arrived: float,
        headers: Mapping[str, str],
        dialect: Dialect = CHUNKS,
    ) -> Response:
        """The answer to a request for tokens. Raises as `Once.enter`; the caller ends `span` then."""
        plan = plans_of(0)[0]  # what is wrong with it is told before there is a record
        if key.place is not None and not plan.stream:
            raise InvalidInput("only a stream can be resumed", param="Last-Event-ID")
        unused = [span]

        async def begin(run: KeyedRun) -> Begun:
            first = bool(unused)
            own = unused.pop() if first else self._later_span(plan)
            began = arrived if first else time.monotonic()
            try:
                answered = await open_plans(
                    self._service,
                    plans_of(run.state.seed),
                    key.key_hash,
                    span=own,
                    arrived=began,
                    origin=run.origin,
                )
            except BaseException as exc:
                if not first:
                    end_failed(own, as_baton_error(exc))
                raise
            return Begun(SessionResponse(answered, {}, dialect), answered)

        entry = await self.once.enter(key, begin)
        assert entry.state is not None
        if unused:
            unused.clear()
            span.set_attributes({a.REQUEST_ID: entry.state.request_id, a.STATUS: "ok", a.REASON: REPLAYED})
            span.end()
        headers = {"x-request-id": entry.state.request_id, **headers}
        answer = KeyedAnswer(entry, key.place, headers)
        return kept_alive(answer, plan, self._service.config.keep_alive_s, headers)

    async def whole(
        self, key: Key, make: Callable[[str], Awaitable[Any]], headers: Mapping[str, str] = MappingProxyType({})
    ) -> Response:
        """The answer to a request that makes one thing: `await make(request id)` is its body. Raises what it raises."""
        if key.place is not None:
            raise InvalidInput("only a stream can be resumed", param="Last-Event-ID")

        async def begin(run: KeyedRun) -> Begun:
            return Begun(JSONResponse(await make(run.state.request_id)))

        return KeyedAnswer(await self.once.enter(key, begin), None, headers)

    def _later_span(self, plan: RequestPlan) -> Span:
        attributes: dict[str, str | bool] = {a.KIND: plan.kind, a.MODEL: plan.model, a.STREAM: plan.stream}
        return self._service.telemetry.tracer.start_span("gateway.request", context=Context(), attributes=attributes)

    async def _ask(self, claim: i.IdempotencyClaim) -> i.IdempotencyState:
        self._service.ingress.require_open()  # one that drains follows nobody
        reply_type = i.IdempotencyState | Refusal
        state: i.IdempotencyState = await self._service.ingress.ask_policy(
            subjects.POLICY_IDEMPOTENCY, claim, reply_type
        )
        return state

    async def _write(self, write: i.IdempotencyWrite) -> i.IdempotencyWritten:
        reply_type = i.IdempotencyWritten | Refusal
        written: i.IdempotencyWritten = await self._service.ingress.ask_policy(
            subjects.POLICY_IDEMPOTENCY, write, reply_type
        )
        return written
