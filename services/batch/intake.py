"""Lines that tenants publish over NATS: each becomes an item of its tenant's standing batch, or a result that says why
not. None is lost, and none is taken for two.

Whose line it is says the stream it came from, which only that tenant's NATS user can publish to; nothing in the line
does. A message delivered again finds the number it was given before, so a crash anywhere in between changes nothing.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path

import msgspec

from services.batch.output_files import result_line
from services.batch.queue_results import ResultsDesk
from services.batch.records import QUEUE_BATCH, ItemBody, ItemResult, Put
from services.batch.store import BatchStore
from services.batch.validation import Line, LineFault, custom_id_of, parse_line
from shared.bus.bus import Bus, Delivery, Redeliver, Subscription
from shared.bus.streams import submit_stream
from shared.contracts import subjects
from shared.contracts.batch_messages import BatchItem
from shared.contracts.errors import BatonError, Overloaded, SettingsError, Unavailable
from shared.contracts.ids import TenantId, is_id
from shared.ingress.prompt_codec import SHORT_BODY_BYTES
from shared.ingress.served_models import ServedModels
from shared.lifecycle.tasks import end_tasks, every

log = logging.getLogger("baton.batch")

DURABLE = "batch"
TRIM_EVERY = 100
"""After so many lines of a tenant its oldest results are looked at: more than may be kept go."""
AWAY_PAUSE_S = 1.0
LOOK_S = 2.0
"""How often the list of tenants is looked at. A change is taken up once it is as old: NATS must have read its part."""

_FULL = {
    "over_limit": LineFault(
        "token_limit_exceeded", "you have too many prompt tokens waiting; send this line again later"
    ),
    "over_storage": LineFault(
        "storage_limit_exceeded", "you store too much: delete files, or send this line when older results are gone"
    ),
    "full": LineFault("queue_full", "you have too many lines waiting; send this line again later"),
}


TokenLimit = Callable[[TenantId, str], Awaitable[int]]
"""How many prompt tokens a tenant that asks for this model may have waiting over all its batches; 0 = any number."""


class Intake:
    """The queue's door; an async context manager.

    Args:
        token_limit: raises what policy refuses the tenant with.
        max_lines: most lines of one tenant waiting.
        tenants: file with the JSON list of tenants that have a NATS user; None: there are none.
        clock: unix seconds.
    """

    def __init__(
        self,
        bus: Bus,
        store: BatchStore,
        models: ServedModels,
        token_limit: TokenLimit,
        tenants: Path | None,
        *,
        max_lines: int,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._bus = bus
        self._store = store
        self._models = models
        self._token_limit = token_limit
        self._max_lines = max_lines
        self._file = tenants
        self._clock = clock
        self._desk = ResultsDesk(store.queue, self._untaken)
        self._lines: dict[TenantId, Subscription] = {}
        self._results: Subscription | None = None
        self._turn = asyncio.Lock()
        self._watching: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Intake:
        """Take lines and answer for results. Raises SettingsError, Unavailable."""
        self._results = await self._bus.serve(subjects.ANY_BATCH_RESULTS, bytes, self._on_results, queue=DURABLE)
        await self._follow(_listed(self._file))
        self._watching = asyncio.create_task(every(LOOK_S, self._look, log))
        return self

    async def __aexit__(self, *exc: object) -> None:
        """Take nothing new; the line in hand is finished."""
        if self._watching is not None:
            await end_tasks([self._watching])
        await self._follow(())
        if self._results is not None:
            await self._results.stop()

    # ------------------------------------------------------------------------------------------ lines

    async def _on_line(self, delivery: Delivery) -> None:
        """Take one line. Raises Unavailable while Redis or NATS does not answer, and Redeliver while policy does not:
        then it is delivered again."""
        tenant, line = _tenant_of(delivery), bytes(delivery.message)
        if _stored_us(delivery) < await self._store.purges.purged_us(tenant):
            return  # it came before a purge
        try:
            parsed = await _parsed(line)
            custom_id, fault = parsed.custom_id, None
        except LineFault as exc:
            parsed, custom_id, fault = None, custom_id_of(line), exc
        slot = await self._store.queue.slot(tenant, delivery.stored_id, custom_id, int(self._clock()))
        if slot.number % TRIM_EVERY == 0:
            await self._store.queue.trim(tenant)
        if slot.duplicate:
            fault = LineFault("duplicate_custom_id", "an earlier line of yours has this custom_id too", "custom_id")
        if parsed is not None and fault is None:
            fault = await self._keep(tenant, slot.number, parsed)
        if fault is not None:
            await self._refuse(tenant, slot.number, custom_id, fault)
            return
        item = BatchItem(tenant=tenant, batch_id=QUEUE_BATCH, number=slot.number, custom_id=custom_id)
        name = f"{QUEUE_BATCH}-{tenant}-{delivery.stored_id}"
        await self._bus.publish_durable(subjects.batch_item(tenant), item, message_id=name)

    async def _keep(self, tenant: TenantId, number: int, line: Line) -> LineFault | None:
        """Store the line's body to be run; why not, if it is not to be."""
        try:
            model = self._models.get(line.request.model)
            tokens = len((await model.codec.encode(line.request))[0])
            limit = await self._token_limit(tenant, model.name)
        except (Unavailable, Overloaded) as exc:
            raise Redeliver(AWAY_PAUSE_S) from exc
        except BatonError as exc:
            return LineFault(exc.code, exc.message, f"body.{exc.param}" if exc.param else "body")
        except Exception as exc:
            return _unexpected(exc)
        body = ItemBody(line.custom_id, line.url, line.body, tokens)
        found = await self._store.queue.put_body(tenant, number, body, tokens_limit=limit, lines_limit=self._max_lines)
        if (full := _FULL.get(found)) is not None:
            await self._store.queue.release(tenant, number, line.custom_id)
        return full

    async def _refuse(self, tenant: TenantId, number: int, custom_id: str, fault: LineFault) -> None:
        message = f"{fault.param}: {fault.message}" if fault.param else fault.message
        result = ItemResult(custom_id, error_code=fault.code, error_message=message)
        put, _ = await self._store.items.put_result(tenant, QUEUE_BATCH, number, result, epoch=0)
        if put is Put.STORED:
            await announce(self._bus, tenant, number, result)

    # ------------------------------------------------------------------------------------------ results

    async def _on_results(self, delivery: Delivery) -> bytes:
        tenant = _tenant_of(delivery)
        if tenant not in self._lines:
            # It has a user since a moment ago: whoever made it asks here whether all is in place.
            await self._follow(_listed(self._file))
            if tenant not in self._lines:
                raise Unavailable(f"the queue of tenant {tenant} is not open yet", retry_after_s=1.0)
        return await self._desk.answer(tenant, delivery.message)

    async def _untaken(self, tenant: TenantId) -> int:
        return await self._bus.backlog(submit_stream(tenant), durable=DURABLE)

    # ------------------------------------------------------------------------------------------ tenants

    async def _follow(self, tenants: tuple[TenantId, ...]) -> None:
        """Consume the lines of exactly these tenants; one that NATS does not know yet is tried again later."""
        async with self._turn:
            for tenant in set(self._lines) - set(tenants):
                await self._lines.pop(tenant).stop()
            for tenant in tenants:
                if tenant in self._lines:
                    continue
                try:
                    self._lines[tenant] = await self._bus.consume(
                        submit_stream(tenant), subjects.batch_submit(tenant), bytes, self._on_line, durable=DURABLE
                    )
                except BatonError as exc:
                    log.warning("the queue of tenant %s is not open: %s", tenant, exc.message)

    async def _look(self) -> None:
        if _age_s(self._file) >= LOOK_S:
            await self._follow(_listed(self._file))


