"""A gateway whose answers a test chooses, in a thread of its own: for clients that block."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from shared.bus.memory_bus import MemoryBroker
from tests.pipeline.gateway_support import Backend, default_output, http_stack


@contextmanager
def scripted_gateway(text: Callable[[str], str] = default_output) -> Iterator[str]:
    """Yields its URL. Its worker says what `text` makes of the prompt."""
    started, stop = threading.Event(), threading.Event()
    urls: list[str] = []

    async def serve() -> None:
        async with http_stack(Backend(MemoryBroker(), text=text)) as (_, url):
            urls.append(url)
            started.set()
            await asyncio.to_thread(stop.wait)

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    try:
        assert started.wait(30)
        yield urls[0]
    finally:
        stop.set()
        thread.join(30)
