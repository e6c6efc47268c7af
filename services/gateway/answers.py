"""A session's answer over HTTP: streamed or whole, with the client's departure noticed either way."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from services.gateway.dialect import CHUNKS, Dialect
from services.gateway.errors import error_headers
from shared.contracts.errors import BatonError, BodyTooLarge, Internal
from shared.ingress.answer import MANY_SCORES, Answered
from shared.ingress.error_body import error_body

SSE_HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",
}

BODY_SEND = "baton.body_send"
"""In a scope: the `send` that a body's pieces may go to once its head is sent, past layers that only read heads."""
LINGER_S = 2.0


def error_response(
    error: BatonError, headers: Mapping[str, str] | None = None, *, sending: bool = False
) -> JSONResponse:
    """An error as a response with its status; `sending`: the client may still be sending its body."""
    kind = LingeringResponse if sending or isinstance(error, BodyTooLarge) else JSONResponse
    return kind(error_body(error), error.status, headers={**error_headers(error), **(headers or {})})


class LingeringResponse(JSONResponse):
    """Answers while the client is still sending, then throws the rest away for at most `LINGER_S` before it closes.

    Closed at once, the connection would be reset, and the client would often lose the answer.
    """

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await send({"type": "http.response.body", "body": self.body, "more_body": True})
        with suppress(TimeoutError):
            async with asyncio.timeout(LINGER_S):
                while (await receive()).get("more_body", False):
                    pass
        await send({"type": "http.response.body", "body": b"", "more_body": False})


class SessionResponse(Response):
    """Answers a session. A stream's status is sent with its first event, so what fails before has a status of its own.

    Args:
        session: started already.
        headers: added to every form of the answer.
        dialect: how it is written.
    """

    def __init__(self, session: Answered, headers: Mapping[str, str], dialect: Dialect = CHUNKS) -> None:
        super().__init__()
        self._session = session
        self._dialect = dialect
        self._extra = dict(headers)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        session, answering = self._session, asyncio.current_task()
        assert answering is not None
        watches = asyncio.create_task(_disconnected(receive)), asyncio.create_task(session.aborted.wait())
        stopped = ended = False

        def stop(watch: asyncio.Task[Any]) -> None:
            nonlocal stopped
            if not (ended or stopped or watch.cancelled()):
                stopped = True
                answering.cancel()

        for watch in watches:
            watch.add_done_callback(stop)
        try:
            await self._answer(scope, receive, send)
        except asyncio.CancelledError:
            if not stopped or answering.uncancel():
                raise
        except OSError:
            pass  # the connection is broken
        finally:
            ended = True
            for watch in watches:
                watch.cancel()
            session.cancel("client_gone")  # nothing, if it has ended

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._session.plan.stream:
            await self._stream(scope, receive, send)
        else:
            await (await self._whole())(scope, receive, send)

    async def _whole(self) -> JSONResponse:
        try:
            body = await self._dialect.whole(self._session)
        except BatonError as error:
            return error_response(error, self._extra)
        response = JSONResponse(body, headers=self._extra)
        self._session.sent(len(response.body))
        return response

    async def _stream(self, scope: Scope, receive: Receive, send: Send) -> None:
        session = self._session
        # made while nothing has come yet: what is done behind the first token, its client waits for
        writer = self._dialect.writer(session)
        headers = [(k.encode("latin-1"), v.encode("latin-1")) for k, v in {**SSE_HEADERS, **self._extra}.items()]
        await session.wait()
        if session.end is not None and session.end.error is not None:
            await error_response(session.end.error, self._extra)(scope, receive, send)
            return
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        send = scope.get(BODY_SEND, send)
        body = writer.begin()
        while True:
            pieces, end = session.take(), session.end
            for piece in pieces:
                body += writer.piece(piece)
                if len(piece.tokens) > MANY_SCORES:
                    await asyncio.sleep(0)  # others' turn
            if end is not None:
                body += writer.end() if end.error is None else writer.failed(end.error)
            await send({"type": "http.response.body", "body": body, "more_body": end is None})
            session.sent(len(body))
            if end is not None:
                return
            await session.wait()
            body = b""


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def internal_response(headers: Mapping[str, str]) -> JSONResponse:
    """500 without details."""
    return error_response(Internal("internal error"), headers)


def json_response(body: Any, headers: Mapping[str, str] | None = None, status: int = 200) -> JSONResponse:
    """A JSON body."""
    return JSONResponse(body, status, headers=dict(headers or {}))
