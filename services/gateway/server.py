"""uvicorn around the application, on a socket bound before, stopped by the caller.

A client that connects and says nothing, sends its request a byte at a time, or does not read its answer would keep its
connection for ever; `_Protocol` adds the bounds uvicorn lacks. The body's own time is the application's business.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import resource
import socket
import struct
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
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
LOOK_S = 0.05
KEPT_S = 1.0
SO_ATTACH_REUSEPORT_CBPF, SO_DETACH_REUSEPORT_BPF = 51, 68  # Linux; Python does not name them
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
    """A socket that has its address and does not listen yet. Raises SettingsError when the address cannot be had.

    The port is shared with other gateways of this user, as in a rolling restart: from when it listens on, the kernel
    deals connections out.
    """
    sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        sock.bind((host, port))
    except OSError as exc:
        sock.close()
        raise SettingsError(f"cannot listen on {host}:{port}: {exc.strerror}", param="gateway.port") from exc
    return sock


def _share_evenly(sock: socket.socket) -> None:
    """Undo what an earlier gateway told the kernel of this port when it left."""
    with suppress(OSError):  # there was none
        sock.setsockopt(socket.SOL_SOCKET, SO_DETACH_REUSEPORT_BPF, bytes(4))


def _steer_away(sock: socket.socket) -> None:
    """Let the kernel give new connections of a shared port to the second process that listens: our successor.

    Closing the socket alone would reset connections the kernel has made and we have not accepted yet. A kernel that
    does not know how goes on dealing them out.
    """
    # one instruction of classic BPF: return 1, the socket's number in the order in which they began to listen
    program = ctypes.create_string_buffer(struct.pack("HBBI", 0x06, 0, 0, 1))
    with suppress(OSError):
        filtering = struct.pack("@HP", 1, ctypes.addressof(program))
        sock.setsockopt(socket.SOL_SOCKET, SO_ATTACH_REUSEPORT_CBPF, filtering)


@dataclass(slots=True)
class Listener:
    """A server that takes connections at `port`."""

    port: int
    _server: _Server
    _sock: socket.socket
    _leaving: bool = False

    async def hand_over(self) -> None:
        """Leave new connections to another process on the same port.

        Kept connections have KEPT_S for one more request each, whose answer closes them; then the silent ones are
        closed. What is being answered goes on.
        """
        self._leaving = True
        _steer_away(self._sock)
        await asyncio.sleep(KEPT_S)
        for server in self._server.servers:
            server.close()
        for connection in list(self._server.server_state.connections):
            connection.shutdown()

    async def answered(self, limit_s: float) -> None:
        """Returns when no request is being answered, uploads and downloads included, after `limit_s` at the latest."""
        with suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                while self._server.server_state.tasks:  # noqa: ASYNC110 - uvicorn tells nobody
                    await asyncio.sleep(LOOK_S)

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
        backlog=BACKLOG,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=STOP_S,
    )
    server = _Server(config)
    listener = Listener(sock.getsockname()[1], server, sock)
    config.app = listener.closing(app)
    task = asyncio.create_task(server.serve([sock]))
    try:
        await server.up.wait()
        _share_evenly(sock)
        yield listener
    finally:
        server.should_exit = True
        await task
