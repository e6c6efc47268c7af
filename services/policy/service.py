"""Policy's shell: answers authenticate and admit, books settlements, keeps audit records. Fails closed: without Redis
every answer is Unavailable."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import msgspec
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import Span

from services.policy import admission, quota
from services.policy.accounts import Accounts
from services.policy.admission import Terms
from services.policy.ledger import plausible
from services.policy.metrics import PolicyMetrics
from services.policy.owners import Owner, Owners
from services.policy.records import Records
from services.policy.tenants import KeyRecord, default_output, effective_limits, identity
from shared.bus.bus import Bus, Delivery, Subscription
from shared.bus.streams import AUDIT_STREAM, SETTLE_STREAM, STREAMS
from shared.contracts import messages as m
from shared.contracts import subjects
from shared.contracts.errors import BatonError, Forbidden, Unauthenticated, Unavailable, from_wire, to_wire
from shared.contracts.grants import Grant, Limits
from shared.security.grant_signature import GrantSigner, GrantVerifier, by_id
from shared.telemetry import attributes as attr
from shared.telemetry.metrics import Metrics

log = logging.getLogger("baton.policy")
tracer = trace.get_tracer("baton.policy")

QUEUE = "policy"
MAX_AT_ONCE = 64
"""Questions decided at the same time; each holds one of the Redis client's connections."""
SLOT_LOOKS_S = (0.02, 0.06, 0.14, 0.28)
"""Pauses between looks for a free place among a tenant's requests at once: half a second altogether. A client that asks
again as soon as its answer is complete is ahead of that one's settlement."""
COUNTED_US = 10_000_000
"""A request that is only counted is let go of at once, and after so long where that failed."""
MAX_WAITING = 512
"""Questions that wait for a place at the same time; others are answered at once."""


@dataclass(frozen=True, slots=True)
class Defaults:
    """What holds for tenants without limits of their own."""

    limits: Limits
    max_tokens: int
    terms: Terms


