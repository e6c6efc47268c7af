"""Every user on every subject of the table, on a real nats-server: its own are allowed, all others refused."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import msgspec
import nats
import nats.errors
import pytest
from nats.aio.client import Client

from services.cli.nats_config import nats_config
from shared.bus.bus import Bus, Delivery
from shared.bus.nats_bus import connect_bus, flush
from shared.bus.streams import AUDIT_STREAM, PURGE_ORDER_STREAM, SETTLE_STREAM
from shared.contracts import messages as m
from shared.contracts import subjects
from shared.contracts.errors import Forbidden
from shared.contracts.ids import TenantId
from shared.contracts.subjects import HOPS, SERVICES
from tests.servers import NatsServer, start_nats

PASSWORDS = {service: f"password-of-{service}" for service in SERVICES}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    folder = tmp_path_factory.mktemp("guarded")
    guarded = start_nats(folder, nats_config(PASSWORDS))
    yield guarded
    guarded.kill()


@asynccontextmanager
async def raw(server: NatsServer, service: str, errors: list[str]) -> AsyncIterator[Client]:
    async def on_error(exc: Exception) -> None:
        errors.append(str(exc))

    client = await nats.connect(
        server.url,
        user=service,
        password=PASSWORDS[service],
        error_cb=on_error,
        inbox_prefix=f"_INBOX_{service}",
        allow_reconnect=False,
    )
    try:
        yield client
    finally:
        await client.close()


def example(pattern: str) -> str:
    return pattern.replace("*", "x").replace(">", "x")


FOREIGN = ("$SYS.REQ.SERVER.PING", "$JS.API.INFO", "$JS.API.STREAM.NAMES", "$JS.API.STREAM.DELETE.policy-settle")
FOREIGN_KV = ("$KV.baton-leases.x", "$JS.API.STREAM.CREATE.KV_baton-leases", "$KV.other.x")


def published_by(service: str) -> set[str]:
    own = {example(hop.pattern) for hop in HOPS if service in hop.senders and hop.name not in ("trace", "audit")}
    return own | {subjects.trace(service), subjects.audit(service)}


def received_by(service: str) -> set[str]:
    return {hop.pattern for hop in HOPS if service in hop.receivers and hop.kind != "stream"}


@pytest.mark.parametrize("service", SERVICES)
async def test_publish(server: NatsServer, service: str) -> None:
    everything = {example(hop.pattern) for hop in HOPS}
    everything |= {build(name) for build in (subjects.trace, subjects.audit) for name in SERVICES}
    everything |= {*FOREIGN, "anything", "_INBOX.x", *(f"_INBOX_{other}.x" for other in SERVICES)}
    if service != "scheduler":
        everything |= set(FOREIGN_KV)
    errors: list[str] = []
    async with raw(server, service, errors) as client:
        for subject in everything:
            await client.publish(subject, b"")
        await flush(client)
    refused = {e.split('"')[1] for e in errors if "permissions violation for publish" in e.lower()}
    assert everything - {s for s in everything if s.lower() in {r.lower() for r in refused}} == published_by(service)


@pytest.mark.parametrize("service", SERVICES)
async def test_subscribe(server: NatsServer, service: str) -> None:
    everything = {hop.pattern for hop in HOPS}
    everything |= {">", "baton.v1.>", "$SYS.>", "$JS.>", "$KV.>", "_INBOX.>"}
    everything |= {f"_INBOX_{other}.>" for other in SERVICES}
    errors: list[str] = []
    async with raw(server, service, errors) as client:
        for subject in everything:
            await client.subscribe(subject, cb=ignore)
        await flush(client)
    refused = {e.split('"')[1].lower() for e in errors if "permissions violation for subscription" in e.lower()}
    assert {s for s in everything if s.lower() not in refused} == received_by(service) | {f"_INBOX_{service}.>"}


async def ignore(msg: object) -> None: ...


async def test_a_wrong_password_is_refused_at_once(server: NatsServer) -> None:
    with pytest.raises(Forbidden, match="credentials of user policy"):
        async with connect_bus(server.url, "policy", password="wrong"):
            pass
    with pytest.raises(Forbidden):
        async with connect_bus(server.url, "policy"):
            pass


async def test_the_bus_works_under_these_permissions(server: NatsServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Request, publish, stream and lease, each by the services that use them."""
    monkeypatch.setattr("shared.bus.nats_bus.JETSTREAM_TIMEOUT_S", 1.0)
    async with (
        connect_bus(server.url, "policy", password=PASSWORDS["policy"]) as policy,
        connect_bus(server.url, "gateway", password=PASSWORDS["gateway"]) as gateway,
        connect_bus(server.url, "scheduler", password=PASSWORDS["scheduler"]) as scheduler,
    ):

        async def whose(delivery: Delivery) -> msgspec.Struct:
            return m.Identity(tenant=TenantId("demo"), key_id="k")

        await policy.serve(subjects.POLICY_AUTHENTICATE, m.Authenticate, whose, queue="policy")
        ask = m.Authenticate(key_hash=b"x" * 32)
        for _ in range(3):
            reply = await gateway.request(subjects.POLICY_AUTHENTICATE, ask, m.Identity | m.Refusal, timeout_s=2)
            assert reply.tenant == "demo"
        with pytest.raises(Forbidden):
            await scheduler.request(subjects.POLICY_AUTHENTICATE, ask, m.Identity | m.Refusal, timeout_s=0.2)

        records: list[m.AuditRecord] = []

        async def keep(delivery: Delivery) -> None:
            records.append(delivery.message)

        await policy.consume(AUDIT_STREAM, subjects.audit("scheduler"), m.AuditRecord, keep, durable="policy")
        record = m.AuditRecord(service="scheduler", number=1, action="test")
        await scheduler.publish_durable(subjects.audit("scheduler"), record, message_id="1")
        async with asyncio.timeout(5):
            while not records:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert records == [record]

        assert await scheduler.acquire_lease("default", "s1", 1.0)
        assert await scheduler.acquire_lease("default", "s2", 1.0) is None
        await scheduler.release_lease("default", "s1")
        with pytest.raises(Forbidden):
            await _consume_foreign(gateway)


