"""The connection of a service to NATS: how it comes about, is lost, and ends."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import nats.errors
from nats.aio.client import Client

from shared.bus import envelope
from shared.bus.nats_bus import NatsBus
from shared.bus.nats_client import DirectClient
from shared.bus.subscriptions import BusStats
from shared.contracts.errors import Forbidden, Unavailable

log = logging.getLogger("baton.bus")

CONNECT_TIMEOUT_S = 10.0
RECONNECT_WAIT_S = 0.25


@asynccontextmanager
async def connect_bus(
    nats_url: str, service: str, *, password: str = "", lost: asyncio.Event | None = None
) -> AsyncIterator[NatsBus]:
    """Connect to NATS as the user `service` and drain on leaving.

    Args:
        nats_url: `nats://host:port`; credentials inside it win over `service` and `password`.
        service: the NATS user, and the owner of the reply inbox `_INBOX_<service>`.
        password: the user's password; empty connects without credentials.
        lost: set when the client has given up on the connection for good.

    Raises Unavailable when no connection comes about within 10 seconds, Forbidden when NATS refuses the credentials.
    """
    client = DirectClient()
    stats = BusStats()
    refused: set[str] = set()
    forbidden, leaving = asyncio.Event(), asyncio.Event()
    bus = NatsBus(client, service, stats, refused)

    async def on_error(exc: Exception) -> None:
        if isinstance(exc, nats.errors.SlowConsumerError):
            stats.slow_consumer += 1
        if isinstance(exc, nats.errors.AuthorizationError) or "authorization violation" in str(exc).lower():
            forbidden.set()
        refused.update(_refused_subjects(str(exc)))
        log.warning("NATS: %r", exc)

    async def on_disconnect() -> None:
        # Also called on our own close.
        if not leaving.is_set():
            log.warning("NATS connection lost; reconnecting")

    async def on_reconnect() -> None:
        log.info("NATS connection is back")
        bus.resume()

    async def on_closed() -> None:
        if lost is not None and not leaving.is_set():
            lost.set()

    options: dict[str, Any] = {"user": service, "password": password} if password else {}
    connecting = asyncio.ensure_future(
        client.connect(
            nats_url,
            name=service,
            inbox_prefix=envelope.inbox_prefix(service),
            error_cb=on_error,
            disconnected_cb=on_disconnect,
            reconnected_cb=on_reconnect,
            closed_cb=on_closed,
            max_reconnect_attempts=-1,
            reconnect_time_wait=RECONNECT_WAIT_S,  # type: ignore[arg-type]
            **options,
        )
    )
    await _first_connection(client, connecting, forbidden, nats_url, service)
    try:
        yield bus
    finally:
        leaving.set()
        await bus.close()


async def _first_connection(
    client: Client, connecting: asyncio.Future[None], forbidden: asyncio.Event, nats_url: str, service: str
) -> None:
    started = time.monotonic()
    refusal = asyncio.ensure_future(forbidden.wait())
    first: set[asyncio.Future[Any]] = {connecting, refusal}
    try:
        await asyncio.wait(first, timeout=CONNECT_TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED)
        if connecting.done() and connecting.exception() is None:
            return
        if forbidden.is_set():
            raise Forbidden(f"NATS refuses the credentials of user {service}", param="NATS_URL")
        cause = connecting.exception() if connecting.done() else client.last_error
        waited = time.monotonic() - started
        raise Unavailable(f"no connection to NATS at {_without_secret(nats_url)} within {waited:.0f} s: {cause}")
    finally:
        refusal.cancel()
        if not connecting.done():
            connecting.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await connecting
            with contextlib.suppress(Exception):
                await client.close()


def _without_secret(nats_url: str) -> str:
    scheme, _, rest = nats_url.rpartition("://")
    return f"{scheme}://{rest.rpartition('@')[2]}" if scheme else rest.rpartition("@")[2]


def _refused_subjects(text: str) -> set[str]:
    """The subject of a `permissions violation for … to "…"` error, in lower case as nats-py tells it."""
    _, found, rest = text.lower().partition("permissions violation for ")
    return {rest.split('"')[1]} if found and rest.count('"') >= 2 else set()
