"""Policy on the memory bus with a real Redis behind it."""

from __future__ import annotations

import asyncio
import hashlib
import json
import secrets
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import redis.asyncio
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from msgspec.structs import replace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from services.policy import service as policy_service
from services.policy.accounts import Accounts
from services.policy.admin import Admin
from services.policy.admission import ALL_TAKEN, Terms
from services.policy.bootstrap import apply_bootstrap, read_bootstrap
from services.policy.records import Records
from services.policy.service import Defaults, PolicyService
from services.policy.tenants import OwnLimits
from shared.bus.memory_bus import MemoryBroker, MemoryBus
from shared.bus.streams import AUDIT_STREAM
from shared.contracts import messages as m
from shared.contracts import subjects
from shared.contracts.attempt import Attempt
from shared.contracts.errors import BatonError, InvalidInput, SettingsError, Unavailable, from_wire
from shared.contracts.grants import Grant, Limits, Scope, SignedGrant
from shared.contracts.ids import Epoch, IngressId, RequestId, TenantId, WorkerId
from shared.contracts.parts import ComputeRow, Totals
from shared.security.grant_signature import GrantSigner, GrantVerifier, by_id
from shared.store import redis_store
from shared.store.redis_store import RedisStore, connect_redis
from tests.servers import RedisServer

DEMO, OTHER = TenantId("demo"), TenantId("other")
DEMO_HASH, OTHER_HASH = (hashlib.sha256(name.encode()).digest() for name in ("demo-key", "other-key"))
SIGNER = GrantSigner(Ed25519PrivateKey.from_private_bytes(bytes(32)))
TERMS = Terms(budget_s={"interactive": 60.0, "analysis": 60.0, "batch": 60.0}, margin_s=5.0)


def tenant_entry(name: str, key_hash: bytes, **fields: Any) -> dict[str, Any]:
    return {"id": name, "keys": [{"id": f"{name}-key", "hash": key_hash.hex()}], **fields}


def bootstrap_file(path: Path, *tenants: dict[str, Any]) -> Path:
    path.touch(mode=0o600)
    path.write_text(json.dumps({"tenants": tenants}))
    return path


class World:
    def __init__(self, redis: RedisStore, folder: Path) -> None:
        prefix = f"test-{secrets.token_hex(4)}"
        self.broker = MemoryBroker()
        self.bus = MemoryBus(self.broker, "gateway")
        self.records, self.accounts = Records(redis, prefix), Accounts(redis, prefix)
        self.admin = Admin(MemoryBus(self.broker, "policy"), redis, self.records)
        self.path = folder / "bootstrap.json"
        self.redis = redis
        limits = Limits(requests_per_minute=1000, tokens_per_minute=100_000)
        defaults = Defaults(limits=limits, max_tokens=1024, terms=TERMS)
        self.service = PolicyService(MemoryBus(self.broker, "policy"), self.records, self.accounts, SIGNER, defaults)
        self.events: list[m.PolicyEvent] = []

    async def start(self) -> None:
        await self.bootstrap(tenant_entry("demo", DEMO_HASH), tenant_entry("other", OTHER_HASH))
        await self.service.start()
        await self.bus.subscribe(subjects.POLICY_EVENTS, m.PolicyEvent, lambda d: self.events.append(d.message))

    async def bootstrap(self, *tenants: dict[str, Any]) -> int:
        return await apply_bootstrap(read_bootstrap(bootstrap_file(self.path, *tenants)), self.records)

    async def authenticate(self, key_hash: bytes) -> m.Identity | m.Refusal:
        message = m.Authenticate(key_hash=key_hash)
        return await self.bus.request(subjects.POLICY_AUTHENTICATE, message, m.Identity | m.Refusal, timeout_s=5.0)

    async def ask(self, name: str, key_hash: bytes = DEMO_HASH, **fields: Any) -> m.Granted | m.Refusal:
        asked = {"model": "m", "num_prompt_tokens": 10, "max_tokens": 20, **fields}
        message = m.Admit(request_id=RequestId(name), key_hash=key_hash, **asked)
        return await self.bus.request(subjects.POLICY_ADMIT, message, m.Granted | m.Refusal, timeout_s=30.0)

    async def admitted(self, name: str, key_hash: bytes = DEMO_HASH, **fields: Any) -> m.Granted:
        answer = await self.ask(name, key_hash, **fields)
        assert isinstance(answer, m.Granted), answer
        return answer

    async def ask_tenant(self, name: str, tenant: TenantId = DEMO, **fields: Any) -> m.Granted | m.Refusal:
        asked = {"model": "m", "num_prompt_tokens": 10, "max_tokens": 20, **fields}
        message = m.AdmitTenant(request_id=RequestId(name), tenant=tenant, **asked)
        return await self.bus.request(subjects.POLICY_ADMIT_TENANT, message, m.Granted | m.Refusal, timeout_s=30.0)

    async def admitted_tenant(self, name: str, tenant: TenantId = DEMO, **fields: Any) -> m.Granted:
        answer = await self.ask_tenant(name, tenant, **fields)
        assert isinstance(answer, m.Granted), answer
        return answer

    async def settle(self, name: str, grant: SignedGrant, tokens: int, epoch: int = 1) -> None:
        message = m.Settle(
            attempt=Attempt(RequestId(name), Epoch(epoch)), grant=grant, prompt_tokens=10, completion_tokens=tokens
        )
        await self.bus.publish_durable(subjects.POLICY_SETTLE, message, message_id=f"{name}-{epoch}-{tokens}")


