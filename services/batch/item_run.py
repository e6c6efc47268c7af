"""One item from its claim to its acknowledgement: claim → admit → run → result → settle → acknowledge.

Every step may be repeated after a crash: a claim raises the epoch, so that an earlier run's result and settlement are
refused or of no effect; a result is stored once, together with its settlement until that is published.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass

from opentelemetry import context as otel_context
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import Link, Span

from services.batch import item_results, item_rules
from services.batch.item_gate import RunGate
from services.batch.item_plan import plan_item
from services.batch.item_rules import Fail, Poison, Retry
from services.batch.records import Claim, ItemResult, Put
from services.batch.store import BatchStore
from shared.bus.bus import Bus, Redeliver
from shared.contracts import subjects
from shared.contracts.batch_messages import BatchItem
from shared.contracts.errors import BatonError, Cancelled, Unavailable
from shared.contracts.message import decode, encode
from shared.contracts.messages import AdmitTenant, Settle
from shared.ingress.answer import whole_answer
from shared.ingress.error_body import as_baton_error
from shared.ingress.failed_span import end_failed
from shared.ingress.ingress import Ingress
from shared.ingress.request_metrics import count_refused
from shared.ingress.session import Session, SessionHooks
from shared.ingress.settlement import publish_settlement, unbilled
from shared.telemetry import attributes as a

log = logging.getLogger("baton.batch")

STORE_PAUSE_S = 0.5
UNAVAILABLE_PAUSE_S = 2.0
HELD_PAUSE_S = 2.0
"""One that waits longer for capacity gives its slot up meanwhile, to another tenant or an item of another model."""
FENCED_PAUSE_S = 30.0
"""Another process has the item now; it says so to the queue more often than this."""

OnResult = Callable[[BatchItem, ItemResult, int], Awaitable[None]]
"""Hears of a result that was stored, and how many items of its batch have none yet."""


@dataclass(frozen=True, slots=True)
class RunTools:
    """What all runs of a process share."""

    bus: Bus
    store: BatchStore
    ingress: Ingress
    gate: RunGate
    rng: random.Random
    on_result: OnResult


class ItemRun:
    """One item taken from the queue."""

    def __init__(self, item: BatchItem, parent: Context, tools: RunTools) -> None:
        self.item = item
        self._tools = tools
        self._request_id = item_rules.request_id_of(item.tenant, item.batch_id, item.number, item.custom_id)
        link = trace.get_current_span(parent).get_span_context()
        self._links = [Link(link)] if link.is_valid else []
        self._ending = asyncio.Event()
        self._handing_back = False
        self._session: Session | None = None
        self._losses: list[asyncio.Task[int]] = []
        self._claim = Claim(status="", epoch=0)
        self._put: Put | None = None
        self._retry = Retry(0.0)
        self._tries = self._faults = 0

    # ------------------------------------------------------------------------------------------ from outside

    def hand_back(self) -> None:
        """The process stops: end the run without a result, and give the item back to the queue."""
        self._handing_back = True
        self.look_again()

    def look_again(self) -> None:
        """The batch is no longer in progress: end the run, and see what the store says of the item."""
        self._ending.set()
        if self._session is not None:
            self._end_session(self._session)

    def _end_session(self, session: Session) -> None:
        if self._handing_back:
            session.fail(self._tools.ingress.shutting_down())
        else:
            session.cancel("batch_ended")

    # ------------------------------------------------------------------------------------------ the item

    async def work(self) -> None:
        """Returns when the item needs nothing more. Raises Redeliver when somebody has to come back to it."""
        try:
            while not await self._turn():
                if self._retry.pause_s > HELD_PAUSE_S and not self._ending.is_set():
                    raise Redeliver(self._retry.pause_s)
                self._tries += 1
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._ending.wait(), self._retry.pause_s)
        except Unavailable as exc:
            raise Redeliver(UNAVAILABLE_PAUSE_S) from exc

    async def _turn(self) -> bool:
        """Claim and run once; False when that has to be done again."""
        if self._handing_back:
            raise Redeliver
        item, items = self.item, self._tools.store.items
        self._ending.clear()
        self._claim = await items.claim(item.tenant, item.batch_id, item.number)
        if self._claim.settle:  # of a result whose process died before it could publish it
            await publish_settlement(self._tools.bus, decode(self._claim.settle, Settle))
            await self._settled()
        if self._claim.body is None:
            return True
        self._retry = Retry(UNAVAILABLE_PAUSE_S)
        await self._try()
        if self._put is Put.FENCED:
            raise Redeliver(FENCED_PAUSE_S)
        return self._put is not None

    async def _try(self) -> None:
        losses = self._claim.lost
        if losses >= item_rules.POISON_LOSSES:
            await self._give_up(item_rules.poison(losses))
            return
        alone = item_rules.runs_alone(losses)
        async with self._tools.gate.entered(alone=alone):
            if not self._ending.is_set():
                await self._run(alone)

    async def _run(self, alone: bool) -> None:
        tracer = self._tools.ingress.telemetry.tracer
        span = tracer.start_span("batch.item", context=Context(), links=self._links)
        span.set_attributes({a.TENANT: self.item.tenant, a.BATCH_ID: self.item.batch_id})
        span.set_attribute(a.BATCH_ITEM, self.item.number)
        token = otel_context.attach(trace.set_span_in_context(span))
        try:
            session = await self._open(span, alone)
        except Exception as exc:
            if not isinstance(exc, BatonError):
                log.exception("item %d of %s could not be begun", self.item.number, self.item.batch_id)
            error = as_baton_error(exc)
            count_refused(self._tools.ingress.metrics, error)
            end_failed(span, error)
            await self._failed(error, None)
            return
        finally:
            otel_context.detach(token)
        self._session = session
        if self._ending.is_set():  # since
            self._end_session(session)
        await session.over.wait()
        self._session = None
        await self._after(session)

    async def _open(self, span: Span, alone: bool) -> Session:
        body, item, ingress = self._claim.body, self.item, self._tools.ingress
        assert body is not None
        arrived = time.monotonic()
        with ingress.telemetry.tracer.start_as_current_span("batch.tokenize") as tokenize:
            plan = await plan_item(ingress, item.tenant, self._request_id, body)
            tokenize.set_attribute(a.PROMPT_TOKENS, len(plan.prompt))
        span.set_attributes({a.KIND: plan.kind, a.MODEL: plan.model, a.MAX_TOKENS: plan.sampling.max_tokens})
        ask = AdmitTenant(
            request_id=self._request_id,
            tenant=item.tenant,
            model=plan.model,
            num_prompt_tokens=len(plan.prompt),
            max_tokens=plan.sampling.max_tokens,
            choices=plan.n,
            salt=plan.salt,
        )
        return await ingress.open(
            plan,
            subjects.POLICY_ADMIT_TENANT,
            ask,
            span=span,
            arrived=arrived,
            epoch=item_rules.first_epoch(self._claim.epoch),
            hooks=SessionHooks(self._before_settle, lambda died: self._on_died(died, alone)),
        )

    async def _after(self, session: Session) -> None:
        """The session is over: note losses, and that its settlement needs nobody any more."""
        await asyncio.gather(*self._losses, return_exceptions=True)
        self._losses.clear()
        if self._put is not Put.STORED:
            return
        if not session.booked.is_set():
            raise Redeliver(UNAVAILABLE_PAUSE_S)
        with suppress(Unavailable):  # published again at worst, which changes nothing
            await self._settled()

    # ------------------------------------------------------------------------------------------ its session

    async def _before_settle(self, session: Session, settle: Settle) -> Settle:
        """The result first. Billed is what a stored result shows, so that files and ledger agree."""
        try:
            body = await whole_answer(session)
        except BatonError as error:
            await self._failed(error, settle)
            return unbilled(settle)
        result = item_results.answered(self._custom_id, self._request_id, body, session.usage())
        await self._store(result, settle)
        return settle if self._put is Put.STORED else unbilled(settle)

    def _on_died(self, died: int, alone: bool) -> None:
        item = self.item
        written = self._tools.store.items.add_lost(item.tenant, item.batch_id, item.number)
        self._losses.append(asyncio.create_task(written))
        losses = self._claim.lost + died
        if self._session is not None and item_rules.ends_the_run(losses, alone):
            self._session.fail(Unavailable("the worker died while it ran this item", code="worker_died"))

    async def _failed(self, error: BatonError, settle: Settle | None) -> None:
        """Judge a run that failed, and store the result if it is to have one."""
        item, booked = self.item, None if settle is None else unbilled(settle)
        if self._ending.is_set() and isinstance(error, Cancelled | Unavailable):
            return
        losses = self._claim.lost + len(self._losses)
        chance = self._tools.rng.random()
        verdict = item_rules.judge(error, losses=losses, tries=self._tries, faults=self._faults, chance=chance)
        self._faults = self._faults + 1 if item_rules.is_fault(error) else 0
        if isinstance(verdict, Retry):
            log.info("item %d of %s again in %.1f s: %s", item.number, item.batch_id, verdict.pause_s, error.code)
            self._retry = verdict
        elif isinstance(verdict, Fail):
            await self._store(item_results.failed(self._custom_id, self._request_id, verdict.error), booked)
        else:
            await self._give_up(verdict, booked)

    # ------------------------------------------------------------------------------------------ its result

    @property
    def _custom_id(self) -> str:
        assert self._claim.body is not None
        return self._claim.body.custom_id

    async def _give_up(self, poison: Poison, settle: Settle | None = None) -> None:
        item, code = self.item, item_results.POISON_CODE
        await self._store(item_results.poisoned(self._custom_id, self._request_id, poison), settle)
        if self._put is Put.STORED:
            log.warning("item %d of %s is given up: %s", item.number, item.batch_id, poison.reason)
            with suppress(Unavailable):
                await self._tools.store.items.add_dead_letter(
                    item.tenant, item.batch_id, item.number, self._custom_id, code, poison.reason
                )

    async def _store(self, result: ItemResult, settle: Settle | None) -> None:
        """Store the result however long that takes: it costs more to make than to keep. Raises Unavailable only when
        the process stops."""
        item, items = self.item, self._tools.store.items
        encoded = b"" if settle is None else encode(settle)
        in_doubt = False
        while True:
            try:
                self._put, left = await items.put_result(
                    item.tenant, item.batch_id, item.number, result, epoch=self._claim.epoch, settle=encoded
                )
                if in_doubt and settle is not None and await self._is_ours(settle):
                    self._put = Put.STORED
                break
            except Unavailable:
                if self._handing_back:
                    raise
                in_doubt = True
                await asyncio.sleep(STORE_PAUSE_S)
        if self._put is Put.STORED:
            await self._tools.on_result(item, result, left)

    async def _is_ours(self, settle: Settle) -> bool:
        """An earlier try may have been stored though its answer was lost: then our own settlement waits there."""
        if self._put not in (Put.EXISTS, Put.ENDED):
            return False
        found = (await self._tools.store.items.claim(self.item.tenant, self.item.batch_id, self.item.number)).settle
        return bool(found) and decode(found, Settle).attempt == settle.attempt

    async def _settled(self) -> None:
        item = self.item
        await self._tools.store.items.settled(item.tenant, item.batch_id, item.number)