async def announce(bus: Bus, tenant: TenantId, number: int, result: ItemResult) -> None:
    """Tell the tenant of a result, if it listens. The results it can fetch are what counts."""
    line = result_line(QUEUE_BATCH, number, result)
    with suppress(BatonError):
        await bus.publish(subjects.batch_done(tenant), line)


def _tenant_of(delivery: Delivery) -> TenantId:
    return TenantId(delivery.subject.rpartition(".")[2])


def _stored_us(delivery: Delivery) -> float:
    """When the stream took it, unix microseconds; infinity where it does not tell."""
    return int(delivery.stored_id.rpartition("-")[2] or 0) or math.inf


async def _parsed(line: bytes) -> Line:
    try:
        return parse_line(line) if len(line) <= SHORT_BODY_BYTES else await asyncio.to_thread(parse_line, line)
    except LineFault:
        raise
    except Exception as exc:
        raise _unexpected(exc) from exc


def _unexpected(exc: Exception) -> LineFault:
    # Its words may hold the tenant's.
    log.error("a queued line could not be checked: %s", type(exc).__name__)
    return LineFault("internal_error", "this line could not be checked")


def _listed(file: Path | None) -> tuple[TenantId, ...]:
    """The tenants in the file. Raises SettingsError."""
    if file is None:
        return ()
    try:
        tenants = msgspec.json.decode(file.read_bytes(), type=tuple[TenantId, ...])
    except (OSError, msgspec.MsgspecError) as exc:
        raise SettingsError(f"{file}: not a JSON list of tenants: {exc}", param=str(file)) from exc
    if wrong := [tenant for tenant in tenants if not is_id(tenant)]:
        raise SettingsError(f"{file}: tenant {wrong[0]!r} is not of the form [a-z0-9-]{{1,40}}", param=str(file))
    return tenants


def _age_s(file: Path | None) -> float:
    """Seconds since the file changed; 0 when there is none."""
    try:
        return time.time() - file.stat().st_mtime if file is not None else 0.0
    except OSError:
        return 0.0
