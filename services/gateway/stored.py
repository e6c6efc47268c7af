"""Stored responses at this gateway: run here, gone on with where their gateway is gone, or followed elsewhere."""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import Span
from starlette.responses import JSONResponse, Response

from services.gateway.dialect import ResponsesDialect
from services.gateway.event_log import Place
from services.gateway.keep_alive import kept_alive
from services.gateway.keyed import REPLAYED, Keyed
from services.gateway.keyed_answer import KeyedAnswer
from services.gateway.keyed_run import Begun, KeyedRun, Write
from services.gateway.once import Entry, Key, Once
from services.gateway.opening import open_plans
from services.gateway.planning import PlansOf, tokenized
from services.gateway.response_store import ResponseStore
from services.gateway.service import GatewayService, Origin
from services.gateway.stored_answer import StoredAnswer
from services.gateway.stored_request import StoredRequest, make_stored, no_previous, request_id_of
from services.gateway.stored_response import EndedResponse, StoredResponse
from services.gateway.stored_run import StoredRun, first_event
from shared.bus.bus import Bus, Delivery, Subscription
from shared.contracts import idempotency_messages as i
from shared.contracts import response_messages as r
from shared.contracts import subjects
from shared.contracts.errors import (
    BatonError,
    Internal,
    InvalidInput,
    NotFound,
    Overloaded,
    QuotaExceeded,
    Unauthenticated,
    Unavailable,
    to_wire,
)
from shared.contracts.ids import IngressId, TenantId
from shared.contracts.messages import Identity, Refusal
from shared.contracts.tokens import unpack_tokens
from shared.ingress.answer import told_tier
from shared.ingress.error_body import as_baton_error
from shared.ingress.failed_span import end_failed
from shared.ingress.openai_schema import GenerationRequest
from shared.ingress.request_plan import RequestPlan
from shared.ingress.responses_body import ResponseWriter
from shared.ingress.responses_request import ParsedResponses, chat_of, items_of, parse_responses
from shared.telemetry import attributes as a

MAX_RUNS = 30
"""A response that was begun so often and did not end, as its gateways died, is not run again."""
QUEUE = "gateway"
_NO_PLACE = Place(0, 0)
_ENDED_WELL = ("completed", "incomplete")


@dataclass(frozen=True, slots=True)
class Asker:
    """Who asks, and the request's own trace."""

    tenant: TenantId
    key_hash: bytes
    span: Span
    arrived: float


