"""The door of a running supervisor: a socket in its state folder that takes orders from `./baton` on this machine.

One order a connection, a JSON line; answers are JSON lines: `{"say": …}` while it is carried out, then `{"done": true}`
or `{"error": …}`. Only the owner of the state folder can reach it.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any

from services.cli.child import ChildFailed
from shared.contracts.errors import BatonError, InvalidInput, Unavailable

log = logging.getLogger("baton.supervisor")

NAME = "control.sock"
MAX_ORDER_BYTES = 64 * 1024
ORDER_S = 10.0
"""An order must be here so long after the connection."""

Say = Callable[[str], None]
Handler = Callable[[Mapping[str, Any], Say], Awaitable[None]]
"""Carries an order out; raises BatonError or ChildFailed."""


@asynccontextmanager
async def serve_control(folder: Path, handler: Handler) -> AsyncIterator[None]:
    """Take orders while the block runs, one after the other: two restarts at once would stop what both rely on."""
    turn = asyncio.Lock()
    answering: set[asyncio.Task[None]] = set()

    async def on_order(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        answering.add(task)
        try:
            async with turn:
                await _answer(reader, writer, handler)
        finally:
            answering.discard(task)
            writer.close()

    with _bound(folder) as sock:
        server = await asyncio.start_unix_server(on_order, sock=sock, limit=MAX_ORDER_BYTES)
        try:
            yield
        finally:
            server.close()
            for task in answering:
                task.cancel()
            await asyncio.gather(*answering, return_exceptions=True)


async def _answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, handler: Handler) -> None:
    def send(**answer: object) -> None:
        # who asked may have gone; the order is carried out all the same
        if not writer.is_closing():
            writer.write(json.dumps(answer).encode() + b"\n")

    try:
        order = await _order(reader)
        await handler(order, lambda line: send(say=line))
        send(done=True)
    except BatonError as exc:
        send(error=exc.message)
    except ChildFailed as exc:
        send(error=f"{exc.name} {exc.reason}", tail=exc.tail)
    except Exception as exc:
        log.exception("an order failed")
        send(error=f"the order failed: {exc!r}")
    with suppress(ConnectionError):
        await writer.drain()


async def _order(reader: asyncio.StreamReader) -> Mapping[str, Any]:
    try:
        order = json.loads(await asyncio.wait_for(reader.readline(), ORDER_S))
    except (TimeoutError, ValueError, RecursionError, ConnectionError) as exc:
        raise InvalidInput("an order is one JSON line") from exc
    if not isinstance(order, dict):
        raise InvalidInput("an order is a JSON object")
    return order


def order(folder: Path, message: Mapping[str, Any], say: Say) -> None:
    """Send an order to the supervisor of the state folder's `run` folder and wait until it is carried out.

    Raises Unavailable when none listens or it ends meanwhile, InvalidInput with its words when it refuses or fails.
    """
    with socket.socket(socket.AF_UNIX) as connection:
        try:
            with _short(folder) as path:
                connection.connect(path)
        except OSError as exc:
            raise Unavailable(f"the supervisor does not listen: {exc.strerror}") from exc
        connection.sendall(json.dumps(message).encode() + b"\n")
        with connection.makefile("rb") as answers:
            for line in answers:
                answer = json.loads(line)
                if "say" in answer:
                    say(answer["say"])
                elif "error" in answer:
                    tail = f"\n\n{answer['tail']}" if answer.get("tail") else ""
                    raise InvalidInput(answer["error"] + tail)
                else:
                    return
    raise Unavailable("the supervisor ended before the order was carried out")


@contextmanager
def _bound(folder: Path) -> Iterator[socket.socket]:
    path = folder / NAME
    with suppress(FileNotFoundError):
        path.unlink()
    sock = socket.socket(socket.AF_UNIX)
    try:
        with _short(folder) as short:
            sock.bind(short)
        path.chmod(0o600)
        yield sock
    finally:
        sock.close()
        with suppress(FileNotFoundError):
            path.unlink()


@contextmanager
def _short(folder: Path) -> Iterator[str]:
    """The socket's path by way of an open folder: a Unix address has room for 107 bytes only."""
    descriptor = os.open(folder, os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{descriptor}/{NAME}"
    finally:
        os.close(descriptor)