class PolicyService:
    """One of any number of policy processes on the same Redis. `start`, then `stop`."""

    def __init__(
        self,
        bus: Bus,
        records: Records,
        accounts: Accounts,
        signer: GrantSigner,
        defaults: Defaults,
        metrics: Metrics | None = None,
    ) -> None:
        self._metrics = PolicyMetrics(metrics or Metrics("policy"))
        self._bus = bus
        self._records = records
        self._owners = Owners(records)
        self._accounts = accounts
        self._signer = signer
        self._verifier = GrantVerifier(by_id([signer.public_key]))
        self._defaults = defaults
        self._turns = asyncio.Semaphore(MAX_AT_ONCE)
        self._waiting = 0
        self._subscriptions: list[Subscription] = []

    async def start(self) -> None:
        """Serve and consume."""
        bus = self._bus
        audit = STREAMS[AUDIT_STREAM].subject
        self._subscriptions = [
            await bus.consume(AUDIT_STREAM, audit, m.AuditRecord, self.on_audit, durable="policy"),
            await bus.consume(SETTLE_STREAM, subjects.POLICY_SETTLE, m.Settle, self.on_settle, durable="policy"),
            await bus.serve(subjects.POLICY_AUTHENTICATE, m.Authenticate, self.authenticate, queue=QUEUE),
            await bus.serve(subjects.POLICY_ADMIT, m.Admit, self.admit, queue=QUEUE),
            await bus.serve(subjects.POLICY_ADMIT_TENANT, m.AdmitTenant, self.admit_tenant, queue=QUEUE),
        ]

    async def stop(self) -> None:
        """Take no new questions first, then finish the settlement in hand."""
        for subscription in reversed(self._subscriptions):
            await subscription.stop()
        self._subscriptions.clear()

    async def authenticate(self, delivery: Delivery) -> m.Identity | m.Refusal:
        """Whose key it is. Raises Unavailable when Redis does not answer."""
        try:
            async with self._turns:
                owner = await self._owners.read(delivery.message.key_hash)
                tenant, key = owner.tenant, owner.key
                found = identity(tenant, key, self._defaults.limits, self._defaults.max_tokens)
                if not found.has_rates:
                    return found
                used = await self._accounts.used(tenant.id, found.limits, asker=_asker(key))
                return msgspec.structs.replace(found, quota=used)
        except Unauthenticated as error:
            return m.Refusal(error=to_wire(error))

    async def admit(self, delivery: Delivery) -> m.Granted | m.Refusal:
        """Grant or refuse. Raises Unavailable when Redis does not answer, or when the asker has gone."""
        return await self._answered(delivery, self._decide)

    async def admit_tenant(self, delivery: Delivery) -> m.Granted | m.Refusal:
        """The same for batch work, which holds nothing: any number of times, with the same outcome."""
        return await self._answered(delivery, self._decide_for_tenant)

    async def _answered(
        self, delivery: Delivery, decide: Callable[[Any, Delivery, Span], Awaitable[m.Granted | m.Refusal]]
    ) -> m.Granted | m.Refusal:
        ask: m.Admit | m.AdmitTenant = delivery.message
        with _span_of(ask, delivery.context) as span:
            span.set_attributes({attr.REQUEST_ID: ask.request_id, attr.MODEL: ask.model})
            span.set_attributes({attr.PROMPT_TOKENS: ask.num_prompt_tokens, attr.MAX_TOKENS: ask.max_tokens})
            try:
                async with self._turns:
                    answer = await decide(ask, delivery, span)
                if _wants_a_place(answer) and self._waiting < MAX_WAITING:
                    answer = await self._with_a_place(answer, lambda: decide(ask, delivery, span))
            except Unavailable as error:
                self._metrics.answered(error.code)
                span.set_attributes({attr.STATUS: error.code, attr.REASON: error.param or "unavailable"})
                raise
            except BatonError as error:
                answer = _refused(span, error)
        self._metrics.answered("" if isinstance(answer, m.Granted) else from_wire(answer.error).code)
        return answer

    async def _with_a_place(
        self, answer: m.Granted | m.Refusal, decide: Callable[[], Awaitable[m.Granted | m.Refusal]]
    ) -> m.Granted | m.Refusal:
        """The first answer that is not for want of a place, or the last one."""
        self._waiting += 1
        try:
            for pause_s in SLOT_LOOKS_S:
                await asyncio.sleep(pause_s)
                async with self._turns:
                    answer = await decide()
                if not _wants_a_place(answer):
                    break
        finally:
            self._waiting -= 1
        return answer

    async def on_settle(self, delivery: Delivery) -> None:
        """Book one settlement; a repeated one changes nothing. Raises Unavailable: then it is delivered again."""
        settle: m.Settle = delivery.message
        with tracer.start_as_current_span("policy.settle", context=delivery.context) as span:
            span.set_attributes({attr.REQUEST_ID: settle.attempt.request_id, attr.EPOCH: settle.attempt.epoch})
            try:
                grant = self._settled_grant(settle)
            except Forbidden as error:
                # Delivering it again would not make it true.
                span.set_attributes({attr.STATUS: error.code, attr.REASON: error.message})
                self._metrics.settlement("dropped")
                log.error("settlement of %s dropped: %s", settle.attempt.request_id, error.message)
                return
            record = await self._records.tenant(grant.tenant)
            limits = grant.limits if record is None else effective_limits(record.limits, self._defaults.limits)
            booked = await self._accounts.settle(grant.tenant, limits, grant.reservation_id, settle)
            self._metrics.booked(grant.tenant, settle, again=not booked.replaced)
            span.set_attributes(
                {
                    attr.STATUS: "ok",
                    attr.REASON: "booked" if booked.replaced else "already_booked",
                    attr.TENANT: grant.tenant,
                    attr.FINISH: settle.finish,
                    attr.PROMPT_TOKENS: settle.prompt_tokens,
                    attr.COMPLETION_TOKENS: settle.completion_tokens,
                    attr.CACHED_TOKENS: settle.cached_tokens,
                    attr.RESERVED_TOKENS: _held(grant),
                }
            )

    async def on_audit(self, delivery: Delivery) -> None:
        """Keep one audit record."""
        record: m.AuditRecord = delivery.message
        if delivery.subject != subjects.audit(record.service):
            log.error("audit record of %s on %s dropped", record.service, delivery.subject)
            return
        name = f"{record.service}/{record.number}/{record.wall_time_s!r}"
        await self._records.keep_audit(name, msgspec.json.encode(record))

    async def _decide(self, ask: m.Admit, delivery: Delivery, span: Span) -> m.Granted | m.Refusal:
        _in_time(delivery)
        if ask.counts_only:
            return await self._count(ask, span)
        owner = self._owners.known(ask.key_hash)
        if owner is not None and (answer := await self._decide_as(owner, ask, delivery, span, again=True)) is not None:
            return answer
        owner = await self._owners.read(ask.key_hash)
        answer = await self._decide_as(owner, ask, delivery, span, again=False)
        assert answer is not None
        return answer

    async def _decide_as(
        self, owner: Owner, ask: m.Admit, delivery: Delivery, span: Span, *, again: bool
    ) -> m.Granted | m.Refusal | None:
        """Decide for this owner. `again`: its records are read again with the reservation, in one round trip to Redis.

        None when they have changed, or when by the old ones nothing would be reserved.
        """
        tenant, asker = owner.tenant, _asker(owner.key)
        limits = effective_limits(tenant.limits, self._defaults.limits)
        try:
            klass = admission.check(ask, tenant, limits)
        except BatonError:
            if again:
                return None
            raise
        span.set_attribute(attr.TENANT, tenant.id)
        terms, tokens, reservation = self._defaults.terms, admission.reserved_tokens(ask), str(ask.request_id)
        ttl_us = int((terms.budget_s[klass] + terms.margin_s) * 1e6)
        commands = self._owners.commands(ask.key_hash, owner) if again else ()
        read, (verdict, now_s, used) = await self._accounts.reserve_behind(
            commands, tenant.id, limits, reservation, tokens, ttl_us, ask.ingress_id, asker
        )
        if again and not owner.holds(read):
            if verdict.reason == quota.OK:
                await self._accounts.release(tenant.id, limits, reservation)
            return None
        if verdict.reason != quota.OK:
            error, never = admission.refusal(verdict, limits, asker)
            return msgspec.structs.replace(_refused(span, error, never), quota=used)
        try:
            _in_time(delivery)
        except Unavailable:
            # Nobody waits for this grant any more, so nobody would settle it.
            await self._accounts.release(tenant.id, limits, reservation)
            raise
        granted = self._granted(admission.make_grant(ask, tenant, limits, klass, now_s, terms), span)
        return msgspec.structs.replace(granted, quota=used)

    async def _count(self, ask: m.Admit, span: Span) -> m.Granted | m.Refusal:
        """Take one of the requests a minute, and none of the places of requests that run."""
        owner = await self._owners.read(ask.key_hash)
        tenant, asker = owner.tenant, _asker(owner.key)
        limits = effective_limits(tenant.limits, self._defaults.limits)
        klass = admission.check(ask, tenant, limits)
        span.set_attribute(attr.TENANT, tenant.id)
        no_place, reservation = msgspec.structs.replace(limits, max_parallel=0), str(ask.request_id)
        verdict, now_s, _ = await self._accounts.reserve(tenant.id, no_place, reservation, 0, COUNTED_US)
        if verdict.reason == quota.OK:
            await self._accounts.release(tenant.id, limits, reservation)
        used = await self._accounts.used(tenant.id, limits, asker=asker)
        if verdict.reason != quota.OK:
            error, never = admission.refusal(verdict, limits, asker)
            return msgspec.structs.replace(_refused(span, error, never), quota=used)
        granted = self._granted(admission.make_grant(ask, tenant, limits, klass, now_s, self._defaults.terms), span)
        return msgspec.structs.replace(granted, quota=used)

    async def _decide_for_tenant(self, ask: m.AdmitTenant, delivery: Delivery, span: Span) -> m.Granted | m.Refusal:
        _in_time(delivery)
        span.set_attribute(attr.TENANT, ask.tenant)
        tenant = await self._records.tenant(ask.tenant)
        if tenant is None or tenant.removed:
            raise Forbidden("there is no such tenant", param="tenant", code="unknown_tenant")
        limits = effective_limits(tenant.limits, self._defaults.limits)
        klass = admission.check(ask, tenant, limits)
        now_s = await self._accounts.now_s()
        granted = self._granted(admission.make_grant(ask, tenant, limits, klass, now_s, self._defaults.terms), span)
        return msgspec.structs.replace(granted, default_max_tokens=default_output(tenant, self._defaults.max_tokens))

    def _granted(self, grant: Grant, span: Span) -> m.Granted:
        span.set_attributes({attr.STATUS: "ok", attr.CLASS: grant.klass, attr.BUDGET_S: grant.budget_s})
        span.set_attribute(attr.RESERVED_TOKENS, _held(grant))
        return m.Granted(grant=self._signer.sign(grant))

    def _settled_grant(self, settle: m.Settle) -> Grant:
        """The grant of a settlement, expired or not. Raises Forbidden when it is not ours or of another request."""
        grant = self._verifier.verify_signature(settle.grant)
        if grant.request_id != settle.attempt.request_id:
            raise Forbidden("the grant is of another request", code="grant_invalid")
        if not plausible(settle):
            raise Forbidden("its numbers are out of range", code="settlement_invalid")
        return grant


def _span_of(ask: m.Admit | m.AdmitTenant, context: Context) -> AbstractContextManager[Span]:
    """None where a request is only counted: it has no trace that the span could be part of."""
    if isinstance(ask, m.Admit) and ask.counts_only:
        return nullcontext(trace.INVALID_SPAN)
    return tracer.start_as_current_span("policy.admit", context=context)


def _in_time(delivery: Delivery) -> None:
    if delivery.remaining_s() <= 0:
        raise Unavailable(f"{delivery.subject}: budget spent", param=delivery.subject)


def _asker(key: KeyRecord) -> quota.Asker:
    return quota.Asker(key.id, key.max_parallel)


def _wants_a_place(answer: m.Granted | m.Refusal) -> bool:
    return isinstance(answer, m.Refusal) and from_wire(answer.error).code == admission.ALL_TAKEN


def _held(grant: Grant) -> int:
    """Tokens kept back of the tenant's limit a minute."""
    return grant.reserved_tokens if grant.reservation_id else 0


def _refused(span: Span, error: BatonError, never: bool = False) -> m.Refusal:
    span.set_attributes({attr.STATUS: error.code, attr.REASON: error.param or error.code})
    return m.Refusal(error=to_wire(error), never=never)
