"""Every user on every subject of the table, on a real nats-server: its own are allowed, all others refused.

Tenants are tried with plain clients, as a stranger would: on every subject of services and of the other tenant, on
reply subjects that are not theirs, and while the server takes a new configuration.
"""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import nats
import nats.errors
import pytest
from nats.aio.client import Client
from nats.aio.msg import Msg

from services.cli.nats_config import (
    MAX_TENANT_SUBSCRIPTIONS,
    OWN_NAME_HOPS,
    USERS,
    nats_config,
    tenant_inbox,
    tenant_user,
)
from shared.bus.bus import Bus, Delivery, DurableHandler
from shared.bus.nats_bus import NatsBus, flush
from shared.bus.nats_connection import connect_bus
from shared.bus.streams import AUDIT_STREAM, MAX_LINE_BYTES, PURGE_ACK_STREAM, SETTLE_STREAM, submit_stream
from shared.contracts import messages as m
from shared.contracts import subjects
from shared.contracts.errors import Forbidden, QuotaExceeded
from shared.contracts.ids import TenantId
from shared.contracts.subjects import HOPS, SERVICES
from tests.servers import NatsServer, start_nats

PASSWORDS = {user: f"password-of-{user}" for user in USERS}
# `policy` is a tenant that bears a service's name.
ACME, OTHER, POLICY, LATER = (TenantId(name) for name in ("acme", "other", "policy", "later"))
TENANTS = {tenant: f"password-of-tenant-{tenant}" for tenant in (ACME, OTHER, POLICY)}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    folder = tmp_path_factory.mktemp("guarded")
    guarded = start_nats(folder, nats_config(PASSWORDS, TENANTS))
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


@asynccontextmanager
async def as_tenant(server: NatsServer, tenant: TenantId, errors: list[str]) -> AsyncIterator[Client]:
    """A plain client with a tenant's credential."""

    async def on_error(exc: Exception) -> None:
        errors.append(str(exc))

    client = await nats.connect(
        server.url,
        user=tenant_user(tenant),
        password=TENANTS.get(tenant, f"password-of-tenant-{tenant}"),
        error_cb=on_error,
        inbox_prefix=tenant_inbox(tenant),
        allow_reconnect=False,
    )
    try:
        yield client
    finally:
        await client.close()


def example(pattern: str) -> str:
    return pattern.replace("*", "x").replace(">", "x")


def tenants_subjects(tenant: TenantId) -> set[str]:
    """What a tenant may publish to or hear, and one subject of its inbox."""
    named = {subjects.batch_submit(tenant), subjects.batch_results(tenant), subjects.batch_done(tenant)}
    return named | {f"{tenant_inbox(tenant)}.x"}


FOREIGN = ("$SYS.REQ.SERVER.PING", "$JS.API.INFO", "$JS.API.STREAM.NAMES", "$JS.API.STREAM.DELETE.policy-settle")
FOREIGN_KV = ("$KV.baton-leases.x", "$JS.API.STREAM.CREATE.KV_baton-leases", "$KV.other.x")


def published_by(service: str) -> set[str]:
    own = {example(hop.pattern) for hop in HOPS if service in hop.senders and hop.name not in OWN_NAME_HOPS}
    own |= {subjects.purge_ack(service)} if service in subjects.COPIES else set()
    return own | ({subjects.trace(service), subjects.audit(service)} if service in SERVICES else set())


def received_by(service: str) -> set[str]:
    return {hop.pattern for hop in HOPS if service in hop.receivers and hop.kind != "stream"}


