"""A durable JetStream consumer: pulls, hands over what comes, acknowledges what was handled.

One message at a time; or with slots several, each in a task, kept in progress at the server until it is done with.

nats-py's own `fetch` waits for a full batch until its time-out; this pull hands each message over as it arrives.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import Awaitable, Callable
from typing import Any

import nats.errors
import nats.js.errors
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.js import JetStreamContext
from nats.js.api import AckPolicy, ConsumerConfig, DiscardPolicy, RetentionPolicy, StorageType, StreamConfig
from opentelemetry import context as otel_context

from shared.bus import envelope
from shared.bus.bus import DurableHandler, Redeliver
from shared.bus.streams import StreamSpec
from shared.bus.subscriptions import BusStats, take_slot
from shared.contracts.errors import ProtocolError

log = logging.getLogger("baton.bus")

ACK_WAIT_S = 30.0
SLOT_ACK_WAIT_S = 10.0
"""With slots: what a dead process had in hand comes to another after so long, as a living one speaks up three times."""
PULL_BATCH = 64
PULL_EXPIRES_S = 5.0
SLOT_PULL_EXPIRES_S = 30.0
"""Of a pull for one message, by one of many consumers that mostly have nothing to do."""
RETRY_PAUSE_S = 0.5
MAX_REDELIVERY_PAUSE_S = 30.0
_NAME_IN_USE = 10058
_PULL_ENDED = {"404", "408"}
"""Statuses that end a pull in the ordinary way: no messages, expired. Any other (503: no such consumer) is a fault."""


class DurableConsumer:
    """One durable consumer of one stream. `start` makes both if needed."""

    def __init__(
        self,
        client: Client,
        js: JetStreamContext,
        spec: StreamSpec,
        subject: str,
        durable: str,
        message_type: Any,
        handler: DurableHandler,
        stats: BusStats,
        flush: Callable[[Client], Awaitable[None]],
        slots: asyncio.Semaphore | None = None,
    ) -> None:
        self._client = client
        self._flush = flush
        self._js = js
        self._spec = spec
        self._subject = subject
        self._durable = durable
        self._message_type = message_type
        self._handler = handler
        self._stats = stats
        self._next_subject = f"$JS.API.CONSUMER.MSG.NEXT.{spec.name}.{durable}"
        self._waiting: asyncio.Queue[Msg | None] = asyncio.Queue()
        self._slots = slots
        # one that waits for a slot keeps those behind it from other replicas
        self._batch = PULL_BATCH if slots is None else 1
        self._expires_s = PULL_EXPIRES_S if slots is None else SLOT_PULL_EXPIRES_S
        self._running: set[asyncio.Task[None]] = set()
        self._stopping = False
        self._ended = asyncio.Event()
        self._inbox: Subscription | None = None
        self._loop: asyncio.Task[None] | None = None

    async def start(self) -> None:
        await self._make()
        inbox = self._client.new_inbox()
        self._inbox = await self._client.subscribe(inbox, cb=self._arrived)
        self._loop = asyncio.create_task(self._run(inbox))

    async def stop(self) -> None:
        """Take nothing new; messages in hand are finished first, those behind them go back to the stream."""
        if self._stopping:
            return
        self._stopping = True
        self._ended.set()
        self._waiting.put_nowait(None)
        if self._inbox is not None:
            # The server must know before we return: it would still answer the pull of a consumer that has gone.
            with contextlib.suppress(nats.errors.Error, OSError):
                await self._inbox.drain()  # type: ignore[no-untyped-call]
                await self._flush(self._client)
        if self._loop is not None:
            await self._loop
        if self._running:
            await asyncio.wait(self._running)
        while not self._waiting.empty():
            if (msg := self._waiting.get_nowait()) is not None and _status(msg) is None:
                await self._settle(msg.nak())

    def pull_again(self) -> None:
        """Give up the pull under way and send another."""
        self._waiting.put_nowait(None)

    async def _make(self) -> None:
        await make_stream(self._js, self._spec)
        await self._js.add_consumer(
            self._spec.name,
            ConsumerConfig(
                durable_name=self._durable,
                ack_policy=AckPolicy.EXPLICIT,
                ack_wait=ACK_WAIT_S if self._slots is None else SLOT_ACK_WAIT_S,
                filter_subject=self._subject,
                max_ack_pending=1024,
            ),
        )

    async def _arrived(self, msg: Msg) -> None:
        self._waiting.put_nowait(msg)

    async def _run(self, inbox: str) -> None:
        """Pull in batches: the next pull is sent when the last is used up, ended by the server, or unanswered."""
        pull = json.dumps({"batch": self._batch, "expires": int(self._expires_s * 1e9)}).encode()
        while not self._stopping:
            try:
                await self._client.publish(self._next_subject, pull, reply=inbox)
                await self._take_batch()
            except (nats.errors.Error, OSError) as exc:
                await self._recover(exc)

    async def _take_batch(self) -> None:
        for _ in range(self._batch):
            try:
                msg = await asyncio.wait_for(self._waiting.get(), self._expires_s + 1.0)
            except TimeoutError:
                return  # the connection was lost in between, and the pull with it
            if msg is None:
                return
            status = _status(msg)
            if status in _PULL_ENDED:
                return
            if status is not None:
                raise nats.js.errors.APIError(code=int(status), description=_description(msg))
            if self._slots is None:
                await self._handle(msg)
            else:
                await self._begin(msg, self._slots)
            if self._stopping:
                return

    async def _begin(self, msg: Msg, slots: asyncio.Semaphore) -> None:
        """Handle a message in a task of its own, once there is a slot."""
        keeping = asyncio.create_task(self._keep(msg))
        if not await take_slot(slots, self._ended):
            keeping.cancel()
            await self._settle(msg.nak())
            return

        async def handled() -> None:
            try:
                await self._handle(msg)
            finally:
                keeping.cancel()
                slots.release()

        task = asyncio.create_task(handled())
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def _keep(self, msg: Msg) -> None:
        """Tell the server again and again that the message is in hand."""
        while True:
            await asyncio.sleep(SLOT_ACK_WAIT_S / 3)
            await self._settle(msg.in_progress())

    async def _handle(self, msg: Msg) -> None:
        try:
            delivery = envelope.incoming(
                msg.subject, msg.data, msg.headers, self._message_type, stored_id=_stored_id(msg)
            )
        except ProtocolError as exc:
            self._stats.undecodable += 1
            log.warning("dropped a message of stream %s: %s", self._spec.name, exc)
            await self._settle(msg.term())
            return
        token = otel_context.attach(delivery.context)
        try:
            await self._handler(delivery)
        except Redeliver as again:
            await self._settle(msg.nak(delay=again.pause_s or None))
        except Exception:
            self._stats.handler_failures += 1
            pause = min(MAX_REDELIVERY_PAUSE_S, RETRY_PAUSE_S * 2 ** min(10, msg.metadata.num_delivered - 1))
            log.exception("handler of stream %s failed; again in %.1f s", self._spec.name, pause)
            await self._settle(msg.nak(delay=pause))
        else:
            await self._settle(msg.ack())
        finally:
            otel_context.detach(token)

    async def _settle(self, verdict: Any) -> None:
        # A lost verdict means redelivery, which handlers bear by being idempotent.
        with contextlib.suppress(nats.errors.Error, OSError):
            await verdict

    async def _recover(self, exc: Exception) -> None:
        """After an error of the pull: wait, and make the stream anew if a server without its store came back."""
        log.warning("pull from stream %s failed: %r", self._spec.name, exc)
        await asyncio.sleep(RETRY_PAUSE_S)
        if self._client.is_connected and not self._stopping:
            with contextlib.suppress(nats.errors.Error, OSError):
                await self._make()


async def make_stream(js: JetStreamContext, spec: StreamSpec) -> None:
    """Make a stream, if there is none. Raises nats.errors.Error."""
    config = StreamConfig(
        name=spec.name,
        subjects=[spec.subject],
        retention=RetentionPolicy.WORK_QUEUE if spec.work_queue else RetentionPolicy.LIMITS,
        max_age=spec.max_age_s,
        max_bytes=spec.max_bytes,
        max_msg_size=spec.max_message_bytes,
        discard=DiscardPolicy.NEW if spec.refuse_when_full else DiscardPolicy.OLD,
        duplicate_window=spec.duplicate_window_s,
        storage=StorageType.FILE,
    )
    try:
        await js.add_stream(config)
    except nats.js.errors.BadRequestError as exc:
        # Made earlier with other limits: as good.
        if exc.err_code != _NAME_IN_USE:
            raise


def _status(msg: Msg) -> str | None:
    """The status of a control message of the server; None for a stream's message, which has where to acknowledge it,
    whatever headers its sender gave it."""
    return (msg.headers or {}).get("Status") if not msg.data and not msg.reply else None


def _stored_id(msg: Msg) -> str:
    """Number in its stream and time of arrival: a stream made anew counts from 1 again."""
    return f"{msg.metadata.sequence.stream}-{int(msg.metadata.timestamp.timestamp() * 1e6)}"


def _description(msg: Msg) -> str:
    return (msg.headers or {}).get("Description", "")
