"""A stored response while this gateway runs it.

One that its client waits for is kept at its end, if it comes to one. One in the background is kept as it goes, with
what it is made from, so that another gateway can go on with it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from services.gateway.event_log import EventLog, make_parts
from services.gateway.keyed_run import PARTS_AT_ONCE, Begun, KeyedRun, Write
from services.gateway.stored_request import StoredRequest, pack
from services.gateway.stored_response import CANCELLED, StoredResponse
from shared.contracts import idempotency_messages as i
from shared.contracts import response_messages as r
from shared.contracts.errors import Conflict, Internal
from shared.contracts.ids import IngressId, TenantId
from shared.ingress.session import Session

EVENTS_A_RUN = 1_000_000
"""Events of a run are numbered from its own multiple of it: a number says whose it is."""
DELETED = "deleted"

KeepInput = Callable[[r.ResponseInput], Awaitable[r.ResponseChanged]]


def first_event(run: int) -> int:
    """The number of a run's first event."""
    return (run - 1) * EVENTS_A_RUN


class StoredRun(KeyedRun):
    """One run of a stored response's record; `request` and `key_hash`, of the API key, are set before it begins.

    Args:
        write, keep_input: bring news to policy. Both raise Unavailable.
    """

    def __init__(
        self, write: Write, keep_input: KeepInput, tenant: TenantId, ingress: IngressId, state: i.IdempotencyState
    ) -> None:
        super().__init__(write, tenant, ingress, state)
        self.request: StoredRequest | None = None
        self.key_hash = b""
        self._keep_parts = keep_input

    @property
    def goes_on_alone(self) -> bool:
        """Without its clients."""
        return self.request is not None and self.request.background

    @property
    def session(self) -> Session | None:
        """What is cancelled when its client leaves; none of one that needs no client."""
        session = self._begun.session if self._begun is not None else None
        return session if isinstance(session, Session) and not self.goes_on_alone else None

    async def keep_input(self) -> None:
        """Keep what it is made from. Safe to repeat. Raises Conflict when the record is another run's, or gone."""
        assert self.request is not None
        parts = pack(self.request)
        for first in range(0, len(parts), PARTS_AT_ONCE):
            news = r.ResponseInput(
                tenant=self._tenant,
                request_id=self.state.request_id,
                ingress_id=self._ingress,
                run=self.state.run,
                first_part=first,
                parts=tuple(parts[first : first + PARTS_AT_ONCE]),
                key_hash=self.key_hash if self.goes_on_alone else b"",
            )
            if not (await self._keep_parts(news)).held:
                raise Conflict("the response is another run's, or was deleted", code="superseded")

    async def release(self, error: BaseException | None = None) -> None:
        """It could not begin, or not go on."""
        stays = self.goes_on_alone and (self.state.run > 1 or self._begun is not None)
        await self._let_go(i.OPEN if stays else i.REFUSED)

    async def work(self, begun: Begun) -> None:
        """Returns when the answer is complete and kept, or has failed."""
        if not isinstance(begun.response, StoredResponse):
            raise Internal("a stored response has another's answer")
        self._answer = begun.response
        try:
            await super().work(begun)
        except Exception:
            self._end("superseded")  # what could not be answered is not run on
            raise

    def cancel(self) -> None:
        """No client waits for it any more, which is nothing to one in the background."""
        if not self.goes_on_alone:
            super().cancel()

    async def _keep(self) -> None:
        if self.goes_on_alone:
            await super()._keep()

    def _collect(self) -> bool:
        if self.log.complete:
            return False
        self._collect_events()
        return True  # it may hear that it shall end

    async def _complete(self, state: str) -> bool:
        if state == i.DONE:  # one in the background has it, unless Redis lost it
            try:
                await self.keep_input()
            except Conflict as exc:
                if exc.code == i.RECORD_GAP:
                    raise
                # else deleted since: the write below tells
        return await super()._complete(state)

    async def _mend(self) -> None:
        if self.goes_on_alone:
            await self.keep_input()
        await super()._mend()

    def _last_state(self) -> str:
        if self._answer.final is not None:
            return i.DONE
        return i.OPEN if self._answer.goes_on else i.REFUSED

    def _last_parts(self, events: list[bytes]) -> list[bytes]:
        if self.log.stream and self.goes_on_alone:
            return super()._last_parts(events)
        whole = EventLog(self.state.run)
        whole.begin(200, stream=False)
        return make_parts(whole, 0, [self._answer.final or b""], last=True)

    def _heard(self, written: i.IdempotencyWritten) -> None:
        if written.gone:
            self._end(DELETED)
        elif written.cancel:
            self._end(CANCELLED)
