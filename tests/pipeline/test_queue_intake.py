"""Lines of the queue become items or results, on the memory bus with a real Redis behind it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from services.batch import intake as intake_module
from services.batch import queue_results
from services.batch.intake import Intake
from services.batch.records import QUEUE_BATCH, ItemResult, Put
from services.batch.store import BatchStore
from shared.bus.bus import Delivery
from shared.bus.memory_bus import MemoryBroker, MemoryBus
from shared.bus.streams import stream_name, submit_stream
from shared.contracts import subjects
from shared.contracts.batch_messages import BatchItem
from shared.contracts.errors import BatonError, Forbidden, SettingsError, Unavailable
from shared.contracts.ids import TenantId
from shared.ingress.prompt_codec import PromptCodec
from shared.ingress.served_models import ServedModel, ServedModels
from tests.pipeline.batch_support import ANN, BOB, batch_store
from tests.servers import RedisServer
from tests.tiny_tokenizer import tiny_tokenizer

MODEL = "tiny"


def line(custom_id: str = "a", prompt: str = "hi", **changes: Any) -> bytes:
    fields = {
        "custom_id": custom_id,
        "method": "POST",
        "url": "/v1/completions",
        "body": {"model": "tiny", "prompt": prompt, "max_tokens": 3},
    }
    return json.dumps(fields | changes).encode()


class Queue:
    """One intake, a tenant's side of it, and the items that came out."""

    def __init__(self, broker: MemoryBroker, store: BatchStore, path: Path) -> None:
        self.broker, self.store, self.path = broker, store, path
        self.tenant = MemoryBus(broker, "tenant")
        self.items: list[BatchItem] = []
        self.done: list[dict[str, Any]] = []
        self.token_limits: dict[TenantId, int] = {}
        self.policy_says: BatonError | None = None
        self.asked = 0

    async def listen(self) -> None:
        async def on_item(delivery: Delivery) -> None:
            self.items.append(delivery.message)

        bus = MemoryBus(self.broker, "batch")
        await bus.consume(stream_name("batch.item"), subjects.ANY_BATCH_ITEM, BatchItem, on_item, durable="test")
        await self.tenant.subscribe(
            subjects.ANY_BATCH_DONE, bytes, lambda d: self.done.append(json.loads(d.message) | {"to": d.subject})
        )

    def tenants(self, *tenants: str) -> None:
        self.path.write_text(json.dumps(tenants))

    @asynccontextmanager
    async def intake(self, max_lines: int = 100) -> AsyncIterator[Intake]:
        codec = PromptCodec(tiny_tokenizer(), 64)
        models = ServedModels([ServedModel(MODEL, "default", 64, codec, aliases=("alias",))])

        async def token_limit(tenant: TenantId, model: str) -> int:
            assert model == MODEL
            self.asked += 1
            if self.policy_says is not None:
                raise self.policy_says
            return self.token_limits.get(tenant, 0)

        bus = MemoryBus(self.broker, "batch")
        async with Intake(bus, self.store, models, token_limit, self.path, max_lines=max_lines) as intake:
            yield intake
        codec.close()

    async def publish(self, payload: bytes, tenant: TenantId = ANN, message_id: str = "") -> None:
        name = message_id or f"{tenant}-{len(self.broker.streams[submit_stream(tenant)].parcels)}"
        await self.tenant.publish_durable(subjects.batch_submit(tenant), payload, message_id=name)

    async def results(self, tenant: TenantId = ANN, payload: bytes = b"") -> dict[str, Any]:
        answer = await self.tenant.request(subjects.batch_results(tenant), payload, bytes, timeout_s=5)
        found: dict[str, Any] = json.loads(answer)
        return found

    async def finished(self, count: int, tenant: TenantId = ANN) -> list[dict[str, Any]]:
        async with asyncio.timeout(10):
            while len(found := (await self.results(tenant))["data"]) < count:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        return found

    async def finish(self, number: int, tenant: TenantId = ANN, body: bytes = b'{"ok":true}') -> None:
        """As an executor does."""
        claim = await self.store.items.claim(tenant, QUEUE_BATCH, number)
        assert claim.body is not None
        result = ItemResult(claim.body.custom_id, 200, f"req-{number}", body)
        put, _ = await self.store.items.put_result(tenant, QUEUE_BATCH, number, result, epoch=claim.epoch)
        assert put is Put.STORED


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