@pytest.mark.parametrize("service", USERS)
async def test_publish(server: NatsServer, service: str) -> None:
    everything = {example(hop.pattern) for hop in HOPS}
    everything |= {build(name) for build in (subjects.trace, subjects.audit, subjects.purge_ack) for name in SERVICES}
    everything |= {*FOREIGN, "anything", "_INBOX.x", *(f"_INBOX_{other}.x" for other in USERS)}
    everything |= {subject for tenant in TENANTS for subject in tenants_subjects(tenant)}
    if service != "scheduler":
        everything |= set(FOREIGN_KV)
    errors: list[str] = []
    async with raw(server, service, errors) as client:
        for subject in everything:
            await client.publish(subject, b"")
        await flush(client)
    refused = {e.split('"')[1].lower() for e in errors if "permissions violation for publish" in e.lower()}
    own = published_by(service)
    if service == "batch":
        own |= {subjects.batch_done(tenant) for tenant in TENANTS}
    assert {s for s in everything if s.lower() not in refused} == own


@pytest.mark.parametrize("service", USERS)
async def test_subscribe(server: NatsServer, service: str) -> None:
    everything = {hop.pattern for hop in HOPS}
    everything |= {">", "baton.v1.>", "$SYS.>", "$JS.>", "$KV.>", "_INBOX.>"}
    everything |= {f"_INBOX_{other}.>" for other in USERS}
    everything |= {f"{tenant_inbox(tenant)}.>" for tenant in TENANTS}
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
        wanted = {"name": PURGE_ACK_STREAM, "subjects": [subjects.sched_submit("x")], "storage": "memory"}
        with pytest.raises(nats.errors.TimeoutError):
            await client.request(f"$JS.API.STREAM.CREATE.{PURGE_ACK_STREAM}", json.dumps(wanted).encode(), timeout=0.5)
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


# ---------------------------------------------------------------------------------------------- tenants


def tenant_tries(tenant: TenantId) -> set[str]:
    """Subjects of every kind: the services', every tenant's, inboxes, JetStream, the system's."""
    tries = {example(hop.pattern) for hop in HOPS} | {
        subject for other in TENANTS for subject in tenants_subjects(other)
    }
    tries |= {subjects.batch_item(other) for other in TENANTS}
    tries |= {f"_INBOX_{user}.x" for user in USERS} | {"_INBOX.x", "_R_.x", "_GR_.x", "anything", *FOREIGN, *FOREIGN_KV}
    stream = submit_stream(tenant)
    return tries | {
        f"$JS.API.STREAM.CREATE.{stream}",
        f"$JS.API.STREAM.INFO.{stream}",
        f"$JS.API.STREAM.PURGE.{stream}",
        f"$JS.API.STREAM.MSG.GET.{stream}",
        f"$JS.API.DIRECT.GET.{stream}",
        f"$JS.API.CONSUMER.CREATE.{stream}",
        f"$JS.API.CONSUMER.DURABLE.CREATE.{stream}.{tenant}",
        f"$JS.API.CONSUMER.MSG.NEXT.{stream}.batch",
        f"$JS.ACK.{stream}.batch.1.1.1.1.0",
        "$JS.API.STREAM.LIST",
        "$SYS.REQ.USER.INFO",
        "$SYS.REQ.ACCOUNT.PING",
        "$SRV.PING",
    }


@pytest.mark.parametrize("tenant", TENANTS)
async def test_a_tenant_publishes_to_its_two_subjects_and_nowhere_else(server: NatsServer, tenant: TenantId) -> None:
    errors: list[str] = []
    async with as_tenant(server, tenant, errors) as client:
        for subject in sorted(tenant_tries(tenant)):
            await client.publish(subject, b"{}")
        await flush(client)
    refused = {e.split('"')[1].lower() for e in errors if "permissions violation for publish" in e.lower()}
    allowed = {subjects.batch_submit(tenant), subjects.batch_results(tenant)}
    assert {s for s in tenant_tries(tenant) if s.lower() not in refused} == allowed


