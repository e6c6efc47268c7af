"""A durable JetStream consumer: pulls, hands over one message at a time, acknowledges what was handled."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import Any

import nats.errors
import nats.js.errors
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.js import JetStreamContext
from nats.js.api import AckPolicy, ConsumerConfig, RetentionPolicy, StorageType, StreamConfig
from opentelemetry import context as otel_context

from shared.bus import envelope
from shared.bus.bus import DurableHandler
from shared.bus.streams import StreamSpec
from shared.bus.subscriptions import BusStats
from shared.contracts.errors import ProtocolError

log = logging.getLogger("baton.bus")

ACK_WAIT_S = 30.0
FETCH_BATCH = 64
FETCH_TIMEOUT_S = 5.0
RETRY_PAUSE_S = 0.5
MAX_REDELIVERY_PAUSE_S = 30.0
_NAME_IN_USE = 10058


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
    ) -> None:
        self._client = client
        self._js = js
        self._spec = spec
        self._subject = subject
        self._durable = durable
        self._message_type = message_type
        self._handler = handler
        self._stats = stats
        self._stopping = asyncio.Event()
        self._loop: asyncio.Task[None] | None = None
        self._pull: JetStreamContext.PullSubscription | None = None

    async def start(self) -> None:
        await self._make()
        self._pull = await self._js.pull_subscribe_bind(consumer=self._durable, stream=self._spec.name)
        self._loop = asyncio.create_task(self._run())

    async def stop(self) -> None:
        """Take nothing new; the message in hand is finished first."""
        if self._stopping.is_set():
            return
        self._stopping.set()
        if self._loop is not None:
            await self._loop
        if self._pull is not None:
            with contextlib.suppress(nats.errors.Error, OSError):
                await self._pull.unsubscribe()

    async def _make(self) -> None:
        stream = StreamConfig(
            name=self._spec.name,
            subjects=[self._spec.subject],
            retention=RetentionPolicy.WORK_QUEUE if self._spec.work_queue else RetentionPolicy.LIMITS,
            max_age=self._spec.max_age_s,
            max_bytes=self._spec.max_bytes,
            duplicate_window=self._spec.duplicate_window_s,
            storage=StorageType.FILE,
        )
        try:
            await self._js.add_stream(stream)
        except nats.js.errors.BadRequestError as exc:
            # Made earlier with other limits: as good.
            if exc.err_code != _NAME_IN_USE:
                raise
        await self._js.add_consumer(
            self._spec.name,
            ConsumerConfig(
                durable_name=self._durable,
                ack_policy=AckPolicy.EXPLICIT,
                ack_wait=ACK_WAIT_S,
                filter_subject=self._subject,
                max_ack_pending=1024,
            ),
        )

    async def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                messages = await self._fetch()
            except nats.errors.TimeoutError:
                continue
            except (nats.errors.Error, OSError) as exc:
                await self._recover(exc)
                continue
            for index, msg in enumerate(messages):
                if self._stopping.is_set():
                    await self._give_back(messages[index:])
                    return
                await self._handle(msg)

    async def _fetch(self) -> list[Msg]:
        """One pull, given up at once when stopping."""
        assert self._pull is not None
        fetching = asyncio.ensure_future(self._pull.fetch(FETCH_BATCH, FETCH_TIMEOUT_S))
        stopping = asyncio.ensure_future(self._stopping.wait())
        try:
            await asyncio.wait({fetching, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if fetching.done():
                return fetching.result()
            return []
        finally:
            stopping.cancel()
            if not fetching.done():
                fetching.cancel()
                with contextlib.suppress(asyncio.CancelledError, Exception):
                    await fetching

    async def _handle(self, msg: Msg) -> None:
        try:
            delivery = envelope.incoming(msg.subject, msg.data, msg.headers, self._message_type)
        except ProtocolError as exc:
            self._stats.undecodable += 1
            log.warning("dropped a message of stream %s: %s", self._spec.name, exc)
            await self._settle(msg.term())
            return
        token = otel_context.attach(delivery.context)
        try:
            await self._handler(delivery)
        except Exception:
            self._stats.handler_failures += 1
            pause = min(MAX_REDELIVERY_PAUSE_S, RETRY_PAUSE_S * 2 ** min(10, msg.metadata.num_delivered - 1))
            log.exception("handler of stream %s failed; again in %.1f s", self._spec.name, pause)
            await self._settle(msg.nak(delay=pause))
        else:
            await self._settle(msg.ack())
        finally:
            otel_context.detach(token)

    async def _give_back(self, messages: list[Msg]) -> None:
        for msg in messages:
            await self._settle(msg.nak())

    async def _settle(self, verdict: Any) -> None:
        # A lost verdict means redelivery, which handlers bear by being idempotent.
        with contextlib.suppress(nats.errors.Error, OSError):
            await verdict

    async def _recover(self, exc: Exception) -> None:
        """After an error of the pull: wait, and make the stream anew if a server without its store came back."""
        log.warning("pull from stream %s failed: %r", self._spec.name, exc)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._stopping.wait(), RETRY_PAUSE_S)
        if self._client.is_connected and not self._stopping.is_set():
            with contextlib.suppress(nats.errors.Error, OSError):
                await self._make()