class Stored:
    """All of one gateway."""

    def __init__(self, service: GatewayService, keyed: Keyed) -> None:
        self._service = service
        self._keyed = keyed
        self.store = ResponseStore(service)
        self.once = Once(self._ask, self.store.ask, service.ingress.config.ingress_id, 0.0, self._make_run)

    def wanted(self, dialect: ResponsesDialect) -> bool:
        """Shall the response be stored? Raises InvalidInput when it would have to be and nothing is stored here."""
        asked, rule = dialect.asked, self._service.config.store_responses
        if rule == "never" and (asked.store or asked.background):
            param = "store" if asked.store else "background"
            raise InvalidInput(f"{param}: this server stores no responses", param=param)
        by_default = rule == "always" or bool(asked.background)
        return rule != "never" and (by_default if asked.store is None else asked.store)

    async def continued(
        self, dialect: ResponsesDialect, key_hash: bytes, parsed: GenerationRequest
    ) -> tuple[GenerationRequest, ResponsesDialect]:
        """The request with what came before it, if it names that. Raises InvalidInput."""
        given = dialect.asked.previous_response_id
        if given is None:
            return parsed, dialect
        request_id = request_id_of(given)
        if request_id is None:
            raise no_previous(given)
        try:
            kept = await self.store.look(key_hash, request_id)
            before = await self.store.request(key_hash, request_id) if kept.final is not None else None
        except NotFound as exc:
            raise no_previous(given) from exc
        if kept.final is None or before is None or kept.final["status"] not in _ENDED_WELL:
            message = "only a response that is completed or incomplete can be gone on from"
            raise InvalidInput(message, param="previous_response_id", code="previous_response_not_ended")
        return await asyncio.to_thread(_joined, dialect, [*before.items, *kept.final["output"]])

    # ------------------------------------------------------------------------------------------ creating

    async def create(
        self, dialect: ResponsesDialect, plans_of: PlansOf, asker: Asker, key: Key | None, headers: Mapping[str, str]
    ) -> Response:
        """The answer to a request whose response is stored. Raises as `Once.enter`; the caller ends the span then."""
        plan = plans_of(0)[0]  # what is wrong with it is told before there is a record
        if key is not None:
            return await self._create_keyed(dialect, plans_of, plan, asker, key, headers)
        name = secrets.token_bytes(32)
        entry = await self._begin(dialect, plans_of, plan, asker, Key(asker.tenant, asker.key_hash, name, b""))
        return self._answer(entry, dialect, plan, headers)

    async def _create_keyed(
        self,
        dialect: ResponsesDialect,
        plans_of: PlansOf,
        plan: RequestPlan,
        asker: Asker,
        key: Key,
        headers: Mapping[str, str],
    ) -> Response:
        """The same request under the same Idempotency-Key is the same response: the key's run reads the response's."""
        if key.place is not None and not plan.stream:
            raise InvalidInput("only a stream can be resumed", param="Last-Event-ID")
        unused = [asker.span]

        async def begin(run: KeyedRun) -> Begun:
            keyed = run.state.request_id
            name = hashlib.sha256(f"response\n{keyed}".encode()).digest()
            first = bool(unused)
            if first:
                own = replace(asker, span=unused.pop())
            else:
                own = self._later(asker.tenant, asker.key_hash, plan.model, stream=plan.stream)
            try:
                response = Key(own.tenant, own.key_hash, name, b"", keyed=keyed)
                entry = await self._begin(dialect, plans_of, plan, own, response, run.state.committed)
            except BaseException as exc:
                if not first:
                    end_failed(own.span, as_baton_error(exc))
                raise
            answer = self._answer(entry, dialect, plan, {})
            return Begun(answer, entry.run.session if isinstance(entry.run, StoredRun) else None)

        entry = await self._keyed.once.enter(key, begin)
        assert entry.state is not None
        if unused:
            _end_replayed(asker.span, entry)
        headers = {"x-request-id": entry.state.request_id, **headers}
        answer = KeyedAnswer(entry, key.place, headers)
        return kept_alive(answer, plan, self._service.config.keep_alive_s, headers)

    async def _begin(
        self,
        dialect: ResponsesDialect,
        plans_of: PlansOf,
        plan: RequestPlan,
        asker: Asker,
        key: Key,
        committed: bytes = b"",
    ) -> Entry:
        """The entry of a new response, to which the caller is attached."""
        unused = [asker.span]

        async def begin(run: KeyedRun) -> Begun:
            assert isinstance(run, StoredRun)
            queued = _writer(dialect, plan, run.state).now("queued")
            run.request, run.key_hash = make_stored(dialect.asked, dialect.items, key.name, queued), asker.key_hash
            if run.goes_on_alone:
                await run.keep_input()
            unused.clear()
            return await self._open(dialect, plans_of, asker, run, committed)

        entry = await self.once.enter(key, begin)
        if unused:
            _end_replayed(asker.span, entry)
        return entry

    async def _open(
        self, dialect: ResponsesDialect, plans_of: PlansOf, asker: Asker, run: StoredRun, committed: bytes = b""
    ) -> Begun:
        def origin(number: int) -> Origin:
            found = run.origin(number)
            return found if found.committed else replace(found, committed=tuple(unpack_tokens(committed)))

        plans = plans_of(run.state.seed)
        session = await open_plans(
            self._service, plans, asker.key_hash, span=asker.span, arrived=asker.arrived, origin=origin
        )
        tier = told_tier(session).get("service_tier", "")
        writer = _writer(dialect, plans[0], run.state, tier)
        answer = StoredResponse(session, writer, stream=plans[0].stream, background=run.goes_on_alone)
        return Begun(answer, session)

    def _answer(
        self, entry: Entry, dialect: ResponsesDialect, plan: RequestPlan, headers: Mapping[str, str]
    ) -> Response:
        assert entry.state is not None
        headers = {"x-request-id": entry.state.request_id, **headers}
        if dialect.asked.background and not plan.stream:
            entry.detach()
            return JSONResponse(_writer(dialect, plan, entry.state).now("queued"), headers=dict(headers))
        answer = StoredAnswer(entry, headers)
        return kept_alive(answer, plan, self._service.config.keep_alive_s, headers)

    def _later(self, tenant: TenantId, key_hash: bytes, model: str, *, stream: bool) -> Asker:
        attributes: dict[str, str | bool] = {a.KIND: "responses", a.TENANT: tenant, a.MODEL: model, a.STREAM: stream}
        span = self._service.telemetry.tracer.start_span("gateway.request", context=Context(), attributes=attributes)
        return Asker(tenant, key_hash, span, time.monotonic())

    # ------------------------------------------------------------------------------------------ going on

    async def follow(
        self,
        identity: Identity,
        key_hash: bytes,
        request: StoredRequest,
        *,
        cancelled: bool = False,
        refused: BatonError | None = None,
    ) -> Entry:
        """The entry of a response that is there, to which the caller is attached. Where nobody runs it and it has not
        ended, it is gone on with here; it ends if it was `cancelled` or may not be gone on with, which `refused` says.

        Raises NotFound when it was deleted, Unavailable.
        """
        key = Key(identity.tenant, key_hash, request.name, b"", _NO_PLACE)

        async def begin(run: KeyedRun) -> Begun:
            assert isinstance(run, StoredRun)
            run.request = request
            try:
                if cancelled or refused is not None:
                    return _ended(run, None if cancelled else refused)
                if run.state.run > MAX_RUNS:
                    raise Internal("the response was begun too often")
                return await self._again(identity, key_hash, run)
            except (Unavailable, Overloaded, QuotaExceeded):
                raise  # later
            except BatonError as error:
                return _ended(run, error)

        return await self.once.enter(key, begin)

    async def serve(self, bus: Bus) -> Subscription:
        """Go on with what policy offers, until the subscription is stopped."""
        return await bus.serve(subjects.RESPONSES_ADOPT, r.ResponseAdopt, self._adopt, queue=QUEUE)

    async def _adopt(self, delivery: Delivery) -> r.ResponseAdopted | Refusal:
        ask: r.ResponseAdopt = delivery.message
        try:
            self._service.ingress.require_open()
            identity = await self._service.authenticate(ask.key_hash)
            kept = await self.store.look(ask.key_hash, ask.request_id)
            request = await self.store.request(ask.key_hash, ask.request_id)
            if kept.found.outcome == i.OPEN and request is not None:
                refused = Unauthenticated("the API key it was asked for with was revoked") if ask.revoked else None
                cancelled = kept.found.cancelled
                entry = await self.follow(identity, ask.key_hash, request, cancelled=cancelled, refused=refused)
                entry.detach()
        except BatonError as error:
            return Refusal(error=to_wire(error))
        return r.ResponseAdopted()

    async def _again(self, identity: Identity, key_hash: bytes, run: StoredRun) -> Begun:
        assert run.request is not None
        models, body = self._service.models, run.request.body()
        parsed: ParsedResponses = await models.parse(parse_responses, body)
        model = models.get(parsed.chat.model, identity.models)
        dialect = ResponsesDialect(parsed.asked, parsed.items)
        asker = self._later(identity.tenant, key_hash, model.name, stream=run.request.stream)
        try:
            with trace.use_span(asker.span, end_on_exit=False, record_exception=False, set_status_on_exception=False):
                plans_of = await tokenized(self._service, parsed.chat, model, identity, dialect)
                return await self._open(dialect, plans_of, asker, run)
        except BaseException as exc:
            end_failed(asker.span, as_baton_error(exc))
            raise

    async def _ask(self, claim: i.IdempotencyClaim) -> i.IdempotencyState:
        self._service.ingress.require_open()  # one that drains follows nobody
        state: i.IdempotencyState = await self.store.ask(claim)
        return state

    def _make_run(self, write: Write, tenant: TenantId, ingress: IngressId, state: i.IdempotencyState) -> StoredRun:
        return StoredRun(write, self.store.ask, tenant, ingress, state)


def _end_replayed(span: Span, entry: Entry) -> None:
    assert entry.state is not None
    span.set_attributes({a.REQUEST_ID: entry.state.request_id, a.STATUS: "ok", a.REASON: REPLAYED})
    span.end()


def _writer(dialect: ResponsesDialect, plan: RequestPlan, state: i.IdempotencyState, tier: str = "") -> ResponseWriter:
    return ResponseWriter(dialect.asked, plan, state.request_id, state.created_s, tier, first_event(state.run))


def _ended(run: StoredRun, error: BatonError | None) -> Begun:
    assert run.request is not None
    request = run.request
    return Begun(EndedResponse(request.response, error, stream=request.stream, first_event=first_event(run.state.run)))


def _joined(
    dialect: ResponsesDialect, before: Sequence[Mapping[str, Any]]
) -> tuple[GenerationRequest, ResponsesDialect]:
    try:
        items = (*items_of(before), *dialect.items)
    except InvalidInput as exc:  # such as a call that is not whole
        message = f"the response cannot be gone on from: {exc.message}"
        raise InvalidInput(message, param="previous_response_id") from exc
    return chat_of(dialect.asked, items), replace(dialect, items=items)