@pytest.fixture
async def queue(redis_server: RedisServer, tmp_path: Path) -> AsyncIterator[Queue]:
    async with batch_store(redis_server) as (store, _, _):
        found = Queue(MemoryBroker(), store, tmp_path / "tenants")
        found.tenants(ANN, BOB)
        await found.listen()
        yield found


async def test_a_good_line_is_kept_and_put_on_the_queue(queue: Queue) -> None:
    async with queue.intake():
        await queue.publish(line("first"))
        await until(lambda: queue.items)
        assert queue.items == [BatchItem(tenant=ANN, batch_id=QUEUE_BATCH, number=1, custom_id="first")]
        assert await queue.results() == {"data": [], "after": "", "has_more": False, "pending": 1}
        claim = await queue.store.items.claim(ANN, QUEUE_BATCH, 1)
        assert claim.body is not None
        assert json.loads(claim.body.body)["prompt"] == "hi"
        assert claim.body.prompt_tokens > 0


BAD = {
    "not JSON": (b"{", "invalid_json_line"),
    "empty": (b"", "invalid_json_line"),
    "not UTF-8": (b'{"custom_id":"\xff"}', "invalid_json_line"),
    "deep": (b'{"custom_id":"x","method":"POST","url":"/v1/completions","body":' + b"[" * 100_000, "invalid_json_line"),
    "no custom_id": (line(custom_id=""), "invalid_custom_id"),
    "GET": (line(method="GET"), "invalid_method"),
    "other url": (line(url="/v1/embeddings"), "invalid_url"),
    "streamed": (line(body={"model": "tiny", "prompt": "x", "stream": True}), "invalid_value"),
    "other model": (line(body={"model": "huge", "prompt": "x"}), "model_not_found"),
    "unknown field": (line(body={"model": "tiny", "prompt": "x", "oops": 1}), "unknown_parameter"),
    "a tenant of its own choice": (line(tenant="bob"), "unknown_parameter"),
}


@pytest.mark.parametrize("case", BAD)
async def test_a_bad_line_becomes_a_result_that_says_why(queue: Queue, case: str) -> None:
    payload, code = BAD[case]
    async with queue.intake():
        await queue.publish(payload)
        await queue.publish(line("good"))
        (bad,) = await queue.finished(1)
        assert bad["response"] is None
        assert bad["error"]["code"] == code
        await until(lambda: queue.items)
        assert [item.custom_id for item in queue.items] == ["good"]
        assert [done["error"]["code"] for done in queue.done] == [code]
        assert (await queue.results())["pending"] == 1


async def test_one_line_of_a_custom_id_runs_and_the_other_is_told(queue: Queue) -> None:
    async with queue.intake():
        for prompt in ("one", "two"):
            await queue.publish(line("same", prompt))
        await queue.publish(line("same", "three"), BOB)
        (told,) = await queue.finished(1)
        assert (told["custom_id"], told["error"]["code"]) == ("same", "duplicate_custom_id")
        await until(lambda: len(queue.items) == 2)
        assert {(item.tenant, item.number) for item in queue.items} == {(ANN, 1), (BOB, 1)}


