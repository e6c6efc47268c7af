"""What both buses promise: one suite, run on the memory bus and on a real nats-server. Here also subject matching."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

import msgspec
import pytest
from opentelemetry import context, trace

from shared.bus import envelope
from shared.bus.bus import BUDGET_HEADER, NO_RESPONDERS, Bus, Delivery, Redeliver
from shared.bus.memory_bus import MemoryBroker, MemoryBus, matches
from shared.bus.nats_connection import connect_bus
from shared.contracts.errors import Internal, Overloaded, ProtocolError, QuotaExceeded, Unavailable
from shared.contracts.message import Message, encode
from tests.servers import NatsServer


class Ask(Message, frozen=True, kw_only=True):
    text: str = ""


class Reply(Message, frozen=True, kw_only=True):
    text: str = ""


Connect = Callable[[str], Awaitable[Bus]]


@pytest.fixture(params=["memory", "nats"])
async def connect(request: pytest.FixtureRequest) -> AsyncIterator[Connect]:
    """Opens buses of one kind on one broker."""
    async with AsyncExitStack() as stack:
        if request.param == "memory":
            broker = MemoryBroker()

            async def open_bus(service: str) -> Bus:
                bus = MemoryBus(broker, service)
                stack.push_async_callback(bus.close)
                return bus
        else:
            server: NatsServer = request.getfixturevalue("nats_server")

            async def open_bus(service: str) -> Bus:
                return await stack.enter_async_context(connect_bus(server.url, service))

        yield open_bus


@pytest.fixture
def topic(request: pytest.FixtureRequest) -> str:
    """A subject no other test uses."""
    return "t" + "".join(c for c in request.node.name if c.isalnum())


async def until(condition: Callable[[], Any], timeout_s: float = 5.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


async def echo(delivery: Delivery) -> msgspec.Struct:
    return Reply(text=delivery.message.text.upper())


async def test_request_and_reply(connect: Connect, topic: str) -> None:
    server, client = await connect("policy"), await connect("gateway")
    await server.serve(topic, Ask, echo)
    assert await client.request(topic, Ask(text="hi"), Reply, timeout_s=2) == Reply(text="HI")


async def test_what_is_sent_at_once_keeps_its_place_among_what_waits(connect: Connect, topic: str) -> None:
    listener, sender = await connect("gateway"), await connect("decode")
    heard: list[Delivery] = []
    await listener.subscribe(topic, Ask, heard.append)
    waited = 0
    for number in range(30):
        message = Ask(text=str(number))
        # as its users do: what is not taken at once waits its turn
        if number % 5 == 4 or not sender.publish_now(topic, message):
            waited += 1
            await sender.publish(topic, message)
    await until(lambda: len(heard) == 30, timeout_s=30)
    assert [delivery.message.text for delivery in heard] == [str(number) for number in range(30)]
    assert 6 <= waited < 30
    assert all(delivery.deadline is None for delivery in heard)


async def test_what_is_sent_at_once_has_the_same_limit(connect: Connect, topic: str) -> None:
    sender = await connect("decode")
    with pytest.raises(ProtocolError, match=topic):
        sender.publish_now(topic, Ask(text="x" * (envelope.MAX_PAYLOAD_BYTES + 1)))


async def test_headers_count_in_the_limit_and_what_is_over_it_ends_no_connection(connect: Connect, topic: str) -> None:
    sender, heard = await connect("decode"), list[Delivery]()
    await sender.subscribe(topic, Ask, heard.append)
    bare = envelope.MAX_PAYLOAD_BYTES - len(encode(Ask(text="x" * 2**17))) + 2**17
    for size in (bare, bare - 20):  # with its budget it is too large
        for send in (sender.publish(topic, Ask(text="x" * size), budget_s=1.0), ask(sender, topic, size)):
            with pytest.raises(ProtocolError, match="headers"):
                await send
    await sender.publish(topic, Ask(text="x" * (bare - envelope.ROOM_BYTES)), budget_s=30.0)
    await sender.publish(topic, Ask(text="x" * bare))
    await until(lambda: len(heard) == 2, timeout_s=30)
    assert sender.connected


async def ask(sender: Bus, topic: str, size: int) -> None:
    await sender.request(topic, Ask(text="x" * size), Reply, timeout_s=5)


async def test_nobody_listens_is_told_at_once_and_names_the_hop(connect: Connect, topic: str) -> None:
    client = await connect("gateway")
    started = time.monotonic()
    with pytest.raises(Unavailable, match=topic) as caught:
        await client.request(topic, Ask(), Reply, timeout_s=5)
    assert caught.value.code == NO_RESPONDERS
    assert time.monotonic() - started < 2


async def test_a_missing_listener_behind_the_one_asked_is_not_taken_for_it(connect: Connect, topic: str) -> None:
    server, client = await connect("policy"), await connect("gateway")

    async def ask_further(delivery: Delivery) -> msgspec.Struct:
        reply: msgspec.Struct = await server.request(f"{topic}.further", Ask(), Reply, timeout_s=2)
        return reply

    await server.serve(topic, Ask, ask_further)
    with pytest.raises(Unavailable, match="further") as caught:
        await client.request(topic, Ask(), Reply, timeout_s=5)
    assert caught.value.code == "unavailable"


@pytest.mark.parametrize("budget", ["-1", "1.5", "²", "9" * 13, "9" * 5000])
def test_a_budget_that_is_none_is_a_protocol_error(budget: str) -> None:
    with pytest.raises(ProtocolError, match="budget"):
        envelope.incoming("a.b", encode(Ask()), {BUDGET_HEADER: budget}, Ask)


async def test_a_late_answer_names_the_hop(connect: Connect, topic: str) -> None:
    server, client = await connect("policy"), await connect("gateway")

    async def slow(delivery: Delivery) -> msgspec.Struct:
        await asyncio.sleep(0.3)
        return Reply()

    await server.serve(topic, Ask, slow)
    with pytest.raises(Unavailable, match=f"{topic} did not answer within 0.05 s"):
        await client.request(topic, Ask(), Reply, timeout_s=0.05)


async def test_errors_keep_their_class_and_fields(connect: Connect, topic: str) -> None:
    server, client = await connect("policy"), await connect("gateway")

    async def refuse(delivery: Delivery) -> msgspec.Struct:
        raise QuotaExceeded("tokens spent\nfor now: é", param="tokens", retry_after_s=7.5)

    await server.serve(topic, Ask, refuse)
    with pytest.raises(QuotaExceeded) as caught:
        await client.request(topic, Ask(), Reply, timeout_s=2)
    assert (caught.value.message, caught.value.param) == ("tokens spent\nfor now: é", "tokens")
    assert caught.value.retry_after_s == 7.5


async def test_an_unexpected_exception_is_internal_without_details(
    connect: Connect, topic: str, caplog: pytest.LogCaptureFixture
) -> None:
    server, client = await connect("policy"), await connect("gateway")

    async def broken(delivery: Delivery) -> msgspec.Struct:
        raise RuntimeError("the secret prompt")

    await server.serve(topic, Ask, broken)
    with pytest.raises(Internal) as caught:
        await client.request(topic, Ask(), Reply, timeout_s=2)
    assert "secret" not in caught.value.message
    assert "Traceback" in caplog.text


async def test_a_reply_of_another_type_is_a_protocol_error(connect: Connect, topic: str) -> None:
    server, client = await connect("policy"), await connect("gateway")
    await server.serve(topic, Ask, echo)
    with pytest.raises(ProtocolError):
        await client.request(topic, Ask(), Ask, timeout_s=2)


async def test_what_does_not_decode_is_counted_and_dropped(connect: Connect, topic: str) -> None:
    server, client = await connect("policy"), await connect("gateway")
    seen: list[Delivery] = []
    await server.subscribe(topic, Ask, seen.append)
    await client.publish(topic, Reply(text="wrong"))
    await client.publish(topic, Ask(text="right"))
    await until(lambda: seen)
    assert [d.message.text for d in seen] == ["right"]
    assert server.stats.undecodable == 1  # type: ignore[attr-defined]


async def test_published_messages_keep_their_order_and_survive_a_failing_handler(connect: Connect, topic: str) -> None:
    server, client = await connect("policy"), await connect("gateway")
    seen: list[str] = []

    def take(delivery: Delivery) -> None:
        if delivery.message.text == "7":
            raise RuntimeError("seven")
        seen.append(delivery.message.text)

    await server.subscribe(f"{topic}.*", Ask, take)
    for number in range(100):
        await client.publish(f"{topic}.a", Ask(text=str(number)))
    await until(lambda: len(seen) == 99)
    assert seen == [str(n) for n in range(100) if n != 7]


async def test_budget_becomes_a_deadline_and_context_travels(connect: Connect, topic: str) -> None:
    server, client = await connect("policy"), await connect("gateway")
    remaining: list[float] = []
    parents: list[trace.SpanContext] = []

    async def look(delivery: Delivery) -> msgspec.Struct:
        remaining.append(delivery.remaining_s())
        parents.append(trace.get_current_span().get_span_context())
        return Reply()

    await server.serve(topic, Ask, look)
    asker = trace.SpanContext(0xABC, 0xDEF, is_remote=False, trace_flags=trace.TraceFlags(1))
    token = context.attach(trace.set_span_in_context(trace.NonRecordingSpan(asker)))
    try:
        await client.request(topic, Ask(), Reply, timeout_s=3)
    finally:
        context.detach(token)
    assert 2.0 < remaining[0] <= 3.0
    # The handler's own spans and publishes run under the asker's context.
    assert [(one.trace_id, one.span_id, one.is_remote) for one in parents] == [(0xABC, 0xDEF, True)]


async def test_spent_budget_is_dropped_on_arrival(connect: Connect, topic: str) -> None:
    server, client = await connect("policy"), await connect("gateway")
    await server.serve(topic, Ask, echo)
    with pytest.raises(Unavailable):
        await client.request(topic, Ask(), Reply, timeout_s=0.0005)
    await until(lambda: server.stats.expired == 1)  # type: ignore[attr-defined]


async def test_a_queue_group_shares_the_work(connect: Connect, topic: str) -> None:
    one, two, client = await connect("policy"), await connect("policy"), await connect("gateway")
    served = {"one": 0, "two": 0}

    def counting(name: str) -> Callable[[Delivery], Awaitable[msgspec.Struct]]:
        async def handler(delivery: Delivery) -> msgspec.Struct:
            served[name] += 1
            return Reply()

        return handler

    await one.serve(topic, Ask, counting("one"), queue="q")
    await two.serve(topic, Ask, counting("two"), queue="q")
    for _ in range(40):
        await client.request(topic, Ask(), Reply, timeout_s=2)
    assert sum(served.values()) == 40
    assert min(served.values()) > 0


async def test_requests_run_side_by_side_and_too_many_are_refused(
    connect: Connect, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shared.bus.subscriptions.RequestTasks.__init__.__defaults__", (2,))
    server, client = await connect("policy"), await connect("gateway")
    gate = asyncio.Event()

    async def wait(delivery: Delivery) -> msgspec.Struct:
        await gate.wait()
        return Reply()

    await server.serve(topic, Ask, wait)
    asks = [asyncio.create_task(client.request(topic, Ask(), Reply, timeout_s=5)) for _ in range(3)]
    with pytest.raises(Overloaded):
        await asks[2]
    gate.set()
    assert await asyncio.gather(*asks[:2]) == [Reply(), Reply()]


async def test_stop_finishes_requests_in_progress(connect: Connect, topic: str) -> None:
    server, client = await connect("policy"), await connect("gateway")
    entered = asyncio.Event()

    async def slow(delivery: Delivery) -> msgspec.Struct:
        entered.set()
        await asyncio.sleep(0.1)
        return Reply(text="done")

    served = await server.serve(topic, Ask, slow)
    ask = asyncio.create_task(client.request(topic, Ask(), Reply, timeout_s=2))
    await entered.wait()
    await served.stop()
    assert (await ask).text == "done"
    with pytest.raises(Unavailable):
        await client.request(topic, Ask(), Reply, timeout_s=1)


async def test_over_the_payload_limit(connect: Connect, topic: str) -> None:
    client = await connect("gateway")
    with pytest.raises(ProtocolError, match="limit"):
        await client.publish(topic, Ask(text="x" * (9 * 1024 * 1024)))
    server = await connect("policy")
    seen: list[Delivery] = []
    await server.subscribe(topic, Ask, seen.append)
    await client.publish(topic, Ask(text="x" * (7 * 1024 * 1024)))
    await until(lambda: seen)


async def test_a_closed_bus_is_unavailable(connect: Connect, topic: str) -> None:
    bus = await connect("gateway")
    await bus.close()
    assert not bus.connected
    with pytest.raises(Unavailable):
        await bus.publish(topic, Ask())


async def test_durable_messages_wait_come_once_and_again_after_a_failure(connect: Connect, topic: str) -> None:
    client, server = await connect("gateway"), await connect("policy")
    with pytest.raises(Unavailable):
        await client.publish_durable(topic, Ask(), message_id="early")
    seen: list[str] = []
    fail = {"b"}

    async def take(delivery: Delivery) -> None:
        seen.append(delivery.message.text)
        if delivery.message.text in fail:
            fail.clear()
            raise RuntimeError("once")

    stream = f"s-{topic}"
    first = await server.consume(stream, topic, Ask, take, durable="policy")
    for text in ("a", "b", "a"):
        await client.publish_durable(topic, Ask(text=text), message_id=text)
    await until(lambda: seen.count("b") == 2)
    assert seen.count("a") == 1
    # While nobody consumes, messages wait; a later replica goes on where the first stopped.
    await first.stop()
    await client.publish_durable(topic, Ask(text="c"), message_id="c")
    await server.consume(stream, topic, Ask, take, durable="policy")
    await until(lambda: "c" in seen)
    assert sorted(seen) == ["a", "b", "b", "c"]


async def test_with_slots_so_many_run_at_once_and_consumers_take_turns(connect: Connect, topic: str) -> None:
    client, server = await connect("gateway"), await connect("batch")
    stream, slots = f"s-{topic}", asyncio.Semaphore(2)
    running: set[str] = set()
    order: list[str] = []
    most = 0
    go_on = asyncio.Event()

    async def work(delivery: Delivery) -> None:
        nonlocal most
        text = delivery.message.text
        running.add(text)
        order.append(text)
        most = max(most, len(running))
        await go_on.wait()
        await asyncio.sleep(0.01)
        running.discard(text)

    # the stream spans what its consumers filter
    await server.make_stream(stream, f"{topic}.*")
    await server.make_stream(stream, f"{topic}.*")
    await client.publish_durable(f"{topic}.ann", Ask(text="ann0"), message_id="ann0")
    tenants = ("ann", "bob")
    for tenant in tenants:
        await server.consume(stream, f"{topic}.{tenant}", Ask, work, durable=f"batch-{tenant}", slots=slots)
    for number in range(6):
        for tenant in tenants:
            await client.publish_durable(
                f"{topic}.{tenant}", Ask(text=f"{tenant}{number}"), message_id=f"{tenant}{number}"
            )
    await until(lambda: len(running) == 2)
    go_on.set()
    await until(lambda: len(order) == 12 and not running)
    assert most == 2
    assert {tenant: [o for o in order if o.startswith(tenant)] for tenant in tenants} == {
        tenant: [f"{tenant}{number}" for number in range(6)] for tenant in tenants
    }
    # neither tenant gets ahead of the other by more than what runs and what waits for a slot
    for upto in range(1, 13):
        counts = [sum(o.startswith(tenant) for o in order[:upto]) for tenant in tenants]
        assert abs(counts[0] - counts[1]) <= 3, order


async def test_stopping_with_slots_finishes_what_runs_and_gives_back_what_waits(connect: Connect, topic: str) -> None:
    client, server = await connect("gateway"), await connect("batch")
    stream, slots = f"s-{topic}", asyncio.Semaphore(1)
    started: list[str] = []
    go_on = asyncio.Event()

    async def work(delivery: Delivery) -> None:
        started.append(delivery.message.text)
        await go_on.wait()

    first = await server.consume(stream, topic, Ask, work, durable="batch", slots=slots)
    for text in "abc":
        await client.publish_durable(topic, Ask(text=text), message_id=text)
    await until(lambda: started == ["a"])
    stopping = asyncio.create_task(first.stop())
    await asyncio.sleep(0.1)
    assert not stopping.done()
    go_on.set()
    await asyncio.wait_for(stopping, 5)
    assert started == ["a"]
    assert not slots.locked()
    await server.consume(stream, topic, Ask, work, durable="batch", slots=slots)
    await until(lambda: len(started) == 3)
    assert sorted(started) == ["a", "b", "c"]


@pytest.mark.parametrize("slots", [None, 4])
async def test_a_handler_may_hand_a_message_back(
    connect: Connect, topic: str, slots: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    client, server = await connect("gateway"), await connect("batch")
    seen: list[tuple[str, float]] = []

    async def work(delivery: Delivery) -> None:
        seen.append((delivery.message.text, time.monotonic()))
        if len(seen) == 1:
            raise Redeliver(0.3)
        if len(seen) == 2:
            raise Redeliver

    semaphore = None if slots is None else asyncio.Semaphore(slots)
    await server.consume(f"s-{topic}", topic, Ask, work, durable="batch", slots=semaphore)
    await client.publish_durable(topic, Ask(text="a"), message_id="a")
    await until(lambda: len(seen) == 3)
    await asyncio.sleep(0.1)
    assert [text for text, _ in seen] == ["a", "a", "a"]
    assert seen[1][1] - seen[0][1] >= 0.25
    assert "failed" not in caplog.text
    if semaphore is not None:
        assert not semaphore.locked()


async def test_a_message_that_fails_does_not_hold_up_those_behind_it(connect: Connect, topic: str) -> None:
    client, server = await connect("gateway"), await connect("policy")
    seen: list[str] = []

    async def take(delivery: Delivery) -> None:
        if delivery.message.text == "bad":
            raise RuntimeError("always")
        seen.append(delivery.message.text)

    stream = f"s-{topic}"
    consumer = await server.consume(stream, topic, Ask, take, durable="policy")
    for text in ("bad", "a", "b"):
        await client.publish_durable(topic, Ask(text=text), message_id=text)
    await until(lambda: seen == ["a", "b"])
    await consumer.stop()


async def test_a_lease_has_one_owner_and_a_growing_term(connect: Connect, topic: str) -> None:
    one, two = await connect("scheduler"), await connect("scheduler")
    term = await one.acquire_lease(topic, "one", 1.0)
    assert term
    assert await two.acquire_lease(topic, "two", 1.0) is None
    assert await one.acquire_lease(topic, "one", 1.0) == term
    await two.release_lease(topic, "two")
    assert await two.acquire_lease(topic, "two", 1.0) is None
    await one.release_lease(topic, "one")
    second = await two.acquire_lease(topic, "two", 1.0)
    assert second is not None
    assert second > term
    # Nobody renews: it expires by the broker's clock.
    await asyncio.sleep(2.2)
    third = await one.acquire_lease(topic, "one", 1.0)
    assert third is not None
    assert third > second


@pytest.mark.parametrize(
    ("pattern", "subject", "expected"),
    [
        ("a.b", "a.b", True),
        ("a.*", "a.b", True),
        ("a.*", "a.b.c", False),
        ("a.>", "a.b.c", True),
        ("a.>", "a", False),
        ("a.*.c", "a.b.c", True),
        ("a.b.c", "a.b", False),
    ],
)
def test_subject_matching(pattern: str, subject: str, expected: bool) -> None:
    assert matches(pattern, subject) is expected


async def test_faults_drop_duplicate_and_delay() -> None:
    plan = iter([(), (0.0, 0.0), (0.02,), (0.0,)])
    broker = MemoryBroker(faults=lambda subject: next(plan))
    bus = MemoryBus(broker)
    seen: list[str] = []
    await bus.subscribe("x", Ask, lambda delivery: seen.append(delivery.message.text))
    for text in "abcd":
        await bus.publish("x", Ask(text=text))
    await until(lambda: len(seen) == 4)
    assert seen == ["b", "b", "d", "c"]
    await bus.close()


async def test_the_backlog_counts_what_a_consumer_is_not_done_with(connect: Connect, topic: str) -> None:
    bus = await connect("policy")
    gate = asyncio.Event()
    taken: list[str] = []

    async def handle(delivery: Delivery) -> None:
        taken.append(delivery.stored_id)
        await gate.wait()

    await bus.consume(topic, topic, Ask, handle, durable="policy")
    assert await bus.backlog(topic, durable="policy") == 0
    for number in range(3):
        await bus.publish_durable(topic, Ask(), message_id=str(number))
    await until(lambda: taken)
    assert await bus.backlog(topic, durable="policy") == 3
    gate.set()
    async with asyncio.timeout(5):
        while await bus.backlog(topic, durable="policy"):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert len(set(taken)) == 3
    with pytest.raises(Unavailable):
        await bus.backlog(topic, durable="nobody")


async def test_raw_hops_carry_bytes_and_errors_as_json_and_no_headers(connect: Connect, topic: str) -> None:
    server, client = await connect("batch"), await connect("gateway")

    async def answer(delivery: Delivery) -> bytes:
        assert delivery.deadline is None
        if delivery.message == b"no":
            raise QuotaExceeded("slower", param="x", retry_after_s=3.0)
        if delivery.message == b"bug":
            raise ZeroDivisionError("secret words")
        return b"<" + delivery.message + b">"

    await server.serve(topic, bytes, answer)
    assert await client.request(topic, b"\xff{", bytes, timeout_s=5) == b"<\xff{>"
    refused = msgspec.json.decode(await client.request(topic, b"no", bytes, timeout_s=5))
    assert refused == {
        "error": {"code": "rate_limit_exceeded", "message": "slower", "param": "x", "retry_after_s": 3.0}
    }
    broken = msgspec.json.decode(await client.request(topic, b"bug", bytes, timeout_s=5))
    assert broken == {"error": {"code": "internal_error", "message": f"{topic} failed"}}


def test_only_raw_hops_answer_across_accounts() -> None:
    assert envelope.may_answer("_INBOX_gateway.x")
    assert not envelope.may_answer("_R_.a.b")
    assert envelope.may_answer("_R_.a.b", raw=True)
    for elsewhere in ("", "baton.v1.policy.events", "$JS.API.INFO", "_INBOX.x", "_R_x"):
        assert not envelope.may_answer(elsewhere, raw=True)
