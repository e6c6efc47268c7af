"""uvicorn around the application, on a socket bound before, stopped by the caller.

A client that connects and says nothing, sends its request a byte at a time, or does not read its answer would keep its
connection for ever; `_Protocol` adds the bounds uvicorn lacks. The body's own time is the application's business.
"""

from __future__ import annotations

import asyncio
import json
import resource
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass

import h11
import uvicorn
from fastapi import FastAPI
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from services.gateway.errors import http_body
from shared.contracts.errors import SettingsError

STOP_S = 3
"""What connections may still take after the drain, seconds."""
KEPT_S = 1.0
BACKLOG = 1024
KEEP_ALIVE_S = 75
HEAD_S = 15.0
"""A request's head must be here so long after the connection, or after its first byte on a used one."""
UNREAD_S = 40.0
"""A connection whose client takes nothing for so long, while more than a buffer waits, is cut."""
CLOSE_S = 5.0
"""A connection that is closed may flush for so long."""


class _Protocol(H11Protocol):
    _head: asyncio.TimerHandle | None = None
    _unread: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._head = self.loop.call_later(HEAD_S, self._no_head)

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._head, self._unread):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._between_requests and self._head is None:
            self._head = self.loop.call_later(HEAD_S, self._no_head)
        super().data_received(data)
        if not self._between_requests and self._head is not None:
            self._head.cancel()
            self._head = None

    def pause_writing(self) -> None:
        self._unread = self.loop.call_later(UNREAD_S, self.transport.abort)
        super().pause_writing()

    def resume_writing(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None
        super().resume_writing()

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self.loop.call_later(CLOSE_S, self.transport.abort)

    def send_400_response(self, msg: str) -> None:
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):  # an answer is out already
            self.transport.abort()
            return
        body = json.dumps(http_body(400, msg)).encode()
        headers = [("content-type", "application/json"), ("content-length", str(len(body))), ("connection", "close")]
        for event in (h11.Response(status_code=400, headers=headers), h11.Data(data=body), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    @property
    def _between_requests(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _no_head(self) -> None:
        self._head = None
        if self._between_requests:
            self.transport.abort()


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.up = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.up.set()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals belong to the process's own life cycle."""
        yield


def allow_many_files() -> None:
    """Raise the number of open files to what the system allows: the usual 1,024 are few connections."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def bind(host: str, port: int) -> socket.socket:
    """A listening socket. Raises SettingsError when the address cannot be had.

    The port is shared with other gateways of this user, as in a rolling restart: the kernel deals connections out.
    """
    try:
        return socket.create_server((host, port), backlog=BACKLOG, reuse_port=True)
    except OSError as exc:
        raise SettingsError(f"cannot listen on {host}:{port}: {exc.strerror}", param="gateway.port") from exc


@dataclass(slots=True)
class Listener:
    """A server that takes connections at `port`."""

    port: int
    _server: _Server
    _leaving: bool = False

    async def hand_over(self) -> None:
        """Leave new connections to another process on the same port.

        Kept connections have KEPT_S for one more request each, whose answer closes them; then the silent ones are
        closed. What is being answered goes on.
        """
        self._leaving = True
        for server in self._server.servers:
            server.close()
        await asyncio.sleep(KEPT_S)
        for connection in list(self._server.server_state.connections):
            connection.shutdown()

    def closing(self, app: ASGIApp) -> ASGIApp:
        """`app`, whose answers close their connections once it hands over."""

        async def wrapped(scope: Scope, receive: Receive, send: Send) -> None:
            async def sending(message: Message) -> None:
                if self._leaving and message["type"] == "http.response.start":
                    message = {**message, "headers": [*message.get("headers", ()), (b"connection", b"close")]}
                await send(message)

            await app(scope, receive, sending)

        return wrapped


@asynccontextmanager
async def serve(app: FastAPI, sock: socket.socket) -> AsyncIterator[Listener]:
    """Serve `app` on `sock` while the block runs."""
    config = uvicorn.Config(
        app,
        http=_Protocol,
        loop="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=STOP_S,
    )
    server = _Server(config)
    listener = Listener(sock.getsockname()[1], server)
    config.app = listener.closing(app)
    task = asyncio.create_task(server.serve([sock]))
    try:
        await server.up.wait()
        yield listener
    finally:
        server.should_exit = True
        await task