async def test_a_line_beyond_the_limit_is_told_and_later_ones_are_taken_again(queue: Queue) -> None:
    async with queue.intake(max_lines=2):
        for number in (1, 2, 3):
            await queue.publish(line(f"c{number}"))
        await queue.publish(line("c1"), BOB)
        (refused,) = await queue.finished(1)
        assert (refused["custom_id"], refused["error"]["code"]) == ("c3", "queue_full")
        await queue.finish(1)
        await queue.publish(line("c4"))
        await until(lambda: len(queue.items) == 4)
        assert [item.custom_id for item in queue.items if item.tenant == ANN] == ["c1", "c2", "c4"]
        # told to come again later, so it may
        await queue.finish(2)
        await queue.publish(line("c3"))
        await until(lambda: len(queue.items) == 5)
        assert queue.items[-1].custom_id == "c3"
        # and now it is there
        await queue.publish(line("c3"))
        assert (await queue.finished(4))[-1]["error"]["code"] == "duplicate_custom_id"


async def test_prompt_tokens_waiting_are_bounded_by_the_tenants_own_limit(queue: Queue) -> None:
    queue.token_limits[ANN] = 20
    async with queue.intake():
        for number in (1, 2):
            await queue.publish(line(f"c{number}", "x" * 15))
            await queue.publish(line(f"c{number}", "x" * 15), BOB)
        (refused,) = await queue.finished(1)
        assert (refused["custom_id"], refused["error"]["code"]) == ("c2", "token_limit_exceeded")
        await until(lambda: len(queue.items) == 3)
        assert (await queue.results(BOB))["data"] == []


async def test_what_policy_refuses_is_the_lines_result(queue: Queue) -> None:
    queue.policy_says = Forbidden("there is no such tenant", param="tenant", code="unknown_tenant")
    async with queue.intake():
        await queue.publish(line())
        (refused,) = await queue.finished(1)
        assert refused["error"]["code"] == "unknown_tenant"


