"""A request under an Idempotency-Key while this gateway runs it: its answer goes into a log, which clients read and
policy keeps. The record is complete before any client has the end, and before the request is settled."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from starlette.types import ASGIApp, Message

from services.gateway.chunks import error_frame
from services.gateway.event_log import FRAME_END, EventLog, make_parts
from services.gateway.service import Origin
from shared.contracts import idempotency_messages as i
from shared.contracts.errors import BatonError, Conflict, Forbidden, Internal, InvalidInput, QuotaExceeded
from shared.contracts.ids import Epoch, IngressId, RequestId, TenantId
from shared.contracts.messages import Settle
from shared.contracts.tokens import pack_tokens, unpack_tokens
from shared.ingress.answer import Answered
from shared.ingress.error_body import error_body
from shared.ingress.session import Session, SessionHooks

log = logging.getLogger("baton.gateway")

EPOCHS_A_RUN = 1024
"""A run loses far fewer workers; so its epochs lie above those of every run before it."""
KEEP_S = 0.5
"""The record is brought up to date so often."""
LATE_PAUSE_S, LATE_TRIES = 2.0, 60
"""A record that could not be completed is tried again behind the client's back."""
PARTS_AT_ONCE = 8
"""Most parts in one message."""
REFUSALS = (InvalidInput, Forbidden, QuotaExceeded)
"""Told before anything is begun; of other errors that cannot be known."""
MAX_LOG_BYTES = 8 * 1024 * 1024
"""A longer answer is not kept; a retry runs it again."""

Write = Callable[[i.IdempotencyWrite], Awaitable[i.IdempotencyWritten]]


@dataclass(frozen=True, slots=True)
class Begun:
    """What a keyed request is answered with; `session` where tokens are made."""

    response: ASGIApp
    session: Answered | None = None


