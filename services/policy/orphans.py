"""Responses in the background whose gateway is gone: another is asked to go on with them."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import NamedTuple

from services.policy.ingress_watch import IngressWatch
from services.policy.records import Records
from services.policy.responses import BackgroundRun, ResponseRecords
from shared.bus.bus import NO_RESPONDERS, Bus
from shared.contracts import response_messages as r
from shared.contracts import subjects
from shared.contracts.errors import BatonError, Forbidden, from_wire
from shared.contracts.ids import RequestId
from shared.contracts.messages import Refusal

log = logging.getLogger("baton.policy")

ASK_S = 5.0
AGAIN_S, MOST_AGAIN_S = 10.0, 600.0
"""One that a gateway could not take is offered again after so long, then after twice that, and so on up to the second:
each time is one of the few it has."""
MAX_AT_ONCE = 8


class _Offered(NamedTuple):
    """When last, and how often in a row nobody took it."""

    at_s: float
    refusals: int


_NEVER = _Offered(float("-inf"), 0)


def pause_s(refusals: int) -> float:
    """Seconds until one is offered again that was refused so often in a row. Pure."""
    return min(MOST_AGAIN_S, AGAIN_S * 2.0 ** max(0, min(refusals, 16) - 1))


class Orphans:
    """Looks after them. Several processes may do the same: whoever claims a response first runs it."""

    def __init__(
        self,
        bus: Bus,
        records: Records,
        kept: ResponseRecords,
        watch: IngressWatch,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._bus = bus
        self._records = records
        self._kept = kept
        self._watch = watch
        self._clock = clock
        self._offered: dict[RequestId, _Offered] = {}

    async def sweep(self) -> None:
        """Offer those that nobody runs. Raises Unavailable when Redis does not answer; call again then."""
        now, found = self._clock(), await self._kept.in_background()
        self._offered = {run.request_id: at for run in found if (at := self._offered.get(run.request_id))}
        # those that wait longest first, so that many that nobody can take leave others their turn
        runs = sorted((run for run in found if self._is_free(run, now)), key=self._offered_s)[:MAX_AT_ONCE]
        self._offered |= {run.request_id: _Offered(now, self._refusals(run)) for run in runs}
        await asyncio.gather(*map(self._offer, runs))

    def _is_free(self, run: BackgroundRun, now: float) -> bool:
        if now - self._offered_s(run) < pause_s(self._refusals(run)):
            return False
        if run.owner is None:
            return True
        self._watch.heard_of(run.owner, now)  # it may have died before this process began
        return self._watch.lost(run.owner, now)

    def _offered_s(self, run: BackgroundRun) -> float:
        return self._offered.get(run.request_id, _NEVER).at_s

    def _refusals(self, run: BackgroundRun) -> int:
        return self._offered.get(run.request_id, _NEVER).refusals

    async def _offer(self, run: BackgroundRun) -> None:
        try:
            ask = await self._asked(run)
            reply = await self._bus.request(subjects.RESPONSES_ADOPT, ask, r.ResponseAdopted | Refusal, timeout_s=ASK_S)
            if isinstance(reply, Refusal):
                raise from_wire(reply.error)
            self._offered[run.request_id] = _Offered(self._offered_s(run), 0)
        except BatonError as error:
            if error.code == NO_RESPONDERS:
                del self._offered[run.request_id]  # there is no gateway: nobody has tried
            else:
                self._offered[run.request_id] = _Offered(self._offered_s(run), self._refusals(run) + 1)
            log.warning("response of request %s is not gone on with yet: %s", run.request_id, error.message)

    async def _asked(self, run: BackgroundRun) -> r.ResponseAdopt:
        """What a gateway is asked: to go on with it, or to end it when its key was revoked.

        Raises Forbidden while its tenant has no key: nobody could look at it either.
        """
        key = await self._records.key(run.key_hash)
        if key is not None and not key.revoked:
            return r.ResponseAdopt(key_hash=run.key_hash, request_id=run.request_id)
        living = (key for key in await self._records.keys() if key.tenant == run.tenant and not key.revoked)
        if (other := next(living, None)) is None:
            raise Forbidden("its tenant has no key")
        return r.ResponseAdopt(key_hash=bytes.fromhex(other.hash), request_id=run.request_id, revoked=True)