async def test_a_line_waits_for_policy(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(intake_module, "AWAY_PAUSE_S", 0.05)
    queue.policy_says = Unavailable("policy: nobody listens")
    async with queue.intake():
        await queue.publish(line())
        await until(lambda: queue.asked >= 2)
        page = await queue.results()
        assert (page["data"], page["pending"] > 0) == ([], True)
        queue.policy_says = None
        await until(lambda: queue.items)
        assert queue.items[0].number == 1


async def test_a_message_delivered_again_changes_nothing(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever step it was stopped after: here each step fails once, as in a crash, and the message comes again."""
    failed: set[str] = set()

    def failing_once(target: Any, name: str) -> None:
        real = getattr(target, name)

        async def call(*args: Any, **options: Any) -> Any:
            done = await real(*args, **options)
            step = f"{name}-{args[0] if name == 'publish_durable' else args[1]}"
            if step not in failed:
                failed.add(step)
                raise Unavailable("lost on the way back")
            return done

        monkeypatch.setattr(target, name, call)

    for target, name in (
        (queue.store.queue, "slot"),
        (queue.store.queue, "put_body"),
        (queue.store.items, "put_result"),
    ):
        failing_once(target, name)
    async with queue.intake() as intake:
        failing_once(intake._bus, "publish_durable")
        for number in range(3):
            await queue.publish(line(f"c{number}"))
        await queue.publish(b"bad")
        await queue.publish(line("c0"))
        await queue.finished(2)
        await until(lambda: len(queue.items) == 3)
        assert len(failed) > 6
        assert sorted(item.custom_id for item in queue.items) == ["c0", "c1", "c2"]
        page = await queue.results()
        assert sorted(found["error"]["code"] for found in page["data"]) == ["duplicate_custom_id", "invalid_json_line"]
        async with asyncio.timeout(10):
            while page["pending"] > 3:  # a line that comes again is pending once more
                await asyncio.sleep(0.02)
                page = await queue.results()
        assert page["pending"] == 3


async def test_an_error_nobody_foresaw_becomes_a_result(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(text: bytes) -> None:
        raise ZeroDivisionError("secret words")

    monkeypatch.setattr(intake_module, "parse_line", broken)
    async with queue.intake():
        await queue.publish(line("a"))
        (told,) = await queue.finished(1)
        assert told["error"] == {"code": "internal_error", "message": "this line could not be checked"}


async def test_pages_end_at_the_limit_and_at_a_size(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue_results, "STEP", 2)
    monkeypatch.setattr(queue_results, "MAX_PAGE_BYTES", 3000)
    async with queue.intake():
        for number in range(1, 8):
            await queue.publish(line(f"c{number}"))
        await until(lambda: len(queue.items) == 7)
        for number in range(1, 8):
            await queue.finish(number, body=json.dumps({"text": "x" * 900}).encode())
        seen: list[str] = []
        sizes: list[int] = []
        after = ""
        while True:
            page = await queue.results(payload=json.dumps({"after": after, "limit": 3}).encode())
            seen += [found["custom_id"] for found in page["data"]]
            sizes.append(len(page["data"]))
            after = page["after"]
            if not page["has_more"]:
                break
        assert seen == [f"c{number}" for number in range(1, 8)]
        assert sizes == [2, 2, 2, 1]
        # One result larger than a page comes alone.
        monkeypatch.setattr(queue_results, "MAX_PAGE_BYTES", 10)
        page = await queue.results(payload=b'{"limit":3}')
        assert (len(page["data"]), page["has_more"]) == (1, True)
        again = await queue.results(payload=json.dumps({"after": after}).encode())
        assert again == {"data": [], "after": after, "has_more": False, "pending": 0}


@pytest.mark.parametrize(
    ("payload", "field"),
    [
        (b'{"limit":0}', "limit"),
        (b'{"limit":1001}', "limit"),
        (b'{"limit":"3"}', "payload"),
        (b'{"tenant":"bob"}', "payload"),
        (b"[", "payload"),
        (b"\xff", "payload"),
        (b'{"after":"../../x"}', "after"),
        (b'{"after":"9999999999999999999999-0"}', "after"),
    ],
)
async def test_a_question_that_is_none_is_told_why(queue: Queue, payload: bytes, field: str) -> None:
    async with queue.intake():
        answer = await queue.results(payload=payload)
        assert (answer["error"]["code"], answer["error"]["param"]) == ("invalid_value", field)


async def test_one_tenant_cannot_keep_the_others_from_asking(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = asyncio.Event()
    real = queue.store.queue.waiting

    async def slow(tenant: TenantId) -> int:
        if tenant == ANN:
            await gate.wait()
        return await real(tenant)

    monkeypatch.setattr(queue.store.queue, "waiting", slow)
    async with queue.intake():
        asked = [asyncio.create_task(queue.results()) for _ in range(queue_results.MAX_AT_ONCE + 1)]
        refused, _ = await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
        assert [task.result()["error"]["code"] for task in refused] == ["overloaded"]
        assert (await queue.results(BOB))["data"] == []
        gate.set()
        answers = await asyncio.gather(*asked)
        assert len([answer for answer in answers if "data" in answer]) == queue_results.MAX_AT_ONCE


async def test_tenants_come_and_go_with_the_file(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(intake_module, "LOOK_S", 0.05)
    queue.tenants(ANN)
    async with queue.intake():
        answer = await queue.results(BOB)
        assert answer["error"]["code"] == "unavailable"
        queue.tenants(ANN, BOB)
        # Who asks for results is let in at once, without waiting for the next look.
        assert (await queue.results(BOB))["data"] == []
        await queue.publish(line("b"), BOB)
        await until(lambda: queue.items)
        queue.tenants(BOB)
        await asyncio.sleep(0.3)
        await queue.publish(line("a"), ANN)
        await queue.publish(line("c"), BOB)
        await until(lambda: len(queue.items) == 2)
        assert {item.tenant for item in queue.items} == {BOB}
        # Its line waits in its stream until it is let in again.
        queue.tenants(ANN, BOB)
        await until(lambda: len(queue.items) == 3)


@pytest.mark.parametrize("text", ['["a.b"]', '["*"]', '{"a":1}', "[1]", "["])
async def test_a_list_of_tenants_that_is_none_stops_the_start(queue: Queue, text: str) -> None:
    queue.path.write_text(text)
    with pytest.raises(SettingsError, match="tenants"):
        async with queue.intake():
            pass