@pytest.mark.parametrize("tenant", TENANTS)
async def test_a_tenant_hears_its_results_and_its_inbox_and_nothing_else(server: NatsServer, tenant: TenantId) -> None:
    tries = tenant_tries(tenant) | {hop.pattern for hop in HOPS}
    tries |= {">", "*", "baton.>", "baton.v1.batch.>", "baton.v1.batch.*.*", "baton.v1.batch.done.>", "$SYS.>", "$JS.>"}
    tries |= {"_INBOX.>", "_R_.>", "$SRV.>", *(f"_INBOX_{user}.>" for user in USERS), "$JS.EVENT.>"}
    tries |= {f"{tenant_inbox(other)}.>" for other in TENANTS}
    errors: list[str] = []
    async with as_tenant(server, tenant, errors) as client:
        for subject in sorted(tries):
            await client.subscribe(subject, cb=ignore)
            await client.subscribe(subject, queue="batch", cb=ignore)
        await flush(client)
    refused = [e.split('"')[1].lower() for e in errors if "permissions violation for subscription" in e.lower()]
    inbox = tenant_inbox(tenant)
    assert {s for s in tries if s.lower() not in refused} == {subjects.batch_done(tenant), f"{inbox}.x", f"{inbox}.>"}
    assert all(refused.count(s.lower()) == 2 for s in tries if s.lower() in refused), "with a queue group likewise"


async def test_tenants_cannot_log_in_as_each_other_or_as_a_service(server: NatsServer) -> None:
    wrong = [(tenant_user(ACME), TENANTS[OTHER]), ("policy", TENANTS[POLICY]), ("batch", TENANTS[ACME]), ("acme", "x")]
    for user, password in wrong:
        with pytest.raises(nats.errors.Error):
            await nats.connect(
                server.url, user=user, password=password, allow_reconnect=False, max_reconnect_attempts=0
            )


@asynccontextmanager
async def queue_service(server: NatsServer, *tenants: TenantId) -> AsyncIterator[tuple[NatsBus, list[Delivery]]]:
    """The batch service's side of the queue: keeps the lines that came, answers results with the tenant's name."""
    lines: list[Delivery] = []

    async def on_line(delivery: Delivery) -> None:
        lines.append(delivery)

    async def on_results(delivery: Delivery) -> bytes:
        if delivery.message == b"too often":
            raise QuotaExceeded("slower", retry_after_s=2.0)
        return b"results of " + delivery.subject.rpartition(".")[2].encode()

    async with connect_bus(server.url, "batch", password=PASSWORDS["batch"]) as bus:
        for tenant in tenants:
            await bus.consume(submit_stream(tenant), subjects.batch_submit(tenant), bytes, on_line, durable="batch")
        await bus.serve(subjects.ANY_BATCH_RESULTS, bytes, on_results, queue="batch")
        yield bus, lines


async def some(found: list[object] | list[Delivery], count: int) -> None:
    async with asyncio.timeout(10):
        while len(found) < count:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_lines_and_results_cross_with_the_tenant_in_the_subject(server: NatsServer) -> None:
    async with (
        queue_service(server, ACME, OTHER) as (batch, lines),
        as_tenant(server, ACME, []) as acme,
        as_tenant(server, OTHER, []) as other,
    ):
        for client, tenant in ((acme, ACME), (other, OTHER)):
            # Both use the same message id: each has a stream of its own, so neither hides the other's line.
            stored = await client.request(
                subjects.batch_submit(tenant), b"line of " + tenant.encode(), headers={"Nats-Msg-Id": "1"}, timeout=5
            )
            acknowledged = json.loads(stored.data)
            assert acknowledged["stream"] == submit_stream(tenant)
            assert "duplicate" not in acknowledged
            answer = await client.request(subjects.batch_results(tenant), b"{}", timeout=5)
            assert answer.data == b"results of " + tenant.encode()
            assert not answer.headers
        await some(lines, 2)
        assert {(d.subject, d.message) for d in lines} == {
            (subjects.batch_submit(ACME), b"line of acme"),
            (subjects.batch_submit(OTHER), b"line of other"),
        }
        assert len({d.stored_id for d in lines}) == 2

        heard: dict[TenantId, list[object]] = {ACME: [], OTHER: []}
        for client, tenant in ((acme, ACME), (other, OTHER)):
            await client.subscribe(subjects.batch_done(tenant), cb=keeper(heard[tenant]))
            await flush(client)
        await batch.publish(subjects.batch_done(OTHER), b"done")
        await some(heard[OTHER], 1)
        await flush(acme)
        assert (heard[ACME], heard[OTHER]) == ([], [(subjects.batch_done(OTHER), b"done")])


