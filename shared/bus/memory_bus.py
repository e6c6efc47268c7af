"""The bus inside one process, for pipeline tests: several `MemoryBus` handles on one `MemoryBroker`.

Messages are really encoded, carried with headers and decoded, so a test meets the same errors as on NATS. `faults`
drops, delays and duplicates what core NATS may drop, delay and duplicate.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from shared.bus import envelope
from shared.bus.bus import NO_RESPONDERS, Delivery, DurableHandler, MessageHandler, RequestHandler, Sent, Subscription
from shared.bus.memory_stream import DurableReplica, Parcel, Stream, matches
from shared.bus.streams import spec_of
from shared.bus.subscriptions import BusStats, RequestTasks
from shared.contracts.errors import BatonError, Overloaded, Unavailable

log = logging.getLogger("baton.bus")

DRAIN_TIMEOUT_S = 10.0

Faults = Callable[[str], Iterable[float]]
"""Delays in seconds of the copies of one published message on a subject; empty drops it. None of it touches streams."""


@dataclass(slots=True)
class _Lease:
    owner: str
    term: int
    expires: float


class MemoryBroker:
    """What the NATS server is to the real bus.

    Args:
        faults: decides what happens to each published message and request; None delivers at once.
        clock: monotonic seconds, for leases.
        max_payload: bytes.
    """

    def __init__(
        self,
        faults: Faults | None = None,
        clock: Callable[[], float] = time.monotonic,
        max_payload: int = envelope.MAX_PAYLOAD_BYTES,
    ) -> None:
        self.faults = faults
        self.clock = clock
        self.max_payload = max_payload
        self.up = True
        self.streams: dict[str, Stream] = {}
        self._listeners: list[_Listener] = []
        self._turns: dict[tuple[str, str], int] = {}
        self._leases: dict[str, _Lease] = {}
        self._last_term = 0

    def route(self, parcel: Parcel) -> bool:
        """Hand `parcel` to every matching listener, one per queue group. False when nobody listens."""
        targets = self._targets(parcel.subject)
        for delay in (0.0,) if self.faults is None else self.faults(parcel.subject):
            for listener in targets:
                if delay > 0:
                    asyncio.get_running_loop().call_later(delay, listener.put, parcel)
                else:
                    listener.put(parcel)
        return bool(targets)

    def listen(self, listener: _Listener) -> None:
        self._listeners.append(listener)

    def forget(self, listener: _Listener) -> None:
        if listener in self._listeners:
            self._listeners.remove(listener)

    def acquire(self, name: str, owner: str, ttl_s: float) -> int | None:
        held = self._leases.get(name)
        now = self.clock()
        if held is not None and held.expires > now:
            if held.owner != owner:
                return None
            held.expires = now + ttl_s
            return held.term
        self._last_term += 1
        self._leases[name] = _Lease(owner, self._last_term, now + ttl_s)
        return self._last_term

    def release(self, name: str, owner: str) -> None:
        held = self._leases.get(name)
        if held is not None and held.owner == owner:
            del self._leases[name]

    def stream_of(self, subject: str) -> Stream | None:
        return next((stream for stream in self.streams.values() if matches(stream.subject, subject)), None)

    def _targets(self, subject: str) -> list[_Listener]:
        plain: list[_Listener] = []
        groups: dict[tuple[str, str], list[_Listener]] = {}
        for listener in self._listeners:
            if matches(listener.subject, subject):
                if listener.queue:
                    groups.setdefault((listener.subject, listener.queue), []).append(listener)
                else:
                    plain.append(listener)
        for key, members in groups.items():
            turn = self._turns[key] = self._turns.get(key, -1) + 1
            plain.append(members[turn % len(members)])
        return plain


class _Listener:
    """One subscription: parcels in order through a task, as nats-py does it."""

    def __init__(self, broker: MemoryBroker, subject: str, queue: str, take: Callable[[Parcel], None]) -> None:
        self.subject = subject
        self.queue = queue
        self._broker = broker
        self._take = take
        self._parcels: asyncio.Queue[Parcel] = asyncio.Queue()
        self._stopped = False
        self.tasks = RequestTasks()
        self._loop = asyncio.create_task(self._run())
        broker.listen(self)

    def put(self, parcel: Parcel) -> None:
        if not self._stopped:
            self._parcels.put_nowait(parcel)

    async def stop(self) -> None:
        """Take no more messages; those already here are handled."""
        if self._stopped:
            return
        self._stopped = True
        self._broker.forget(self)
        await self._parcels.join()
        self._loop.cancel()
        await self.tasks.drain(DRAIN_TIMEOUT_S)

    async def _run(self) -> None:
        while True:
            parcel = await self._parcels.get()
            try:
                self._take(parcel)
            finally:
                self._parcels.task_done()


class MemoryBus:
    """One service's handle on a `MemoryBroker`; the same protocol as `NatsBus`."""

    def __init__(self, broker: MemoryBroker, service: str = "test") -> None:
        self._broker = broker
        self._service = service
        self._subscriptions: list[Subscription] = []
        self._closed = False
        self.stats = BusStats()

    @property
    def connected(self) -> bool:
        return self._broker.up and not self._closed

    async def publish(self, subject: str, message: Sent, *, budget_s: float | None = None) -> None:
        """As `Bus.publish`."""
        parcel = Parcel(subject, *envelope.outgoing(subject, message, budget_s, self._broker.max_payload))
        self._require_connection(subject)
        self._broker.route(parcel)

    def publish_now(self, subject: str, message: Sent) -> bool:
        """As `Bus.publish_now`."""
        payload = envelope.payload_of(subject, message, self._broker.max_payload)
        if self.connected:
            self._broker.route(Parcel(subject, payload, None))
        return self.connected

    async def publish_durable(self, subject: str, message: Sent, *, message_id: str) -> None:
        """As `Bus.publish_durable`."""
        parcel = Parcel(subject, *envelope.outgoing(subject, message, None, self._broker.max_payload))
        self._require_connection(subject)
        stream = self._broker.stream_of(subject)
        if stream is None:
            raise Unavailable(f"{subject}: nobody listens", param=subject, retry_after_s=1.0, code=NO_RESPONDERS)
        if message_id not in stream.ids:
            stream.ids.add(message_id)
            stream.parcels.append(parcel)
            stream.grown.set()

    async def request(self, subject: str, message: Sent, reply_type: Any, *, timeout_s: float) -> Any:
        """As `Bus.request`."""
        payload, headers = envelope.outgoing(subject, message, timeout_s, self._broker.max_payload)
        self._require_connection(subject)
        reply: asyncio.Future[Parcel] = asyncio.get_running_loop().create_future()
        if not self._broker.route(Parcel(subject, payload, headers, reply)):
            raise Unavailable(f"{subject}: nobody listens", param=subject, retry_after_s=1.0, code=NO_RESPONDERS)
        try:
            answer = await asyncio.wait_for(reply, timeout_s)
        except TimeoutError as exc:
            raise Unavailable(f"{subject} did not answer within {timeout_s:g} s", param=subject) from exc
        return envelope.read_reply(subject, answer.payload, answer.headers, reply_type)

    async def serve(self, subject: str, message_type: Any, handler: RequestHandler, *, queue: str = "") -> Subscription:
        """As `Bus.serve`."""
        raw = message_type is bytes

        def take(parcel: Parcel) -> None:
            if parcel.reply is None:
                self.stats.undecodable += 1
                return
            delivery = self._open(parcel, message_type)
            if delivery is None:
                return
            if delivery.remaining_s() <= 0:
                self.stats.expired += 1
            elif listener.tasks.full:
                self.stats.refused += 1
                busy = Overloaded(f"{parcel.subject}: too many requests at once", retry_after_s=1.0)
                _reply(parcel, *envelope.error_answer(busy, raw))
            else:
                listener.tasks.start(self._answer(parcel, handler, delivery, raw))

        self._require_connection(subject)
        listener = _Listener(self._broker, subject, queue, take)
        return self._remember(listener)

    async def subscribe(self, subject: str, message_type: Any, handler: MessageHandler) -> Subscription:
        """As `Bus.subscribe`."""

        def take(parcel: Parcel) -> None:
            delivery = self._open(parcel, message_type)
            if delivery is None:
                return
            try:
                handler(delivery)
            except Exception:
                self.stats.handler_failures += 1
                log.exception("handler of %s failed", parcel.subject)

        self._require_connection(subject)
        return self._remember(_Listener(self._broker, subject, "", take))

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
        """As `Bus.consume`."""
        await self.make_stream(stream, subject)
        kept = self._broker.streams[stream]
        kept.places.setdefault(durable, 0)
        kept.again.setdefault(durable, deque())
        return self._remember(DurableReplica(self.stats, kept, subject, durable, message_type, handler, slots))

    async def make_stream(self, stream: str, subject: str) -> None:
        """As `Bus.make_stream`."""
        self._require_connection(subject)
        self._broker.streams.setdefault(stream, Stream(spec_of(stream, subject).subject))

    async def backlog(self, stream: str, *, durable: str) -> int:
        """As `Bus.backlog`."""
        self._require_connection(stream)
        kept = self._broker.streams.get(stream)
        if kept is None or durable not in kept.places:
            raise Unavailable(f"stream {stream} has no consumer {durable}", param=stream, retry_after_s=1.0)
        return len(kept.parcels) - kept.done[durable]

    async def acquire_lease(self, name: str, owner: str, ttl_s: float) -> int | None:
        """As `Bus.acquire_lease`, without rounding the time to live."""
        self._require_connection(f"lease {name}")
        return self._broker.acquire(name, owner, ttl_s)

    async def release_lease(self, name: str, owner: str) -> None:
        """As `Bus.release_lease`."""
        self._require_connection(f"lease {name}")
        self._broker.release(name, owner)

    async def close(self) -> None:
        """Stop every subscription of this handle; handlers in progress finish."""
        for subscription in reversed(self._subscriptions):
            await subscription.stop()
        self._subscriptions.clear()
        self._closed = True

    def _require_connection(self, hop: str) -> None:
        if not self.connected:
            raise Unavailable(f"{hop}: not connected to NATS", param=hop, retry_after_s=1.0)

    def _remember(self, subscription: Subscription) -> Subscription:
        self._subscriptions.append(subscription)
        return subscription

    def _open(self, parcel: Parcel, message_type: Any) -> Delivery | None:
        try:
            return envelope.incoming(parcel.subject, parcel.payload, parcel.headers, message_type)
        except BatonError as exc:
            self.stats.undecodable += 1
            log.warning("dropped a message on %s: %s", parcel.subject, exc)
            return None

    async def _answer(self, parcel: Parcel, handler: RequestHandler, delivery: Delivery, raw: bool) -> None:
        _reply(parcel, *await envelope.answer(handler, delivery, self._broker.max_payload, raw))


def _reply(parcel: Parcel, payload: bytes, headers: envelope.Headers | None) -> None:
    if parcel.reply is not None and not parcel.reply.done():
        parcel.reply.set_result(Parcel(parcel.subject, payload, headers))
