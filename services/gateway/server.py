"""uvicorn around the application, on a socket bound before, stopped by the caller."""

from __future__ import annotations

import asyncio
import ctypes
import resource
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass

import uvicorn
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.gateway.answers import BODY_SEND
from services.gateway.connection import KEEP_ALIVE_S, Connection
from services.gateway.edge import NO_EDGE, Edge
from shared.contracts.errors import SettingsError

STOP_S = 3
"""What connections may still take after the drain, seconds."""
LOOK_S = 0.05
DATE_S = 1.0
KEPT_S = 1.0
SO_ATTACH_REUSEPORT_CBPF, SO_DETACH_REUSEPORT_BPF = 51, 68  # Linux; Python does not name them
BACKLOG = 1024


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.up, self._leaving = asyncio.Event(), asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.up.set()

    async def main_loop(self) -> None:
        """As uvicorn's, which wakes ten times a second to see whether it should exit."""
        while not await self.on_tick(0):  # sets the time that answers tell
            with suppress(TimeoutError):
                async with asyncio.timeout(DATE_S):
                    await self._leaving.wait()

    def leave(self) -> None:
        """Take no more connections, and end."""
        self.should_exit = True
        self._leaving.set()

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
        # its connections inherit it: a small piece must not wait for the client to acknowledge the one before
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
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
            scope[BODY_SEND] = send

            def sending(message: Message) -> Awaitable[None]:
                if self._leaving and message["type"] == "http.response.start":
                    message = {**message, "headers": [*message.get("headers", ()), (b"connection", b"close")]}
                return send(message)

            try:
                await app(scope, receive, sending)
            finally:
                scope.pop(BODY_SEND, None)  # it holds the scope: together they would wait for the garbage collector

        return wrapped


@asynccontextmanager
async def serve(app: ASGIApp, sock: socket.socket, edge: Edge = NO_EDGE) -> AsyncIterator[Listener]:
    """Serve `app` on `sock` while the block runs."""
    config = uvicorn.Config(
        app,
        http=Connection,
        ws="none",
        loop="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        backlog=BACKLOG,
        ssl_certfile=edge.cert or None,
        ssl_keyfile=edge.key or None,
        proxy_headers=bool(edge.proxies),
        forwarded_allow_ips=list(edge.proxies),
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
        server.leave()
        await task
