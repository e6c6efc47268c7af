"""uvicorn around the application, on a socket bound before, stopped by the caller."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

import uvicorn
from fastapi import FastAPI

from shared.contracts.errors import SettingsError

STOP_S = 3
"""What connections may still take after the drain, seconds."""
BACKLOG = 1024


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


def bind(host: str, port: int) -> socket.socket:
    """A listening socket. Raises SettingsError when the address cannot be had."""
    try:
        return socket.create_server((host, port), backlog=BACKLOG, reuse_port=False)
    except OSError as exc:
        raise SettingsError(f"cannot listen on {host}:{port}: {exc.strerror}", param="gateway.port") from exc


@asynccontextmanager
async def serve(app: FastAPI, sock: socket.socket) -> AsyncIterator[int]:
    """Serve `app` on `sock` while the block runs; yields the port."""
    config = uvicorn.Config(
        app,
        http="h11",
        loop="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=75,
        timeout_graceful_shutdown=STOP_S,
    )
    server = _Server(config)
    task = asyncio.create_task(server.serve([sock]))
    try:
        await server.up.wait()
        yield sock.getsockname()[1]
    finally:
        server.should_exit = True
        await task