class KeyedRun:
    """One run of a record.

    Args:
        write: brings news to policy. Raises Unavailable.
    """

    def __init__(self, write: Write, tenant: TenantId, ingress: IngressId, state: i.IdempotencyState) -> None:
        self.log = EventLog(state.run)
        self.state = state
        self._write = write
        self._tenant = tenant
        self._ingress = ingress
        self._begun: Begun | None = None
        self._pending: list[bytes] = []  # parts that policy has not confirmed, always the same ones
        self._written = 0
        self._cuts = [0]  # numbers of events at which parts were made, so that the same can be made again
        self._last: list[bytes] = []
        self._kept_tokens = 0
        self._size = 0
        self._body = b""
        self._fenced = False  # it may write no more
        self._gone = False  # nor may anybody else: the record was deleted, or lost
        self._later_prompts = False  # those before them may have been submitted
        self._closing = False  # the last parts are made
        self._closed = asyncio.Event()
        self._putting = asyncio.Lock()
        self._late: asyncio.Task[None] | None = None

    @property
    def goes_on_alone(self) -> bool:
        """Without its clients."""
        return False

    def origin(self, number: int) -> Origin:
        """What the session of the request's prompt `number` begins with."""
        state = self.state
        request_id = state.request_id
        if number:
            self._later_prompts = True
            digest = hashlib.blake2b(f"{request_id}/{number}".encode(), digest_size=16)
            request_id = RequestId(f"req-{digest.hexdigest()}")
        hooks = SessionHooks(self._before_settle, lambda died: None)
        epoch = Epoch((state.run - 1) * EPOCHS_A_RUN + 1)
        return Origin(request_id, epoch, hooks, () if number else tuple(unpack_tokens(state.committed)))

    def cancel(self) -> None:
        """No client waits for it any more."""
        self._end("client_gone")

    async def release(self, error: BaseException | None = None) -> None:
        """It could not begin, or not go on: whoever comes next may try. `error`: what it could not begin for."""
        refused = isinstance(error, REFUSALS) and not self._later_prompts
        await self._let_go(i.REFUSED if refused else i.OPEN)

    async def kept(self) -> None:
        """Returns when the record is complete, or will never be."""
        if self._late is not None:
            await self._late

    async def work(self, begun: Begun) -> None:
        """Returns when the answer is complete and kept, or has failed."""
        self._begun = begun
        keeping = asyncio.create_task(self._keep())
        try:
            await begun.response({"type": "http"}, _for_ever, self._send)
            if not self.log.complete:
                raise Internal("an answer has no end")
        except Exception:
            self.cancel()
            await self.release()
            raise
        finally:
            keeping.cancel()

    # ------------------------------------------------------------------------------------------ the answer

    async def _send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = {k.decode("latin-1"): v.decode("latin-1") for k, v in message.get("headers", ())}
            stream = headers.get("content-type", "").startswith("text/event-stream")
            self.log.begin(message["status"], stream=stream, headers=headers)
            return
        self._body += message.get("body", b"")
        last = not message.get("more_body", False)
        events = self._events_of(last)
        if not last:
            self.log.extend(events)
            return
        if not await self._close(events):
            events = [self._taken_over()]
        if not self.log.complete:
            self.log.extend(events, last=True)

    def _taken_over(self) -> bytes:
        """What this run says at its end when another one speaks for the request."""
        error = Conflict("the request was taken over by another gateway", code="superseded")
        if self.log.stream:
            return error_frame(error).removesuffix(FRAME_END)
        self.log.begin(error.status, stream=False)
        return json.dumps(error_body(error)).encode()

    def _events_of(self, last: bool) -> list[bytes]:
        if not self.log.stream:
            whole = [self._body] if last else []
        else:
            *whole, self._body = self._body.split(FRAME_END)
        self._size += sum(map(len, whole))
        return whole

    # ------------------------------------------------------------------------------------------ the record

    async def _keep(self) -> None:
        while True:
            await asyncio.sleep(KEEP_S)
            if self._closing or not self._collect():
                continue
            try:
                held = await self._put(i.RUNNING)
            except BatonError as exc:
                log.warning("request %s is not kept: %s", self.state.request_id, exc.message)
                continue
            if not held and not self._gone:
                self._end("superseded")

    def _collect(self) -> bool:
        """Make parts of new events. True when policy is to be told how far this is."""
        if self.log.status not in (0, 200) or self._size > MAX_LOG_BYTES or self.log.complete:
            return False
        return self._collect_events() or bool(self._pending) or self._tokens() != self._kept_tokens

    def _collect_events(self) -> bool:
        first, end = self._cuts[-1], len(self.log.events)
        if first < end:
            self._pending += make_parts(self.log, first)
            self._cuts.append(end)
        return first < end

    def _tokens(self) -> int:
        session = self._begun.session if self._begun is not None else None
        return 0 if session is None else session.usage().completion_tokens

    async def _close(self, events: list[bytes]) -> bool:
        """Complete the record with the last events. False: it is another run's now."""
        self._closing, state = True, self._last_state()
        if state == i.DONE:
            self._last = self._last_parts(events)
            self._pending += self._last
        try:
            held = await self._complete(state)
        except BatonError as exc:
            log.warning("request %s is answered and not kept yet: %s", self.state.request_id, exc.message)
            self._late = asyncio.create_task(self._close_late(state))
            held = True
        self._closed.set()
        return held or self._gone

    def _last_state(self) -> str:
        session = self._begun.session if self._begun is not None else None
        well = self.log.status == 200 and self._size <= MAX_LOG_BYTES
        well = well and (session is None or (session.end is not None and session.end.error is None))
        return i.DONE if well else i.OPEN

    def _last_parts(self, events: list[bytes]) -> list[bytes]:
        return make_parts(self.log, self._cuts[-1], events, last=True)

    async def _complete(self, state: str) -> bool:
        return await self._put(state)

    async def _let_go(self, state: str) -> None:
        try:
            await self._put(state)
        except BatonError as exc:  # until policy hears of it nobody else may run it: this gateway lives
            log.warning("request %s is not let go of yet: %s", self.state.request_id, exc.message)
            self._late = asyncio.create_task(self._close_late(state))
        finally:
            self._closed.set()

    async def _close_late(self, state: str) -> None:
        for _ in range(LATE_TRIES):
            await asyncio.sleep(LATE_PAUSE_S)
            with suppress(BatonError):
                await self._complete(state)
                return

    async def _put(self, state: str) -> bool:
        async with self._putting:
            while not self._fenced and len(self._pending) > PARTS_AT_ONCE:
                await self._put_now(i.RUNNING)
            if not self._fenced:
                await self._put_now(state)
            return not self._fenced

    async def _put_now(self, state: str) -> None:
        session = self._begun.session if self._begun is not None else None
        pending = self._pending[:PARTS_AT_ONCE]
        counts: dict[str, Any] = {}
        if session is not None:
            usage = session.usage()
            counts = {
                "committed": _resumable(session) if state != i.DONE else b"",
                "epoch": session.stream.attempt.epoch if isinstance(session, Session) else 0,
                "prompt_tokens": usage.prompt_tokens if usage.completion_tokens else 0,
                "completion_tokens": usage.completion_tokens,
            }
        write = i.IdempotencyWrite(
            tenant=self._tenant,
            request_id=self.state.request_id,
            ingress_id=self._ingress,
            run=self.state.run,
            state=state,
            first_part=self._written,
            parts=tuple(pending),
            **counts,
        )
        try:
            written = await self._write(write)
        except Conflict as exc:
            if exc.code == i.RECORD_GAP:
                await self._mend()
            raise
        self._fenced, self._gone = not written.held, written.gone
        self._heard(written)
        self._kept_tokens = write.completion_tokens
        self._written += len(pending)
        del self._pending[: len(pending)]

    async def _mend(self) -> None:
        """Redis lost what was written last: the next writes begin with the first part again."""
        again = [part for first, end in pairwise(self._cuts) for part in make_parts(self.log, first, end=end)]
        self._pending, self._written = again + self._last, 0

    def _end(self, reason: str) -> None:
        if self._begun is not None and self._begun.session is not None:
            self._begun.session.cancel(reason)

    def _heard(self, written: i.IdempotencyWritten) -> None:
        """What else policy said to a write."""

    async def _before_settle(self, session: Session, settle: Settle) -> Settle:
        await self._closed.wait()
        if self._fenced and not self._gone:
            raise Conflict("another gateway has the request, and settles it", code="superseded")
        return settle


def _resumable(session: Answered) -> bytes:
    """The tokens another run may begin with: all but the last, so that its worker has its say about the end.

    Empty where tokens alone do not tell the answer: of several choices or prompts, or with log-probabilities.
    """
    if not isinstance(session, Session) or session.num_choices > 1 or session.plan.sampling.logprobs >= 0:
        return b""
    return pack_tokens(session.stream.committed()[:-1])


async def _for_ever() -> Message:
    await asyncio.Event().wait()
    raise AssertionError
