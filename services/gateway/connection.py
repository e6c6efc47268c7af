"""One client's connection: uvicorn's HTTP/1.1 on llhttp, with the bounds it lacks.

A client that connects and says nothing, sends its request a byte at a time, sends a head without end, asks on and on
without reading, or does not read its answer would keep its connection, or our memory, for ever. The body's own time and
size are the application's business.
"""

from __future__ import annotations

import asyncio
import json
from typing import cast

import httptools
from uvicorn._types import ASGI3Application
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from services.gateway.errors import http_body
from services.gateway.joined_head import JoinedHead
from services.gateway.old_http import without_chunks
from shared.contracts.ids import new_request_id
from shared.lifecycle.memory import GIVE_BACK

KEEP_ALIVE_S = 75
"""A connection between two requests may be silent for so long."""
HEAD_S = 15.0
"""A request's head must be here so long after the connection, or after its first byte on a used one.

And what is left of a body that was refused so long after its refusal.
"""
UNREAD_S = 40.0
"""A connection whose client takes nothing for so long, while more than a buffer waits, is cut."""
CLOSE_S = 5.0
"""A connection that is closed may flush for so long."""
LINGER_S = 1.0
"""So long, what a client still sends after its refusal is thrown away."""
MAX_HEAD_BYTES = 32 * 1024
"""Request line, headers and trailers together."""
MAX_HEADERS = 100
MAX_PIPELINED = 256
"""Requests sent ahead of their answers; more end the connection."""
HTTP2_HEADERS = (b"connection", b"upgrade", b"http2-settings")


class _HeadTooLarge(Exception):
    pass


class Connection(HttpToolsProtocol):
    """What uvicorn makes for each client."""

    _head: asyncio.TimerHandle | None = None
    _unread: asyncio.TimerHandle | None = None
    _in_head = False
    _head_bytes = 0  # told by the parser
    _untold_bytes = 0  # in it: it tells names and values only when they are whole
    _body_bytes = 0  # since the last answer
    _upgrading = False
    _refused = False
    _answering: RequestResponseCycle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._head = self.loop.call_later(HEAD_S, self._no_head)

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._head, self._unread):
            if timer is not None:
                timer.cancel()
        if self._answering is not None and not self._answering.response_complete:
            # uvicorn tells the newest request, which may be one sent ahead
            self._answering.disconnected = True
            self._answering.message_event.set()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        self._unset_keepalive_if_required()
        in_head = self._in_head
        try:
            self._feed(data)
            if in_head and self._in_head:
                self._untold_bytes += len(data)
                if self._untold_bytes > MAX_HEAD_BYTES:
                    raise _HeadTooLarge
        except (_HeadTooLarge, httptools.HttpParserError) as exc:
            large = isinstance(exc, _HeadTooLarge) or isinstance(exc.__context__, _HeadTooLarge)
            self._refuse(*((431, "the request's head is too large") if large else (400, "this is no HTTP/1.1 request")))
        if not self._between_requests:
            self._stop_head_timer()
        elif self._head is None and not self._refused:  # most heads come whole and need no timer
            self._head = self.loop.call_later(HEAD_S, self._no_head)

    # ------------------------------------------------------------------------------------------ the parser's news

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head, self._head_bytes, self._untold_bytes = True, 0, 0

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(len(name) + len(value) + 4)
        if self._in_head:  # a trailer is no header: what was decided by the headers stands
            super().on_header(name, value)
            if len(self.headers) > MAX_HEADERS:
                raise _HeadTooLarge

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._upgrading = self.parser.should_upgrade()
        if not self._upgrading:
            super().on_headers_complete()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._answering = cycle
        cycle.transport = cast(asyncio.Transport, JoinedHead(self.transport, cycle))
        if cycle.scope["http_version"] == "1.0":
            app = without_chunks(app, cycle)
        super()._start_asgi_task(cycle, app)

    def on_body(self, body: bytes) -> None:
        if not self._upgrading:
            self._body_bytes += len(body)
            super().on_body(body)

    def on_message_complete(self) -> None:
        if self._upgrading:
            return
        if self.cycle.response_complete:  # a refusal's; the connection may rest now
            self._stop_head_timer()
        super().on_message_complete()

    # ------------------------------------------------------------------------------------------ the answer's side

    def pause_writing(self) -> None:
        self._unread = self.loop.call_later(UNREAD_S, self.transport.abort)
        super().pause_writing()

    def resume_writing(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None
        super().resume_writing()

    def on_response_complete(self) -> None:
        GIVE_BACK.after(self._body_bytes)
        self._body_bytes = 0
        super().on_response_complete()
        cycle = self.cycle
        if self._head is None and cycle.response_complete and cycle.more_body:  # refused before its body was here
            self._head = self.loop.call_later(HEAD_S, self._no_head)

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self.loop.call_later(CLOSE_S, self.transport.abort)

    def _feed(self, data: bytes) -> None:
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as exc:
            if self.scope.get("method") == "CONNECT" or self.parser.get_method() == b"CONNECT":
                raise httptools.HttpParserError("CONNECT") from exc
            # Java's client offers HTTP/2 with every request, and the parser would take the body for that
            head = self._head_without_upgrade()
            self.parser = httptools.HttpRequestParser(self)
            self._feed(head + data[exc.args[0] :])
        if len(self.pipeline) > MAX_PIPELINED:
            self.transport.abort()

    def _head_without_upgrade(self) -> bytes:
        lines = [b"%b %b HTTP/1.1" % (self.parser.get_method(), self.url)]
        lines += [b"%b: %b" % (name, value) for name, value in self.headers if name not in HTTP2_HEADERS]
        return b"\r\n".join(lines) + b"\r\n\r\n"

    def _refuse(self, status: int, message: str) -> None:
        cycle = self.cycle
        running = cycle is not None and not cycle.response_complete
        if self.pipeline or (running and cycle.more_body and cycle.response_started):
            self.transport.abort()
            return
        if running and not cycle.more_body:  # what is wrong came after it: its answer ends the connection
            cycle.keep_alive = False
            self.flow.pause_reading()
            return
        if running:
            cycle.disconnected = True
            cycle.message_event.set()
        body = json.dumps(http_body(status, message)).encode()
        head = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\nx-request-id: %b\r\n\r\n"
        self.transport.write(STATUS_LINE[status] + head % (len(body), new_request_id().encode()) + body)
        # closed while the client still sends, the connection would be reset and the answer lost with it
        self._refused = True
        self.loop.call_later(LINGER_S, self.transport.close)

    @property
    def _between_requests(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _count(self, size: int) -> None:
        self._head_bytes += size
        if self._head_bytes > MAX_HEAD_BYTES:
            raise _HeadTooLarge

    def _stop_head_timer(self) -> None:
        if self._head is not None:
            self._head.cancel()
            self._head = None

    def _no_head(self) -> None:
        self._head = None
        if self._between_requests and not self._refused:
            self.transport.abort()