def keeper(found: list[object]) -> object:
    async def keep(msg: Msg) -> None:
        found.append((msg.subject, msg.data))

    return keep


async def test_errors_reach_tenants_as_json(server: NatsServer) -> None:
    async with queue_service(server), as_tenant(server, ACME, []) as acme:
        answer = await acme.request(subjects.batch_results(ACME), b"too often", timeout=5)
    assert json.loads(answer.data) == {
        "error": {"code": "rate_limit_exceeded", "message": "slower", "retry_after_s": 2.0}
    }
    assert not answer.headers


async def test_a_line_too_long_is_refused_when_it_is_published(server: NatsServer) -> None:
    async with queue_service(server, ACME) as (_, lines), as_tenant(server, ACME, []) as acme:
        refused = await acme.request(subjects.batch_submit(ACME), b"x" * (MAX_LINE_BYTES + 1), timeout=5)
        assert "message size exceeds" in json.loads(refused.data)["error"]["description"]
        assert not lines


async def test_a_tenant_cannot_have_answers_sent_to_somebody_else(server: NatsServer) -> None:
    """It may name any reply subject; wherever that leads, it leads there in the tenant's own account."""
    errors: list[str] = []
    async with (
        queue_service(server, ACME, OTHER),
        as_tenant(server, ACME, errors) as acme,
        as_tenant(server, OTHER, []) as other,
        raw(server, "batch", []) as batch,
    ):
        heard: list[object] = []
        for subject in (f"{tenant_inbox(OTHER)}.>", subjects.batch_done(OTHER)):
            await other.subscribe(subject, cb=keeper(heard))
        await batch.subscribe("_INBOX_batch.x", cb=keeper(heard))
        await flush(other)
        await flush(batch)
        targets = [f"{tenant_inbox(OTHER)}.x", subjects.batch_done(OTHER), "_INBOX_batch.x", subjects.POLICY_EVENTS]
        for target in (*targets, "_R_.x", "$JS.API.STREAM.DELETE.policy-settle"):
            for subject in (subjects.batch_results(ACME), subjects.batch_submit(ACME)):
                await acme.publish(subject, b"{}", reply=target)
        await flush(acme)
        # Its own next answer comes after those, and they went nowhere.
        assert (await acme.request(subjects.batch_results(ACME), b"{}", timeout=5)).data == b"results of acme"
        await flush(other)
        await flush(batch)
        assert heard == []


HEADERS = (
    b"NATS/1.0 \xff\xfe\xfd\r\n\r\n",
    b"NATS/1.0",
    b"X",
    b"NATS/1.0 404\r\n\r\n",
    b"NATS/1.0\r\nStatus: 503\r\n\r\n",
    b"NATS/1.0\r\n\xff: \xff\r\n\r\n",
    b"NATS/1.0\r\nBaton-Budget-Ms: 0\r\nBaton-Error: {}\r\ntraceparent: x\r\n\r\n",
)


async def test_no_header_a_tenant_writes_deafens_the_service(server: NatsServer) -> None:
    """nats-py ends its read loop at a header that is not UTF-8; an empty message with a status looks like NATS' own."""
    async with queue_service(server, ACME, OTHER) as (batch, lines), as_tenant(server, OTHER, []) as other:
        for header in HEADERS:
            for subject in (subjects.batch_submit(ACME), subjects.batch_results(ACME)):
                await publish_by_hand(server, ACME, subject, header)
        await some(lines, len(HEADERS))
        # What is no header at all comes as payload.
        assert {d.message for d in lines} == {b"", b"X"}
        assert all(d.deadline is None for d in lines)
        answer = await other.request(subjects.batch_results(OTHER), b"{}", timeout=5)
        assert answer.data == b"results of other"
        await other.request(subjects.batch_submit(OTHER), b"line", timeout=5)
        await some(lines, len(HEADERS) + 1)
        assert batch.connected


