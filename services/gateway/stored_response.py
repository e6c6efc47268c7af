"""The answer of a stored response, as its run writes it into the log that clients read and policy keeps."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.types import Message, Receive, Scope, Send

from services.gateway.answers import SSE_HEADERS, error_response
from services.gateway.chunks import error_frame
from services.gateway.dialect import frames
from shared.contracts.errors import BatonError, Internal
from shared.ingress.answer import Answered
from shared.ingress.ingress import SHUTTING_DOWN
from shared.ingress.responses_body import Event, ResponseWriter, ended_without_run

CANCELLED = "cancelled"
"""Why a session ends that its tenant cancelled."""
_JSON: list[tuple[bytes, bytes]] = [(b"content-type", b"application/json")]
_SSE = [(name.encode(), value.encode()) for name, value in SSE_HEADERS.items()]


class StoredResponse:
    """One run of a response.

    Attributes:
        final: the response as it is stored, JSON; None until it has ended, and for one that is not stored.
        goes_on: it did not end: another gateway may go on with it.
    """

    def __init__(self, session: Answered, writer: ResponseWriter, *, stream: bool, background: bool) -> None:
        self.final: bytes | None = None
        self.goes_on = False
        self._session = session
        self._writer = writer
        self._stream = stream
        self._background = background

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        session = self._session
        if self._background and self._stream:
            await send(_start(_SSE))
            await send(_body(frames(self._writer.queued()), more=True))
        await session.wait()
        if not self._background and session.end is not None and session.end.error is not None:
            await error_response(session.end.error)(scope, receive, send)
        elif self._stream:
            await self._run_stream(send)
        else:
            await self._run_whole(scope, receive, send)

    async def _run_stream(self, send: Send) -> None:
        if self._background:
            body = frames(self._writer.started())
        else:
            await send(_start(_SSE))
            body = frames(self._writer.begin())
        session = self._session
        while True:
            pieces, end = session.take(), session.end
            body += frames(event for piece in pieces for event in self._writer.piece(piece))
            if end is not None:
                body += self._last(end.error)
            await send(_body(body, more=end is None))
            session.sent(len(body))
            if end is not None:
                return
            await session.wait()
            body = b""

    async def _run_whole(self, scope: Scope, receive: Receive, send: Send) -> None:
        session = self._session
        while True:
            for piece in session.take():
                self._writer.piece(piece)
            if session.end is not None:
                break
            await session.wait()
        self._last(session.end.error)
        if self.final is None:
            await error_response(session.end.error or Internal("a response has no end"))(scope, receive, send)
            return
        await send(_start(_JSON))
        await send(_body(self.final, more=False))
        session.sent(len(self.final))

    def _last(self, error: BatonError | None) -> bytes:
        """The last frames; sets what is stored."""
        if error is None:
            return self._ended([self._writer.end(self._session.usage())])
        if error.code == SHUTTING_DOWN and self._background:
            self.goes_on = True
            return error_frame(error)
        if error.code == CANCELLED:
            return self._ended(self._writer.cancelled())
        events = self._writer.failed(error)
        return self._ended(events) if self._background else frames(events)

    def _ended(self, events: list[Event]) -> bytes:
        self.final = msgspec.json.encode(events[-1]["response"])
        return frames(events)


class EndedResponse(StoredResponse):
    """One that is not run any more: it was cancelled before anybody could, or cannot be run again.

    Args:
        response: as it was queued.
        error: why; None: cancelled.
        first_event: number of its one event, if it is a stream.
    """

    def __init__(self, response: dict[str, Any], error: BatonError | None, *, stream: bool, first_event: int) -> None:
        self.goes_on = False
        self._event = {
            "type": "response.failed",
            "sequence_number": first_event,
            "response": ended_without_run(response, error),
        }
        self._as_stream = stream
        self.final = msgspec.json.encode(self._event["response"])

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert self.final is not None
        await send(_start(_SSE if self._as_stream else _JSON))
        await send(_body(frames([self._event]) if self._as_stream else self.final, more=False))


def _start(headers: list[tuple[bytes, bytes]]) -> Message:
    return {"type": "http.response.start", "status": 200, "headers": headers}


def _body(body: bytes, *, more: bool) -> Message:
    return {"type": "http.response.body", "body": body, "more_body": more}