@pytest.fixture
async def world(redis_server: RedisServer, tmp_path: Path) -> AsyncIterator[World]:
    async with connect_redis(redis_server.url) as redis:
        world = World(redis, tmp_path)
        await world.start()
        yield world
        await world.service.stop()
        await world.bus.close()


async def until(condition: Callable[[], Any], timeout_s: float = 30.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not (await result if asyncio.iscoroutine(result := condition()) else result):
        assert time.monotonic() < deadline, "condition not met in time"
        await asyncio.sleep(0.005)


def opened(granted: m.Granted) -> Grant:
    return GrantVerifier(by_id([SIGNER.public_key])).verify(granted.grant, time.time())


def error_of(answer: object) -> BatonError:
    assert isinstance(answer, m.Refusal), answer
    return from_wire(answer.error)


async def test_a_key_names_its_tenant(world: World) -> None:
    found = await world.authenticate(DEMO_HASH)
    assert isinstance(found, m.Identity)
    assert (found.tenant, found.key_id, found.default_max_tokens) == ("demo", "demo-key", 1024)
    assert found.limits == Limits(1000, 100_000)
    assert error_of(await world.authenticate(hashlib.sha256(b"guess").digest())).status == 401


async def test_a_grant_is_signed_and_says_what_was_asked(world: World) -> None:
    grant = opened(await world.admitted("r1", choices=2, klass="analysis"))
    assert (grant.request_id, grant.tenant, grant.model, grant.klass) == ("r1", "demo", "m", "analysis")
    assert (grant.scope.tenant, grant.scope.authorization, grant.scope.generation) == ("demo", (), 1)
    assert grant.reserved_tokens == 50
    assert abs(grant.expires_s - time.time() - 65.0) < 5.0


async def test_a_reservation_knows_who_holds_its_request_until_it_is_settled(world: World) -> None:
    granted = await world.admitted("r1", ingress_id=IngressId("gateway-a"))
    await world.admitted("r2")
    assert await world.accounts.held_by(DEMO) == {"r1": "gateway-a"}
    await world.admitted("r1", ingress_id=IngressId("gateway-b"))  # taken over
    assert await world.accounts.held_by(DEMO) == {"r1": "gateway-b"}
    assert (await world.accounts.quota(DEMO))["held"] == "60"
    await world.settle("r1", granted.grant, 5)
    await until(lambda: held_by_nobody(world))


async def test_a_request_that_is_only_counted_holds_nothing_and_makes_no_span(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    spans, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(spans))
    monkeypatch.setattr(policy_service, "tracer", provider.get_tracer("test"))
    await world.admin.set_limits(DEMO, OwnLimits(requests_per_minute=2, max_parallel=1))
    await world.admitted("running", ingress_id=IngressId("gateway-a"))
    counted = await world.admitted("counted", counts_only=True, num_prompt_tokens=1, max_tokens=1)
    assert [span.name for span in spans.get_finished_spans()] == ["policy.admit"]
    assert counted.quota is not None
    assert await world.accounts.held_by(DEMO) == {"running": "gateway-a"}
    refused = error_of(await world.ask("more", counts_only=True, num_prompt_tokens=1, max_tokens=1))
    assert (refused.code, refused.param) == ("rate_limit_exceeded", "requests_per_minute")


async def test_a_request_that_is_only_counted_waits_for_no_tokens_and_pays_no_debt(world: World) -> None:
    await world.admin.set_limits(DEMO, OwnLimits(requests_per_minute=100, tokens_per_minute=40))
    await world.admitted("all", num_prompt_tokens=10, max_tokens=30)
    assert error_of(await world.ask("one", num_prompt_tokens=1, max_tokens=1)).param == "tokens_per_minute"
    counted = await world.admitted("counted", counts_only=True, num_prompt_tokens=1, max_tokens=1)
    assert counted.quota is not None
    assert (counted.quota.held, round(counted.quota.requests)) == (40, 2)
    assert error_of(await world.ask("one", num_prompt_tokens=1, max_tokens=1)).param == "tokens_per_minute"


async def held_by_nobody(world: World) -> bool:
    return not await world.accounts.held_by(DEMO)


async def test_a_salt_becomes_part_of_the_scope_and_one_of_another_length_is_refused(world: World) -> None:
    assert opened(await world.admitted("r1", salt=bytes(16))).scope == Scope(tenant=DEMO, salt=bytes(16))
    assert opened(await world.admitted_tenant("r2", salt=bytes(16))).scope == Scope(tenant=DEMO, salt=bytes(16))
    for salt in (b"other", bytes(17)):
        assert error_of(await world.ask("r3", salt=salt)).param == "cache_salt"


async def test_batch_work_is_admitted_by_tenant_any_number_of_times_and_holds_nothing(world: World) -> None:
    await world.admin.set_limits(DEMO, OwnLimits(tokens_per_minute=40, requests_per_minute=1))
    grants = [opened(await world.admitted_tenant("r1", klass=klass)) for klass in ("batch", "interactive", "")]
    for grant in grants:
        assert (grant.request_id, grant.tenant, grant.klass, grant.reservation_id) == ("r1", "demo", "batch", "")
        assert grant.scope == Scope(tenant=DEMO)
    assert await world.accounts.quota(DEMO) == {}
    await world.admitted("r2")  # the limits a minute are untouched


async def test_a_batch_settlement_is_booked_and_leaves_the_bucket_alone(world: World) -> None:
    await world.admin.set_limits(DEMO, OwnLimits(tokens_per_minute=40, requests_per_minute=0))
    await world.admitted("by-key")
    before = await world.accounts.quota(DEMO)
    granted = await world.admitted_tenant("r1")
    await world.settle("r1", granted.grant, 20, epoch=17)
    await world.settle("r1", granted.grant, 5, epoch=1)  # of an earlier run, late
    await until(lambda: _booked(world, "r1", "20"))
    await asyncio.sleep(0.05)
    usage = await world.accounts.usage(DEMO)
    assert (usage["requests"], usage["prompt_tokens"], usage["completion_tokens"]) == ("1", "10", "20")
    assert await world.accounts.quota(DEMO) == before


async def _booked(world: World, name: str, tokens: str) -> bool:
    return (await world.accounts.row(DEMO, RequestId(name))).get("completion_tokens") == tokens


async def test_batch_work_of_unknown_tenants_and_models_is_refused(world: World) -> None:
    unknown = error_of(await world.ask_tenant("r1", TenantId("nobody")))
    assert (unknown.status, unknown.code) == (403, "unknown_tenant")
    await world.bootstrap(tenant_entry("demo", DEMO_HASH, models=["m"]))
    await world.admitted_tenant("r1")
    assert error_of(await world.ask_tenant("r1", model="other")).status == 404
    assert error_of(await world.ask_tenant("r1", max_tokens=0)).param == "max_tokens"
    await world.admin.set_limits(DEMO, OwnLimits(max_context_tokens=25))
    assert error_of(await world.ask_tenant("r1")).code == "context_length_exceeded"


async def test_two_tenants_get_two_scopes(world: World) -> None:
    first, second = opened(await world.admitted("r1")), opened(await world.admitted("r1", OTHER_HASH))
    assert first.scope != second.scope


async def test_a_refusal_touches_no_quota(world: World) -> None:
    assert error_of(await world.ask("r1", max_tokens=0)).param == "max_tokens"
    assert error_of(await world.ask("r1", key_hash=bytes(32))).status == 401
    assert await world.accounts.quota(DEMO) == {}


async def test_a_hundred_concurrent_admits_never_exceed_the_limit(world: World) -> None:
    await world.admin.set_limits(DEMO, OwnLimits(tokens_per_minute=300, requests_per_minute=0))
    answers = await asyncio.gather(*(world.ask(f"r{i}") for i in range(100)))
    granted = [answer for answer in answers if isinstance(answer, m.Granted)]
    assert sum(opened(answer).reserved_tokens for answer in granted) == 300
    for answer in answers:
        if isinstance(answer, m.Refusal):
            error = from_wire(answer.error)
            assert (error.status, error.param) == (429, "tokens_per_minute")
            assert error.retry_after_s > 0
    # Each settles at 12 of its 30 tokens: two of them make room for one more.
    for answer in granted[:2]:
        await world.settle(opened(answer).request_id, answer.grant, 2)
    await until(lambda: _held(world, 240))
    await world.admitted("late")


async def _held(world: World, tokens: int) -> bool:
    return (await world.accounts.quota(DEMO))["held"] == str(tokens)


async def test_requests_at_once_are_refused_by_name_and_a_place_that_is_freed_is_taken(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    await world.admin.set_limits(DEMO, OwnLimits(requests_per_minute=0, max_parallel=2))
    first = await world.admitted("r1")
    await world.admitted("r2")
    refused = await world.ask("r3")
    error = error_of(refused)
    assert (error.status, error.code, error.param, error.retry_after_s) == (429, ALL_TAKEN, "max_parallel", 1.0)
    assert "your limit of 2 requests at once" in error.message
    assert isinstance(refused, m.Refusal)
    assert refused.quota is not None
    assert (refused.quota.max_parallel, refused.quota.running, refused.never) == (2, 2, False)
    await world.admitted("r4", OTHER_HASH)
    await world.admitted_tenant("r5")  # batch work takes no place, and needs none
    # one that asks a moment before the place is free gets it, without asking twice
    monkeypatch.setattr(policy_service, "SLOT_LOOKS_S", (0.05,) * 400)
    asking = asyncio.create_task(world.ask("r3"))
    await until(lambda: world.service._waiting == 1)
    await world.settle("r1", first.grant, 5)
    assert isinstance(await asking, m.Granted)
    assert world.service._waiting == 0
    assert await world.accounts.running(DEMO) == {"demo-key": 2}


async def test_who_waits_for_a_place_keeps_nobody_else_waiting(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy_service, "SLOT_LOOKS_S", (0.2,) * 100)
    await world.admin.set_limits(DEMO, OwnLimits(requests_per_minute=0, max_parallel=1))
    await world.admitted("first")
    asking = [asyncio.create_task(world.ask(f"r{number}")) for number in range(2 * policy_service.MAX_AT_ONCE)]
    await until(lambda: world.service._waiting == len(asking))
    for number in range(5):
        await world.admitted(f"other-{number}", OTHER_HASH)
    assert await world.accounts.running(DEMO) == {"demo-key": 1}
    await world.admin.set_limits(DEMO, OwnLimits(requests_per_minute=0, tokens_per_minute=0))  # it holds at once
    answers = await asyncio.gather(*asking)
    assert all(isinstance(answer, m.Granted) for answer in answers)


async def test_no_more_than_so_many_wait_for_a_place(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy_service, "MAX_WAITING", 0)
    monkeypatch.setattr(policy_service, "SLOT_LOOKS_S", (3600.0,))
    await world.admin.set_limits(DEMO, OwnLimits(max_parallel=1))
    await world.admitted("first")
    assert error_of(await world.ask("second")).code == ALL_TAKEN


async def test_the_limit_of_a_key_is_its_own(world: World) -> None:
    second_hash = hashlib.sha256(b"second").digest()
    await world.admin.create_key(DEMO, "second", second_hash, max_parallel=1)
    await world.admitted("r1", second_hash)
    error = error_of(await world.ask("r2", second_hash))
    assert "this key's limit of 1 requests at once" in error.message
    found = await world.authenticate(second_hash)
    assert isinstance(found, m.Identity)
    assert found.quota is not None
    assert (found.key_max_parallel, found.quota.key_id, found.quota.key_running) == (1, "second", 1)
    await world.admitted("r3")  # the tenant's other key has none
    await world.admin.limit_key(DEMO, "second", 2)
    await world.admitted("r2", second_hash)


async def test_a_settlement_is_booked_once_and_a_higher_epoch_replaces_it(world: World) -> None:
    grant = (await world.admitted("r1")).grant
    for epoch, tokens in ((1, 7), (1, 8), (2, 9), (1, 9)):
        await world.settle("r1", grant, tokens, epoch)

    async def booked() -> bool:
        return (await world.accounts.usage(DEMO)).get("completion_tokens") == "9"

    await until(booked)
    usage = await world.accounts.usage(DEMO)
    assert (usage["requests"], usage["prompt_tokens"]) == ("1", "10")
    assert (await world.accounts.quota(DEMO))["held"] == "0"


async def test_a_forged_settlement_is_dropped(world: World) -> None:
    grant = (await world.admitted("r1")).grant
    forger = GrantSigner(Ed25519PrivateKey.generate())
    await world.settle("r1", forger.sign(opened(m.Granted(grant=grant))), 5)
    await world.settle("r2", grant, 5)  # a true grant, of another request
    await world.settle("r1", grant, 6)

    async def booked() -> bool:
        return bool(await world.accounts.usage(DEMO))

    await until(booked)
    assert (await world.accounts.usage(DEMO))["completion_tokens"] == "6"


@pytest.mark.parametrize(
    "fields",
    [
        {"completion_tokens": -1},
        {"prompt_tokens": 2**64 - 1},
        {"cached_tokens": 2**63},
        {"compute": Totals(computed_tokens=2**64 - 1)},
        {"compute": Totals(wasted_tokens=-5)},
        {"compute": Totals(prefill_s=float("nan"))},
        {"compute": Totals(decode_s=float("inf"))},
    ],
)
async def test_a_settlement_of_impossible_numbers_changes_nothing(world: World, fields: dict[str, Any]) -> None:
    grant = (await world.admitted("r1")).grant
    attempt = Attempt(RequestId("r1"), Epoch(1))
    if "compute" in fields:
        fields = {"compute": (ComputeRow(WorkerId("decode-1"), attempt, fields["compute"]),)}
    wrong = m.Settle(**{"attempt": attempt, "grant": grant, "prompt_tokens": 1, "completion_tokens": 1, **fields})
    await world.bus.publish_durable(subjects.POLICY_SETTLE, wrong, message_id="wrong")
    second = (await world.admitted("r2")).grant
    await world.settle("r2", second, 6)

    async def booked() -> bool:
        return bool(await world.accounts.usage(DEMO))

    await until(booked)
    assert (await world.accounts.usage(DEMO))["requests"] == "1"
    assert (await world.accounts.quota(DEMO))["held"] == str(opened(m.Granted(grant=grant)).reserved_tokens)


async def test_a_revoked_key_opens_nothing_and_stays_revoked(world: World) -> None:
    await world.admin.revoke_key(DEMO, "demo-key")
    assert error_of(await world.authenticate(DEMO_HASH)).status == 401
    assert error_of(await world.ask("r1")).status == 401
    await world.admitted("r1", OTHER_HASH)
    assert world.events == [m.PolicyEvent(kind="revoked", tenant=DEMO, key_id="demo-key")]
    assert await world.bootstrap(tenant_entry("demo", DEMO_HASH, weight=2.0)) == 1
    assert error_of(await world.authenticate(DEMO_HASH)).status == 401
    with pytest.raises(InvalidInput):
        await world.admin.revoke_key(OTHER, "demo-key")


async def test_a_known_owner_costs_one_round_trip_and_every_change_of_it_counts_at_once(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given an owner that was asked about before
    await world.admitted("r1")
    trips: list[str] = []
    connection = redis.asyncio.Connection.send_packed_command

    async def counted(self: Any, command: Any, *args: Any, **kwargs: Any) -> Any:
        trips.append(str(command))
        return await connection(self, command, *args, **kwargs)

    monkeypatch.setattr(redis.asyncio.Connection, "send_packed_command", counted)
    # Then the next request takes one round trip
    await world.admitted("r2")
    assert len(trips) == 1
    # And what changes is in force for the next one: a limit that is lower, a model that is closed, one that is opened
    await world.records.change_tenant(DEMO, lambda t: replace(t, limits=replace(t.limits, max_output_tokens=15)))
    assert error_of(await world.ask("r3")).param == "max_tokens"
    await world.records.change_tenant(DEMO, lambda t: replace(t, limits=OwnLimits(), models=("other",)))
    assert error_of(await world.ask("r4")).status == 404
    await world.records.change_tenant(DEMO, lambda t: replace(t, models=("m",)))
    await world.admitted("r5")
    # And a revoked key opens nothing: what was reserved before that was seen is let go
    held = int((await world.accounts.quota(DEMO))["held"])
    await world.admin.revoke_key(DEMO, "demo-key")
    assert error_of(await world.ask("r6")).status == 401
    assert int((await world.accounts.quota(DEMO))["held"]) == held
    assert error_of(await world.ask("r7")).status == 401


async def test_a_script_that_redis_forgot_is_sent_again_with_the_commands_before_it(world: World) -> None:
    await world.admitted("r1")
    await world.redis.execute("SCRIPT", "FLUSH")
    await world.admitted("r2")
    assert (await world.accounts.quota(DEMO))["held"] == "60"


async def test_changes_are_audited_without_losing_one(world: World) -> None:
    await world.admin.set_limits(DEMO, OwnLimits(requests_per_minute=3))
    assert await world.admin.raise_generation(DEMO) == 2
    assert AUDIT_STREAM in world.broker.streams

    async def kept() -> list[bytes]:
        found: list[bytes] = await world.redis.execute("HVALS", world.records._audit)
        return found if len(found) == 2 else []

    await until(kept)
    records = sorted((json.loads(record) for record in await kept()), key=lambda record: record["number"])
    assert [record["action"] for record in records] == ["limits_changed", "scope_raised"]
    assert all(record["tenant"] == "demo" and record["wall_time_s"] > 0 for record in records)
    assert [(event.kind, event.generation) for event in world.events] == [("changed", 0), ("scope_raised", 2)]
    assert opened(await world.admitted("r1")).scope.generation == 2


async def test_bootstrap_leaves_later_changes_alone_until_the_file_changes(world: World) -> None:
    await world.admin.set_limits(DEMO, OwnLimits(requests_per_minute=3))
    assert await world.bootstrap(tenant_entry("demo", DEMO_HASH), tenant_entry("other", OTHER_HASH)) == 0
    found = await world.authenticate(DEMO_HASH)
    assert isinstance(found, m.Identity)
    assert found.limits.requests_per_minute == 3
    entry = tenant_entry("demo", DEMO_HASH, limits={"requests_per_minute": 4})
    assert await world.bootstrap(entry) == 1
    found = await world.authenticate(DEMO_HASH)
    assert isinstance(found, m.Identity)
    assert found.limits.requests_per_minute == 4
    with pytest.raises(SettingsError, match="another tenant"):
        await world.bootstrap(tenant_entry("thief", DEMO_HASH))


async def test_concurrent_changes_are_all_kept(world: World) -> None:
    await asyncio.gather(*(world.admin.raise_generation(DEMO) for _ in range(5)))
    record = await world.records.tenant(DEMO)
    assert record is not None
    assert record.generation == 6


async def test_more_calls_than_connections_wait_their_turn(
    redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_store, "MAX_CONNECTIONS", 4)
    async with connect_redis(redis_server.url) as redis:
        assert await asyncio.gather(*(redis.execute("ECHO", str(i)) for i in range(300))) == [
            str(i).encode() for i in range(300)
        ]


async def test_a_call_waits_only_so_long_for_a_connection(
    redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_store, "MAX_CONNECTIONS", 1)
    monkeypatch.setattr(redis_store, "CONNECTION_WAIT_S", 0.1)
    async with connect_redis(redis_server.url) as redis:
        slow = asyncio.create_task(redis.execute("BLPOP", "nothing-ever", "0.5"))
        await asyncio.sleep(0.05)
        with pytest.raises(Unavailable) as caught:
            await redis.execute("PING")
        assert (caught.value.param, caught.value.retry_after_s) == ("redis", 2.0)
        assert await slow is None
        assert await redis.execute("PING")


async def test_without_redis_policy_fails_closed(own_redis_server: RedisServer, tmp_path: Path) -> None:
    async with connect_redis(own_redis_server.url) as redis:
        world = World(redis, tmp_path)
        await world.start()
        own_redis_server.kill()
        for question in (world.authenticate(DEMO_HASH), world.ask("r1")):
            with pytest.raises(Unavailable) as caught:
                await question
            assert caught.value.retry_after_s > 0
        await world.service.stop()


async def test_an_asker_who_has_gone_leaves_nothing_reserved(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    reserve = world.accounts.reserve_behind

    async def slow(*args: Any, **kwargs: Any) -> Any:
        answer = await reserve(*args, **kwargs)
        await asyncio.sleep(0.2)
        return answer

    monkeypatch.setattr(world.accounts, "reserve_behind", slow)
    message = m.Admit(request_id=RequestId("r"), key_hash=DEMO_HASH, model="m", num_prompt_tokens=1, max_tokens=1)
    with pytest.raises(Unavailable):
        await world.bus.request(subjects.POLICY_ADMIT, message, m.Granted | m.Refusal, timeout_s=0.1)
    await until(lambda: _held(world, 0))


async def test_spans_tell_counts_and_reasons(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(policy_service, "tracer", provider.get_tracer("baton.policy"))
    grant = (await world.admitted("r1")).grant
    await world.ask("r2", max_tokens=0)
    await world.settle("r1", grant, 5)
    await until(lambda: len(exporter.get_finished_spans()) == 3)
    admit, refused, settle = exporter.get_finished_spans()
    assert [span.name for span in (admit, refused, settle)] == ["policy.admit", "policy.admit", "policy.settle"]
    assert admit.attributes is not None
    assert (admit.attributes["baton.status"], admit.attributes["baton.reserved_tokens"]) == ("ok", 30)
    assert refused.attributes is not None
    assert (refused.attributes["baton.status"], refused.attributes["baton.reason"]) == ("invalid_value", "max_tokens")
    assert settle.attributes is not None
    assert settle.attributes["baton.completion_tokens"] == 5


async def test_settlements_wait_for_redis_and_everything_survives_its_restart(
    own_redis_server: RedisServer, tmp_path: Path
) -> None:
    async with connect_redis(own_redis_server.url) as redis:
        world = World(redis, tmp_path)
        await world.start()
        grant = (await world.admitted("r1")).grant
        await world.admin.revoke_key(OTHER, "other-key")
        # The append-only file reaches the disk within a second; a kill sooner would lose what Redis calls stored.
        await redis.execute("WAITAOF", 1, 0, 2000)
        own_redis_server.kill()
        await world.settle("r1", grant, 7)
        await until(lambda: world.service._bus.stats.handler_failures > 0)
        own_redis_server.start()

        async def booked() -> bool:
            try:
                return (await world.accounts.usage(DEMO)).get("completion_tokens") == "7"
            except Unavailable:
                return False

        await until(booked, timeout_s=10.0)
        assert (await world.accounts.quota(DEMO))["held"] == "0"
        assert error_of(await world.authenticate(OTHER_HASH)).status == 401
        assert isinstance(await world.authenticate(DEMO_HASH), m.Identity)
        await world.service.stop()
