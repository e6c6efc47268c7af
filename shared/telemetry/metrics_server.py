"""`GET /metrics` and `/health` of one process, on a listener of its own: no thread, a connection a scrape, all bounded.

It is not the clients' door: whoever may see load and tenants is decided by the address, which is the loopback unless an
operator sets another.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

from shared.contracts.errors import SettingsError
from shared.telemetry.metrics import Metrics

log = logging.getLogger("baton.telemetry")

PATH, HEALTH_PATH = "/metrics", "/health"
MAX_HEAD_BYTES = 8192
MAX_CONNECTIONS = 16
"""Scrapes at the same time; another is closed at once."""
ANSWER_S = 5.0
"""Time for a request's head to come, and for its answer to be read."""


def metrics_url(host: str, port: int) -> str:
    """Where a process on this machine finds them."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(host, host)
    return f"http://{f'[{host}]' if ':' in host else host}:{port}{PATH}"


@asynccontextmanager
async def serve_metrics(
    metrics: Metrics, host: str, port: int, fault: Callable[[], str] = lambda: ""
) -> AsyncIterator[int]:
    """Answer scrapes while the block runs; yields the port. Raises SettingsError when it cannot listen there.

    `/health` is 200 while `fault` gives nothing, and else 503 with its words.

    A port that was asked for is shared with other processes of this user: in a rolling restart two have it for a while.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family, reuse_port=port != 0)
    except OSError as exc:
        raise SettingsError(
            f"cannot serve metrics on {host} port {port}: {exc.strerror}; choose another port (0 takes a free one)",
            param="metrics.port",
        ) from exc
    server = _Server(metrics, fault)
    listening = await asyncio.start_server(server.connected, sock=listener, limit=MAX_HEAD_BYTES)
    try:
        yield int(listener.getsockname()[1])
    finally:
        listening.close()
        server.abort()


class _Server:
    def __init__(self, metrics: Metrics, fault: Callable[[], str]) -> None:
        self._metrics = metrics
        self._fault = fault
        self._tasks: set[asyncio.Task[object]] = set()

    def abort(self) -> None:
        """End what is still being answered."""
        for task in self._tasks:
            task.cancel()

    async def connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        if task is None or len(self._tasks) >= MAX_CONNECTIONS:
            writer.close()
            return
        self._tasks.add(task)
        try:
            # A client that leaves, stalls or sends nonsense costs its own connection, nothing else.
            with suppress(OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
                async with asyncio.timeout(ANSWER_S):
                    head = await reader.readuntil(b"\r\n\r\n")
                    writer.write(self._answer(head.decode("latin-1")))
                    await writer.drain()
                    writer.write_eof()
                    await reader.read(1)
        finally:
            self._tasks.discard(task)
            writer.close()

    def _answer(self, head: str) -> bytes:
        request, *lines = head.split("\r\n")
        method, _, rest = request.partition(" ")
        path = rest.partition(" ")[0].partition("?")[0]
        if method not in ("GET", "HEAD"):
            return _response("405 Method Not Allowed", b"GET only\n")
        if path == HEALTH_PATH:
            fault = self._fault()
            status = "503 Service Unavailable" if fault else "200 OK"
            return _response(status, f"{fault or 'alive'}\n".encode(), with_body=method == "GET")
        if path != PATH:
            return _response("404 Not Found", b"metrics are at /metrics, liveness at /health\n")
        accept = next((line.partition(":")[2] for line in lines if line.lower().startswith("accept:")), "")
        body, content_type = self._metrics.exposition(accept.strip())
        return _response("200 OK", body, content_type, with_body=method == "GET")


def _response(
    status: str, body: bytes, content_type: str = "text/plain; charset=utf-8", with_body: bool = True
) -> bytes:
    head = (
        f"HTTP/1.1 {status}\r\nContent-Type: {content_type}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + (body if with_body else b"")
