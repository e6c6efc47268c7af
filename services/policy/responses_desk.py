"""Answers `policy.responses`: stored responses, as the desk of idempotency records does, and by their ids."""

from __future__ import annotations

from typing import Any

import msgspec

from services.policy.idempotency_desk import QUEUE, IdempotencyDesk
from services.policy.ingress_watch import IngressWatch
from services.policy.records import Records
from services.policy.responses import ResponseRecords
from services.policy.tenants import check_key
from shared.bus.bus import Bus, Delivery
from shared.contracts import idempotency_messages as i
from shared.contracts import response_messages as r
from shared.contracts import subjects
from shared.contracts.errors import BatonError, Unavailable, to_wire
from shared.contracts.ids import TenantId
from shared.contracts.messages import Refusal

_ById = r.ResponseFind | r.ResponseCancel | r.ResponseDelete
_ASKED = i.IdempotencyClaim | i.IdempotencyWrite | r.ResponseInput | _ById


class ResponsesDesk(IdempotencyDesk):
    """One of any number on the same Redis. `start`, then `stop`."""

    def __init__(self, bus: Bus, records: Records, kept: ResponseRecords, watch: IngressWatch) -> None:
        super().__init__(bus, records, kept, watch)
        self._responses = kept

    async def start(self) -> None:
        """Serve. Beats of ingresses are the other desk's to hear."""
        self._subscriptions = [await self._bus.serve(subjects.POLICY_RESPONSES, _ASKED, self.answer, queue=QUEUE)]

    async def answer(self, delivery: Delivery) -> Any:
        """Raises Unavailable when Redis does not answer."""
        ask = delivery.message
        if isinstance(ask, i.IdempotencyClaim | i.IdempotencyWrite):
            return await super().answer(delivery)
        try:
            if isinstance(ask, r.ResponseInput):
                async with self._turns:
                    return await self._responses.keep_input(ask)
            return await self._by_id(ask)
        except Unavailable:
            raise
        except BatonError as error:
            return Refusal(error=to_wire(error))

    async def _by_id(self, ask: _ById) -> Any:
        async with self._turns:
            tenant: TenantId = check_key(ask.key_hash, await self._records.key(ask.key_hash)).tenant
            if isinstance(ask, r.ResponseCancel):
                return await self._responses.cancel(tenant, ask.request_id)
            if isinstance(ask, r.ResponseDelete):
                return await self._responses.delete(tenant, ask.request_id)
            found, owner = await self._responses.find(tenant, ask)
        if found.outcome == i.RUNNING and await self._lost(owner):
            return msgspec.structs.replace(found, outcome=i.OPEN)
        return found
