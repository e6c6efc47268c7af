"""The bus over NATS. Foreign exceptions become Baton errors here; nothing above knows nats-py.

Messages are taken where the client reads them, without its queues and tasks. Requests run in tasks, published
messages in order on the event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import Any

import nats.errors
import nats.js.errors
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription as NatsSubscription

from shared.bus import envelope
from shared.bus.bus import NO_RESPONDERS, Delivery, DurableHandler, MessageHandler, RequestHandler, Sent, Subscription
from shared.bus.nats_client import AtOnce, DirectClient
from shared.bus.nats_consumer import DurableConsumer, make_stream
from shared.bus.nats_lease import LeaseBucket
from shared.bus.streams import spec_of
from shared.bus.subscriptions import BusStats, RequestTasks
from shared.contracts.errors import BatonError, Forbidden, Overloaded, ProtocolError, Unavailable

log = logging.getLogger("baton.bus")

DRAIN_TIMEOUT_S = 10.0
FLUSH_TIMEOUT_S = 5
JETSTREAM_TIMEOUT_S = 5.0


class NatsBus:
    """One connection to NATS as one service. Made by `connect_bus`."""

    def __init__(self, client: DirectClient, service: str, stats: BusStats, refused_subjects: set[str]) -> None:
        self._client = client
        self._js = client.jetstream(timeout=JETSTREAM_TIMEOUT_S)
        self._leases = LeaseBucket(self._js)
        self._service = service
        self._subscriptions: list[Subscription] = []
        self._refused_subjects = refused_subjects
        self.stats = stats

    @property
    def connected(self) -> bool:
        return bool(self._client.is_connected)

    async def publish(self, subject: str, message: Sent, *, budget_s: float | None = None) -> None:
        """Core NATS: at most once. Raises Unavailable when not connected, ProtocolError over the payload limit."""
        payload, headers = envelope.outgoing(subject, message, budget_s, self._client.max_payload)
        self._require_connection(subject)
        try:
            await self._client.publish(subject, payload, headers=headers)
        except nats.errors.Error as exc:
            raise self._mapped(exc, subject) from exc

    def publish_now(self, subject: str, message: Sent) -> bool:
        """As `Bus.publish_now`: a third of the time `publish` takes, which wakes two tasks and makes three futures."""
        return self._client.write_at_once(subject, envelope.payload_of(subject, message, self._client.max_payload))

    async def publish_durable(self, subject: str, message: Sent, *, message_id: str) -> None:
        """JetStream: returns when stored; `message_id` deduplicates within the stream's window. Raises Unavailable."""
        payload, headers = envelope.outgoing(subject, message, None, self._client.max_payload)
        self._require_connection(subject)
        try:
            await self._js.publish(subject, payload, headers={**(headers or {}), "Nats-Msg-Id": message_id})
        except nats.errors.Error as exc:
            raise self._mapped(exc, subject) from exc

    async def request(self, subject: str, message: Sent, reply_type: Any, *, timeout_s: float) -> Any:
        """Ask and wait at most `timeout_s` seconds, which is also the budget sent along. Errors as in `Bus.request`."""
        payload, headers = envelope.outgoing(subject, message, timeout_s, self._client.max_payload)
        self._require_connection(subject)
        try:
            reply = await self._client.request(subject, payload, timeout=timeout_s, headers=headers)
        except nats.errors.TimeoutError as exc:
            if subject.lower() in self._refused_subjects:
                raise Forbidden(f"NATS refuses user {self._service} to publish to {subject}", param=subject) from exc
            raise Unavailable(f"{subject} did not answer within {timeout_s:g} s", param=subject) from exc
        except nats.errors.Error as exc:
            raise self._mapped(exc, subject) from exc
        return envelope.read_reply(subject, reply.data, reply.headers, reply_type)

    async def serve(self, subject: str, message_type: Any, handler: RequestHandler, *, queue: str = "") -> Subscription:
        """Answer requests, each in a task of its own. What does not decode is counted, logged and dropped."""
        tasks = RequestTasks()
        raw = message_type is bytes

        def on_request(msg: Msg) -> None:
            if not envelope.may_answer(msg.reply, raw):
                self.stats.undecodable += 1
                log.warning("request on %s names no service inbox; dropped", msg.subject)
                return
            delivery = self._open(msg, message_type)
            if delivery is None:
                return
            if delivery.remaining_s() <= 0:
                self.stats.expired += 1
            elif tasks.full:
                self.stats.refused += 1
                busy = Overloaded(f"{subject}: too many requests at once", retry_after_s=1.0)
                tasks.start(self._reply(msg, *envelope.error_answer(busy, raw)))
            else:
                tasks.start(self._answer(msg, handler, delivery, raw))

        inner = await self._subscribe(subject, queue, on_request)
        return self._remember(_Served(inner, tasks))

    async def subscribe(self, subject: str, message_type: Any, handler: MessageHandler) -> Subscription:
        """Take published messages in order."""

        def on_message(msg: Msg) -> None:
            delivery = self._open(msg, message_type)
            if delivery is not None:
                handler(delivery)

        inner = await self._subscribe(subject, "", on_message)
        return self._remember(_Served(inner, RequestTasks()))

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
        """Take a JetStream subject as the durable consumer `durable`, creating stream and consumer if needed.

        Messages are handled one after the other, with `slots` concurrently; a failed one comes again after a pause.
        Raises Unavailable.
        """
        consumer = DurableConsumer(
            self._client,
            self._js,
            spec_of(stream, subject),
            subject,
            durable,
            message_type,
            handler,
            self.stats,
            flush,
            slots,
        )
        self._require_connection(subject)
        try:
            await consumer.start()
        except nats.errors.Error as exc:
            raise self._mapped(exc, subject) from exc
        return self._remember(consumer)

    async def make_stream(self, stream: str, subject: str) -> None:
        """Make a stream, if there is none: what is published before somebody consumes it is kept.

        Raises Unavailable.
        """
        self._require_connection(subject)
        try:
            await make_stream(self._js, spec_of(stream, subject))
        except nats.errors.Error as exc:
            raise self._mapped(exc, subject) from exc

    async def backlog(self, stream: str, *, durable: str) -> int:
        """Messages of a stream that its durable consumer is not done with. Raises Unavailable."""
        self._require_connection(stream)
        try:
            found = await self._js.consumer_info(stream, durable)
        except nats.errors.Error as exc:
            raise self._mapped(exc, stream) from exc
        return (found.num_pending or 0) + (found.num_ack_pending or 0)

    async def acquire_lease(self, name: str, owner: str, ttl_s: float) -> int | None:
        """Take or renew the lease `name`. Returns its monotonic term, or None while another holds it.

        The server measures the time to live, in whole seconds (at least 1, rounded up), so no two clocks are compared.
        """
        self._require_connection(f"lease {name}")
        try:
            return await self._leases.acquire(name, owner, ttl_s)
        except nats.errors.Error as exc:
            raise self._mapped(exc, f"lease {name}") from exc

    async def release_lease(self, name: str, owner: str) -> None:
        """Give the lease up if `owner` holds it."""
        self._require_connection(f"lease {name}")
        try:
            await self._leases.release(name, owner)
        except nats.errors.Error as exc:
            raise self._mapped(exc, f"lease {name}") from exc

    async def close(self) -> None:
        """Drain: take nothing new, finish handlers in progress, flush, disconnect. Never raises for a dead server."""
        for subscription in reversed(self._subscriptions):
            await subscription.stop()
        self._subscriptions.clear()
        with contextlib.suppress(TimeoutError, nats.errors.Error, OSError):
            if self._client.is_connected:
                await flush(self._client)
        # nats-py writes once more while it closes, which a connection just lost does not bear.
        with contextlib.suppress(nats.errors.Error, OSError, RuntimeError):  # the last is uvloop's
            await self._client.close()

    def resume(self) -> None:
        """After a reconnect: pull anew, since the pulls under way were lost with the connection."""
        for subscription in self._subscriptions:
            if isinstance(subscription, DurableConsumer):
                subscription.pull_again()

    def _mapped(self, exc: Exception, hop: str) -> BatonError:
        if isinstance(exc, nats.errors.NoRespondersError | nats.js.errors.NoStreamResponseError):
            return Unavailable(f"{hop}: nobody listens", param=hop, retry_after_s=1.0, code=NO_RESPONDERS)
        if isinstance(exc, nats.errors.MaxPayloadError):
            return ProtocolError(f"{hop}: message over the payload limit", param=hop)
        if isinstance(exc, nats.errors.TimeoutError):
            # A request NATS refuses is never answered; the refusal comes by another way.
            if refused := sorted(s for s in self._refused_subjects if s.startswith(("$js.", "$kv."))):
                return Forbidden(f"{hop}: NATS refuses user {self._service} {', '.join(refused)}", param=hop)
            return Unavailable(f"{hop}: NATS did not answer in time", param=hop, retry_after_s=1.0)
        return Unavailable(f"{hop}: {exc}", param=hop, retry_after_s=1.0)

    def _require_connection(self, hop: str) -> None:
        # nats-py would queue while it reconnects; a caller with a budget is better served by a prompt no.
        if not self._client.is_connected:
            raise Unavailable(f"{hop}: not connected to NATS", param=hop, retry_after_s=1.0)

    def _remember(self, subscription: Subscription) -> Subscription:
        self._subscriptions.append(subscription)
        return subscription

    async def _subscribe(self, subject: str, queue: str, take: Callable[[Msg], None]) -> NatsSubscription:
        def guarded(msg: Msg) -> None:
            try:
                take(msg)
            except Exception:
                self.stats.handler_failures += 1
                log.exception("handler of %s failed", msg.subject)

        self._require_connection(subject)
        try:
            inner = await self._client.subscribe(subject, queue=queue, future=AtOnce(guarded))  # type: ignore[arg-type]
            await flush(self._client)
        except nats.errors.Error as exc:
            raise self._mapped(exc, subject) from exc
        if subject.lower() in self._refused_subjects:
            raise Forbidden(f"NATS refuses user {self._service} the subscription to {subject}", param=subject)
        return inner

    def _open(self, msg: Msg, message_type: Any) -> Delivery | None:
        try:
            return envelope.incoming(msg.subject, msg.data, msg.headers, message_type)
        except BatonError as exc:
            self.stats.undecodable += 1
            log.warning("dropped a message on %s: %s", msg.subject, exc)
            return None

    async def _answer(self, msg: Msg, handler: RequestHandler, delivery: Delivery, raw: bool) -> None:
        payload, headers = await envelope.answer(handler, delivery, self._client.max_payload, raw)
        await self._reply(msg, payload, headers)

    async def _reply(self, msg: Msg, payload: bytes, headers: envelope.Headers | None) -> None:
        try:
            await self._client.publish(msg.reply, payload, headers=headers)
        except nats.errors.Error as exc:
            log.warning("answer to %s not sent: %r", msg.subject, exc)


class _Served:
    """A core subscription and the request tasks it started."""

    def __init__(self, inner: NatsSubscription, tasks: RequestTasks) -> None:
        self._inner = inner
        self._tasks = tasks
        self._stopped = False

    async def stop(self) -> None:
        if self._stopped:
            return
        self._stopped = True
        try:
            await asyncio.wait_for(self._inner.drain(), DRAIN_TIMEOUT_S)  # type: ignore[no-untyped-call]
        except (TimeoutError, nats.errors.Error, OSError) as exc:
            log.debug("subscription not drained: %r", exc)
        await self._tasks.drain(DRAIN_TIMEOUT_S)


async def flush(client: Client) -> None:
    """Return when the server has taken everything sent so far. Raises nats.errors.Error.

    nats-py writes the PING of a flush straight to the socket, past commands that still wait for its flusher task; by
    the end of a first round trip the flusher has run, so the second one is ordered behind them.
    """
    await client.flush(FLUSH_TIMEOUT_S)
    await client.flush(FLUSH_TIMEOUT_S)