async def _consume_foreign(bus: Bus) -> None:
    async def never(delivery: Delivery) -> None:
        raise AssertionError("a foreign stream was read")

    await bus.consume(SETTLE_STREAM, subjects.POLICY_SETTLE, m.Settle, never, durable="gateway")


@pytest.mark.parametrize("service", subjects.WORKERS)
async def test_a_worker_cannot_make_a_stream_that_copies_what_others_say(server: NatsServer, service: str) -> None:
    """NATS asks nobody's permission for the subjects of a stream, so who may make one can read everything."""
    errors: list[str] = []
    async with raw(server, service, errors) as client:
        wanted = {"name": PURGE_ORDER_STREAM, "subjects": [subjects.sched_submit("x")], "storage": "memory"}
        with pytest.raises(nats.errors.TimeoutError):
            await client.request(
                f"$JS.API.STREAM.CREATE.{PURGE_ORDER_STREAM}", json.dumps(wanted).encode(), timeout=0.5
            )
    assert any("permissions violation" in error.lower() for error in errors)


async def test_a_request_cannot_make_a_responder_publish_elsewhere(server: NatsServer) -> None:
    """allow_responses would let policy publish to any reply subject a request names; the bus does not."""
    errors: list[str] = []
    async with (
        connect_bus(server.url, "policy", password=PASSWORDS["policy"]) as policy,
        raw(server, "gateway", errors) as gateway,
    ):
        asked: list[Delivery] = []

        async def whose(delivery: Delivery) -> msgspec.Struct:
            asked.append(delivery)
            return m.Identity(tenant=TenantId("demo"), key_id="k")

        await policy.serve(subjects.POLICY_AUTHENTICATE, m.Authenticate, whose)
        payload = msgspec.msgpack.encode(m.Authenticate(key_hash=b"x"))
        await gateway.publish(subjects.POLICY_AUTHENTICATE, payload, reply=subjects.POLICY_EVENTS)
        await flush(gateway)
        await asyncio.sleep(0.05)
        assert not asked
        assert policy.stats.undecodable == 1


async def test_a_forbidden_subscription_raises(server: NatsServer) -> None:
    async with connect_bus(server.url, "gateway", password=PASSWORDS["gateway"]) as gateway:
        with pytest.raises(Forbidden, match="gateway"):
            await gateway.subscribe(subjects.POLICY_ADMIT, m.Admit, lambda delivery: None)