async def publish_by_hand(server: NatsServer, tenant: TenantId, subject: str, header: bytes) -> None:
    """One message with these very header bytes and no payload; the client library would not send them."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    login = {"user": tenant_user(tenant), "pass": TENANTS[tenant], "headers": True, "verbose": False, "pedantic": False}
    reply = f"{tenant_inbox(tenant)}.1"
    size = len(header)
    writer.write(b"CONNECT " + json.dumps(login).encode() + b"\r\n")
    writer.write(f"HPUB {subject} {reply} {size} {size}\r\n".encode() + header + b"\r\nPING\r\n")
    assert await asyncio.wait_for(reader.readuntil(b"PONG"), 30)
    writer.close()
    await writer.wait_closed()


async def test_a_connection_of_a_tenant_has_so_many_subscriptions(server: NatsServer) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    await reader.readline()
    login = {"user": tenant_user(ACME), "pass": TENANTS[ACME], "verbose": False, "pedantic": False}
    names = [f"SUB {tenant_inbox(ACME)}.{number} {number}\r\n" for number in range(MAX_TENANT_SUBSCRIPTIONS + 1)]
    writer.write(f"CONNECT {json.dumps(login)}\r\n{''.join(names)}PING\r\n".encode())
    answers = (await asyncio.wait_for(reader.readuntil(b"PONG"), 5)).decode()
    writer.close()
    assert answers.count("maximum subscriptions exceeded") == 1


async def test_tenants_come_and_go_while_the_server_runs(tmp_path: Path) -> None:
    """A reload takes and gives a tenant; those connected go on. As `keys nats` does, it is sent twice: of an account
    that is new, nats-server takes the imports in force only at the second."""
    server = start_nats(tmp_path, nats_config(PASSWORDS, TENANTS))
    try:
        async with queue_service(server, ACME) as (batch, lines), as_tenant(server, ACME, []) as acme:
            heard: list[object] = []
            await acme.subscribe(subjects.batch_done(ACME), cb=keeper(heard))
            await flush(acme)
            with pytest.raises(nats.errors.Error):
                async with as_tenant(server, LATER, []):
                    pass
            await reload(server, nats_config(PASSWORDS, {**TENANTS, LATER: f"password-of-tenant-{LATER}"}))
            await batch.consume(
                submit_stream(LATER), subjects.batch_submit(LATER), bytes, _into(lines), durable="batch"
            )
            async with as_tenant(server, LATER, []) as later:
                answer = await later.request(subjects.batch_results(LATER), b"{}", timeout=5)
                assert answer.data == b"results of later"
                await later.request(subjects.batch_submit(LATER), b"late", timeout=5)
                await some(lines, 1)
                await reload(server, nats_config(PASSWORDS, TENANTS))
                async with asyncio.timeout(5):
                    while later.is_connected:  # noqa: ASYNC110
                        await asyncio.sleep(0.01)
            assert acme.is_connected
            await acme.request(subjects.batch_submit(ACME), b"still", timeout=5)
            await some(lines, 2)
            await batch.publish(subjects.batch_done(ACME), b"done")
            await some(heard, 1)
            assert (await acme.request(subjects.batch_results(ACME), b"{}", timeout=5)).data == b"results of acme"
    finally:
        server.kill()


def _into(lines: list[Delivery]) -> DurableHandler:
    async def keep(delivery: Delivery) -> None:
        lines.append(delivery)

    return keep


async def reload(server: NatsServer, config: str) -> None:
    assert server.process is not None
    server.config.write_text(config)
    log = server.folder / "log"
    for _ in range(2):
        seen = log.read_text().count("Reloaded server configuration")
        server.process.send_signal(signal.SIGHUP)
        async with asyncio.timeout(10):
            while log.read_text().count("Reloaded server configuration") == seen:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
