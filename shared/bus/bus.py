"""The bus as services see it. `nats_bus.py` is the real one, `memory_bus.py` the one for tests.

Every hop is bounded and names itself when it times out. `traceparent` and the remaining budget ride in headers: a
budget is sent as milliseconds left and becomes the receiver's own monotonic deadline on arrival.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec
from opentelemetry.context import Context

NO_RESPONDERS = "no_responders"
"""Code of the Unavailable when no subscription takes a request: told at once, unlike a time-out. It speaks of the hop
the asker made itself, so it never travels in an answer."""
BUDGET_HEADER = "Baton-Budget-Ms"
ERROR_HEADER = "Baton-Error"


Sent = msgspec.Struct | bytes
"""What may be sent: a message, or bytes as they are on the hops of tenants, whose clients know no headers of ours."""


@dataclass(frozen=True, slots=True)
class Delivery:
    """A message as it arrived.

    `deadline` is on this process's monotonic clock (None: unbounded); `context` is the sender's OpenTelemetry context,
    to be used as the parent of spans. `stored_id` names a message of a stream, the same at each delivery of it.
    """

    subject: str
    message: Any
    context: Context
    deadline: float | None = None
    stored_id: str = ""

    def remaining_s(self, now: Callable[[], float] = time.monotonic) -> float:
        """Seconds of budget left; infinity when unbounded, never negative."""
        return float("inf") if self.deadline is None else max(0.0, self.deadline - now())


RequestHandler = Callable[[Delivery], Awaitable[Sent]]
"""Answers a request. A raised BatonError travels back in the error header and is raised at the asker."""
MessageHandler = Callable[[Delivery], None]
"""Takes a published message, on the event loop, without blocking or awaiting."""
DurableHandler = Callable[[Delivery], Awaitable[None]]
"""Takes a JetStream message; it is acknowledged when the handler returns, redelivered when it raises."""


class Redeliver(Exception):
    """Raised by a durable handler that is not done, which is no fault: deliver the message again after `pause_s`."""

    def __init__(self, pause_s: float = 0.0) -> None:
        super().__init__(pause_s)
        self.pause_s = pause_s


class Subscription(Protocol):
    async def stop(self) -> None:
        """Take no more messages; returns when handlers in progress have ended."""


class Bus(Protocol):
    async def publish(self, subject: str, message: Sent, *, budget_s: float | None = None) -> None:
        """Core NATS: at most once. Raises Unavailable when not connected, MessageTooLarge over the payload limit."""

    def publish_now(self, subject: str, message: Sent) -> bool:
        """Core NATS, of no trace and without a budget: hand a message over without waiting.

        Answers False, and sends nothing, when it has to wait its turn: then `publish` it. Raises MessageTooLarge over
        the payload limit.
        """

    async def publish_durable(self, subject: str, message: Sent, *, message_id: str) -> None:
        """JetStream: returns when stored; `message_id` deduplicates. Raises Unavailable."""

    async def request(self, subject: str, message: Sent, reply_type: Any, *, timeout_s: float) -> Any:
        """Ask and wait at most `timeout_s`, which is also the budget sent along.

        Raises the BatonError the other side raised; Unavailable naming the subject when nobody listens (code
        NO_RESPONDERS) or no answer comes in time; ProtocolError when the answer does not decode as `reply_type`.
        """

    async def serve(self, subject: str, message_type: Any, handler: RequestHandler, *, queue: str = "") -> Subscription:
        """Answer requests, each in a task of its own. What does not decode is counted, logged and dropped."""

    async def subscribe(self, subject: str, message_type: Any, handler: MessageHandler) -> Subscription:
        """Take published messages in order."""

    async def consume(
        self,
        stream: str,
        subject: str,
        message_type: Any,
        handler: DurableHandler,
        *,
        durable: str,
        slots: asyncio.Semaphore | None = None,
    ) -> Subscription:
        """Take a JetStream subject as the durable consumer `durable` (shared by replicas), creating both if needed.

        Messages are handled one after the other. With `slots` each is handled in a task of its own once it has a slot;
        consumers that share slots get them in turns, and no message goes to a replica while it waits or is handled.
        """

    async def make_stream(self, stream: str, subject: str) -> None:
        """Make a stream, if there is none: what is published before somebody consumes it is kept.

        Raises Unavailable.
        """

    async def backlog(self, stream: str, *, durable: str) -> int:
        """Messages of a stream that its durable consumer is not done with. Raises Unavailable."""

    async def acquire_lease(self, name: str, owner: str, ttl_s: float) -> int | None:
        """Take or renew the lease `name` in NATS KV. Returns its monotonic term, or None while another holds it."""

    async def release_lease(self, name: str, owner: str) -> None:
        """Give the lease up if `owner` holds it."""

    @property
    def connected(self) -> bool: ...

    async def close(self) -> None:
        """Drain: finish handlers in progress, flush, disconnect."""
