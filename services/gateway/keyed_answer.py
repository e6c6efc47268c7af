"""The answer to one client of a keyed request: read from its entry's log, from where the client is."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from services.gateway.answers import SSE_HEADERS, error_response
from services.gateway.chunks import error_frame
from services.gateway.event_log import FRAME_END, EventLog, Place
from services.gateway.log_reader import LogReader
from services.gateway.once import Entry
from shared.contracts.errors import BatonError, Internal

JSON_HEADERS = {"content-type": "application/json"}


class KeyedAnswer(Response):
    """Sends what a log holds and what comes. A client that leaves is only one reader less.

    Args:
        entry: attached to already.
        place: of a client that resumes.
        headers: added to every form of the answer.
    """

    def __init__(self, entry: Entry, place: Place | None, headers: Mapping[str, str]) -> None:
        super().__init__()
        self._entry = entry
        self._place = place
        self._extra = dict(headers)
        self._begun = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer = asyncio.create_task(self._answer(scope, receive, send))
        gone = asyncio.create_task(_disconnected(receive))
        try:
            await asyncio.wait({answer, gone}, return_when=asyncio.FIRST_COMPLETED)
            # a broken connection shows as an OSError of `send`
            if answer.done() and not isinstance(answer.exception(), OSError):
                answer.result()
        finally:
            for task in (answer, gone):
                task.cancel()
            self._entry.detach()

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            while not await self._read(self._entry.log, send):
                pass
        except BatonError as error:
            if not self._begun:
                await error_response(error, self._extra)(scope, receive, send)
            else:
                await send({"type": "http.response.body", "body": error_frame(error), "more_body": False})

    async def _read(self, log: EventLog, send: Send) -> bool:
        """Send a log. True when that was the end, False when the answer goes on in another log."""
        while not log.status:
            if log is not self._entry.log:
                return False
            if log.complete:
                raise self._entry.error or Internal("the answer did not begin")
            await log.news()
        if not log.stream or log.status != 200:
            return await self._read_whole(log, send)
        return await self._read_stream(log, send)

    async def _read_stream(self, log: EventLog, send: Send) -> bool:
        news = self._news_of(log)
        await self._begin(200, SSE_HEADERS, send)
        while True:
            if body := news():
                await send({"type": "http.response.body", "body": body, "more_body": True})
            elif log.complete:
                if self._entry.error is not None:
                    raise self._entry.error
                await send({"type": "http.response.body", "body": b"", "more_body": False})
                return True
            elif log is not self._entry.log:
                return False
            else:
                await log.news()

    def _news_of(self, log: EventLog) -> Callable[[], bytes]:
        """What gives the frames of a stream's log that its client does not have yet. Raises Conflict, InvalidInput."""
        reader = LogReader(log, self._place)

        def news() -> bytes:
            found = reader.read()
            self._place = reader.place
            return b"".join(b"id: %s\n%s%s" % (str(at).encode(), event, FRAME_END) for at, event in found)

        return news

    async def _read_whole(self, log: EventLog, send: Send) -> bool:
        while not log.complete:
            if log is not self._entry.log:
                return False
            await log.news()
        if self._entry.error is not None:
            raise self._entry.error
        body = b"".join(log.events)
        await self._begin(log.status, {**JSON_HEADERS, **log.headers, "content-length": str(len(body))}, send)
        await send({"type": "http.response.body", "body": body, "more_body": False})
        return True

    async def _begin(self, status: int, headers: Mapping[str, str], send: Send) -> None:
        if self._begun:
            return
        self._begun = True
        raw = [(k.encode("latin-1"), v.encode("latin-1")) for k, v in {**headers, **self._extra}.items()]
        await send({"type": "http.response.start", "status": status, "headers": raw})


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
