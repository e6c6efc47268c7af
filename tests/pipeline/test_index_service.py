"""The index on the memory bus, with a real Redis behind it and workers made of a few messages."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from services.prefix_cache_index import service as index_service
from services.prefix_cache_index.scope_keys import ScopeKeys
from services.prefix_cache_index.service import IndexService
from shared.bus.memory_bus import MemoryBroker, MemoryBus
from shared.contracts import messages as m
from shared.contracts import subjects
from shared.contracts.attempt import Attempt
from shared.contracts.errors import Forbidden, Unavailable, from_wire
from shared.contracts.grants import Grant, Scope, SignedGrant
from shared.contracts.ids import (
    BlockGeneration,
    BlockTag,
    Epoch,
    Incarnation,
    RequestId,
    ScopeGeneration,
    TenantId,
    WorkerId,
)
from shared.contracts.parts import BlockRef, ExtendedRun, ExtendRun, GroupTags, Holder
from shared.contracts.tokens import pack_tokens
from shared.security.grant_signature import GrantSigner, GrantVerifier, by_id
from shared.security.tags import ROOT
from shared.store.redis_store import RedisStore, connect_redis
from shared.store.sealed import Sealer
from tests.servers import RedisServer

SIGNER = GrantSigner(Ed25519PrivateKey.from_private_bytes(bytes(32)))
FORGER = GrantSigner(Ed25519PrivateKey.from_private_bytes(bytes([1]) * 32))
MASTER = bytes(range(32))
W1, W2 = WorkerId("decode-1"), WorkerId("prefill-1")
BLOCK = 4
PROMPT = list(range(100, 118))  # 18 tokens: 4 full blocks and two more


def grant_for(
    tenant: str = "a",
    name: str = "r1",
    generation: int = 1,
    authorization: tuple[str, ...] = (),
    lasts_s: float = 60.0,
    retention_s: int = -1,
    salt: bytes = b"",
) -> Grant:
    scope = Scope(TenantId(tenant), authorization, ScopeGeneration(generation), salt)
    return Grant(
        request_id=RequestId(name),
        tenant=TenantId(tenant),
        scope=scope,
        model="m",
        klass="interactive",
        reservation_id=name,
        reserved_tokens=1,
        expires_s=time.time() + lasts_s,
        budget_s=lasts_s,
        retention_s=retention_s,
    )


class World:
    def __init__(self, redis: RedisStore, prefix: str) -> None:
        self.redis, self.prefix = redis, prefix
        self.broker = MemoryBroker()
        self.bus = MemoryBus(self.broker, "scheduler")
        self.now = 1000.0
        self.keys = ScopeKeys(redis, Sealer(MASTER), secrets.token_bytes, prefix)
        verifier = GrantVerifier(by_id([SIGNER.public_key]))
        self.service = IndexService(
            MemoryBus(self.broker, "prefix-cache-index"), self.keys, verifier, clock=lambda: self.now
        )
        self.replays: list[tuple[str, int]] = []
        self.numbers: dict[WorkerId, int] = {}

    async def start(self) -> None:
        await self.service.start()
        for worker in (W1, W2):
            await self.bus.subscribe(
                subjects.index_replay(worker), m.Replay, lambda d: self.replays.append((d.subject, d.message.number))
            )

    async def beat(
        self, worker: WorkerId = W1, incarnation: int = 1, fingerprint: str = "f", sizes: tuple[int, ...] = (BLOCK,)
    ) -> None:
        beat = m.WorkerBeat(
            worker=worker,
            role="decode",
            pool="default",
            incarnation=Incarnation(incarnation),
            boot_id="b",
            host="h",
            number=1,
            block_sizes=sizes,
            fingerprint=fingerprint,
        )
        await self.bus.publish(subjects.worker_beat(worker), beat)
        await settled()

    async def stored(self, tags: tuple[GroupTags, ...], worker: WorkerId = W1, **fields: Any) -> None:
        number = self.numbers[worker] = self.numbers.get(worker, 0) + 1
        event = m.BlockEvents(worker=worker, **{"incarnation": 1, "number": number, "stored": tags, **fields})
        await self.bus.publish(subjects.index_events(worker), event)
        await settled()

    async def match(self, grant: Grant | SignedGrant, tokens: list[int] | None = None) -> m.Matched | m.Refusal:
        signed = grant if isinstance(grant, SignedGrant) else SIGNER.sign(grant)
        message = m.Match(grant=signed, token_ids=pack_tokens(PROMPT if tokens is None else tokens))
        return await self.bus.request(subjects.INDEX_MATCH, message, m.Matched | m.Refusal, timeout_s=5.0)

    async def matched(self, grant: Grant, tokens: list[int] | None = None) -> m.Matched:
        answer = await self.match(grant, tokens)
        assert isinstance(answer, m.Matched), answer
        return answer

    async def extend(self, *runs: ExtendRun, worker: WorkerId = W1, incarnation: int = 1) -> m.Extended | m.Refusal:
        message = m.Extend(worker=worker, incarnation=Incarnation(incarnation), runs=runs)
        return await self.bus.request(subjects.INDEX_EXTEND, message, m.Extended | m.Refusal, timeout_s=5.0)

    async def extended(self, run: ExtendRun) -> ExtendedRun:
        answer = await self.extend(run)
        assert isinstance(answer, m.Extended), answer
        return answer.runs[0]

    async def refused_code(self, run: ExtendRun) -> str:
        answer = await self.extended(run)
        assert answer.error is not None
        assert answer.tags == ()
        return from_wire(answer.error).code


def a_run(
    grant: Grant, tokens: list[int], parent: BlockTag = ROOT, group: int = 0, blocks: int | None = None
) -> ExtendRun:
    count = len(tokens) // BLOCK if blocks is None else blocks
    return ExtendRun(
        attempt=Attempt(grant.request_id, Epoch(1)),
        group=group,
        grant=SIGNER.sign(grant),
        token_ids=pack_tokens(tokens),
        blocks=tuple(BlockRef(i, BlockGeneration(1)) for i in range(count)),
        parent=parent,
    )


async def settled() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def until(condition: Callable[[], bool], timeout_s: float = 5.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "condition not met in time"
        await asyncio.sleep(0.005)


@pytest.fixture
async def world(redis_server: RedisServer) -> AsyncIterator[World]:
    async with connect_redis(redis_server.url) as redis:
        world = World(redis, f"test-{secrets.token_hex(4)}")
        await world.start()
        yield world
        await world.service.stop()
        await world.bus.close()


def code_of(answer: object) -> str:
    assert isinstance(answer, m.Refusal), answer
    return from_wire(answer.error).code


# ---------------------------------------------------------------------------------------------- match


async def test_what_a_worker_stored_is_found_again(world: World) -> None:
    await world.beat()
    first = await world.matched(grant_for())
    assert first.holders == ()
    assert [len(chain.tags) for chain in first.tags] == [4]
    await world.stored((GroupTags(0, first.tags[0].tags[:3]),))
    again = await world.matched(grant_for(name="r2"), [*PROMPT, 5, 6, 7, 8])
    assert again.tags[0].tags[:4] == first.tags[0].tags
    assert again.holders == (Holder(W1, (3,)),)


@pytest.mark.parametrize(("tokens", "blocks"), [(1, 0), (4, 0), (5, 1), (8, 1), (9, 2), (0, 0)])
async def test_a_match_leaves_the_last_token(world: World, tokens: int, blocks: int) -> None:
    await world.beat()
    assert len((await world.matched(grant_for(), PROMPT[:tokens])).tags[0].tags) == blocks


async def test_two_tenants_and_two_authorizations_never_share(world: World) -> None:
    await world.beat()
    mine = await world.matched(grant_for("a"))
    await world.stored(mine.tags)
    assert (await world.matched(grant_for("a", "r2"))).holders == (Holder(W1, (4,)),)
    for other in (grant_for("b"), grant_for("a", authorization=("x",)), grant_for("a", authorization=("x", "y"))):
        found = await world.matched(other)
        assert found.holders == ()
        assert not set(found.tags[0].tags) & set(mine.tags[0].tags)


async def test_two_salts_of_a_tenant_never_share_and_cost_no_key(world: World) -> None:
    await world.beat()
    salts = [b"", bytes(16), bytes([1]) * 16, b"a".ljust(16)]
    found = [await world.matched(grant_for("a", f"r{i}", salt=salt)) for i, salt in enumerate(salts)]
    other = await world.matched(grant_for("b", salt=bytes(16)))
    tags = [tag for answer in (*found, other) for tag in answer.tags[0].tags]
    assert len(set(tags)) == 4 * (len(salts) + 1)
    # what one salt stored, the same salt finds, and goes on from
    await world.stored(found[1].tags)
    assert (await world.matched(grant_for("a", "s", salt=bytes(16)))).holders == (Holder(W1, (4,)),)
    assert [(await world.matched(grant_for("a", "s", salt=salt))).holders for salt in (salts[0], salts[2])] == [(), ()]
    assert await world.refused_code(a_run(grant_for("a"), PROMPT[:4], found[1].tags[0].tags[0])) == "foreign_parent"
    # and a client that makes up salts fills no store
    assert await world.redis.execute("HLEN", f"{world.prefix}:scope-keys:a") == 1


async def test_groups_have_block_sizes_and_tags_of_their_own(world: World) -> None:
    await world.beat(sizes=(4, 8))
    found = await world.matched(grant_for(), [*PROMPT[:16], 1])
    assert [(chain.group, len(chain.tags)) for chain in found.tags] == [(0, 4), (1, 2)]
    await world.stored((found.tags[1],))
    assert (await world.matched(grant_for(), [*PROMPT[:16], 1])).holders == (Holder(W1, (0, 2)),)


async def test_only_live_grants_of_policy_are_answered(world: World) -> None:
    await world.beat()
    assert code_of(await world.match(FORGER.sign(grant_for()))) == "grant_invalid"
    assert code_of(await world.match(grant_for(lasts_s=-1.0))) == "grant_expired"


async def test_without_a_worker_there_is_nothing_to_match(world: World) -> None:
    found = await world.matched(grant_for())
    assert (found.tags, found.holders) == ((), ())


async def test_a_request_that_must_not_be_cached_gets_no_tags(world: World) -> None:
    await world.beat()
    assert (await world.matched(grant_for(retention_s=0))).tags == ()
    assert await world.refused_code(a_run(grant_for(retention_s=0), PROMPT[:4])) == "never_cached"


# ---------------------------------------------------------------------------------------------- extend


async def test_extend_continues_the_chain_of_a_match(world: World) -> None:
    await world.beat()
    grant = grant_for()
    whole = (await world.matched(grant, [*PROMPT, *range(8)])).tags[0].tags
    prompt_tags = (await world.matched(grant)).tags[0].tags
    answer = await world.extended(a_run(grant, [116, 117, 0, 1, 2, 3, 4, 5], prompt_tags[-1]))
    assert answer.tags == whole[4:6]
    assert answer.scope_generation == 1
    assert (await world.extended(a_run(grant, PROMPT[:16]))).tags == prompt_tags


async def test_a_parent_of_another_tenant_is_refused(world: World) -> None:
    await world.beat()
    foreign = (await world.matched(grant_for("b"))).tags[0].tags[-1]
    assert await world.refused_code(a_run(grant_for("a"), PROMPT[:4], foreign)) == "foreign_parent"
    older = (await world.matched(grant_for("a", authorization=("x",)))).tags[0].tags[-1]
    assert await world.refused_code(a_run(grant_for("a"), PROMPT[:4], older)) == "foreign_parent"


async def test_an_unknown_parent_asks_for_the_whole_prefix_which_then_works(world: World) -> None:
    await world.beat()
    assert await world.refused_code(a_run(grant_for(), PROMPT[4:8], BlockTag(bytes(16)))) == "unknown_parent"
    tags = (await world.extended(a_run(grant_for(), PROMPT[:8]))).tags
    assert (await world.extended(a_run(grant_for(), PROMPT[8:12], tags[-1]))).error is None


async def test_a_bad_run_does_not_harm_the_others(world: World) -> None:
    await world.beat()
    good, grant = a_run(grant_for(), PROMPT[:4]), grant_for()
    other_request = ExtendRun(**{**_fields(good), "attempt": Attempt(RequestId("r9"), Epoch(1))})
    forged = ExtendRun(**{**_fields(good), "grant": FORGER.sign(grant)})
    bad = [other_request, forged, a_run(grant, PROMPT[:4], group=1), a_run(grant, PROMPT[:5]), a_run(grant, [])]
    bad.append(a_run(grant, PROMPT[:4], BlockTag(b"short")))
    answer = await world.extend(*bad, good)
    assert isinstance(answer, m.Extended)
    assert [run.error is None for run in answer.runs] == [False] * len(bad) + [True]
    assert len(answer.runs[-1].tags) == 1


def _fields(run: ExtendRun) -> dict[str, Any]:
    return {name: getattr(run, name) for name in ExtendRun.__struct_fields__}


async def test_only_workers_that_beat_are_answered(world: World) -> None:
    assert code_of(await world.extend(a_run(grant_for(), PROMPT[:4]))) == "unknown_worker"
    await world.beat(incarnation=2)
    assert code_of(await world.extend(a_run(grant_for(), PROMPT[:4]), incarnation=1)) == "unknown_worker"


# ---------------------------------------------------------------------------------------------- workers


async def test_a_gap_makes_the_index_ask_for_a_replay(world: World) -> None:
    await world.beat()
    tags = (await world.matched(grant_for())).tags
    await world.stored(tags)
    world.replays.clear()
    world.now += 5.0
    await world.stored((), number=5)
    await until(lambda: bool(world.replays))
    assert world.replays == [(subjects.index_replay(W1), 5)]
    await world.stored((GroupTags(0, tags[0].tags[:1]),), number=6, snapshot=True)
    assert (await world.matched(grant_for())).holders == (Holder(W1, (1,)),)


async def test_a_new_index_asks_every_worker(world: World) -> None:
    await world.beat(W1)
    await world.beat(W2)
    await until(lambda: len(world.replays) >= 2)
    assert {subject for subject, _ in world.replays} == {subjects.index_replay(W1), subjects.index_replay(W2)}


async def test_a_dead_worker_holds_nothing(world: World) -> None:
    await world.beat(W1)
    await world.beat(W2)
    tags = (await world.matched(grant_for())).tags
    await world.stored(tags, W1)
    await world.stored(tags, W2)
    world.now += 8.0
    await world.beat(W2)
    world.now += 4.0
    await until(lambda: world.service._fleet.member(W1) is None)
    assert (await world.matched(grant_for())).holders == (Holder(W2, (4,)),)
    await world.beat(W2, incarnation=2)
    assert (await world.matched(grant_for())).holders == ()
    assert len(world.service.index) == 0


async def test_a_worker_with_another_fingerprint_is_ignored(world: World, caplog: pytest.LogCaptureFixture) -> None:
    await world.beat(W1, fingerprint="first")
    with caplog.at_level(logging.WARNING, "baton.index"):
        await world.beat(W2, fingerprint="second")
    assert "first" in caplog.text
    assert "second" in caplog.text
    tags = (await world.matched(grant_for())).tags
    await world.stored(tags, W2)
    assert (await world.matched(grant_for())).holders == ()


# ---------------------------------------------------------------------------------------------- scopes and keys


async def test_a_raised_scope_ends_older_grants_at_once_and_over_restarts(world: World) -> None:
    await world.beat()
    old = (await world.matched(grant_for())).tags
    await world.stored(old)
    event = m.PolicyEvent(kind="scope_raised", tenant=TenantId("a"), generation=ScopeGeneration(2))
    await world.bus.publish(subjects.POLICY_EVENTS, event)
    await settled()
    assert code_of(await world.match(grant_for())) == "scope_ended"
    assert await world.refused_code(a_run(grant_for(), PROMPT[:4])) == "scope_ended"
    new = await world.matched(grant_for(generation=2))
    assert new.holders == ()
    assert not set(new.tags[0].tags) & set(old[0].tags)
    await until(lambda: not world.service._unsaved)
    restarted = World(world.redis, world.prefix)
    await restarted.start()
    assert code_of(await restarted.match(grant_for())) == "scope_ended"
    await restarted.service.stop()


async def test_a_grant_of_a_newer_generation_makes_good_for_a_lost_event(world: World) -> None:
    await world.beat()
    await world.matched(grant_for(generation=3))
    assert code_of(await world.match(grant_for(generation=2))) == "scope_ended"
    await world.matched(grant_for("b", generation=1))


async def test_keys_outlive_the_process_sealed(world: World) -> None:
    await world.beat()
    before = (await world.matched(grant_for())).tags
    restarted = World(world.redis, world.prefix)
    await restarted.start()
    await restarted.beat()
    assert (await restarted.matched(grant_for())).tags == before
    await restarted.service.stop()
    (key,) = world.keys._cache.values()
    (stored,) = await world.redis.execute("HVALS", f"{world.prefix}:scope-keys:a")
    assert key not in stored


async def test_replicas_that_meet_a_scope_at_once_agree_on_its_key(world: World) -> None:
    replicas = [ScopeKeys(world.redis, Sealer(MASTER), secrets.token_bytes, world.prefix) for _ in range(8)]
    keys = await asyncio.gather(*(replica.key(TenantId("a"), "scope", ScopeGeneration(1)) for replica in replicas))
    assert len(set(keys)) == 1


@pytest.mark.parametrize("behind", ["HGET", "HGETALL"])
async def test_a_key_that_is_read_while_its_scope_is_destroyed_stays_in_no_memory(
    world: World, monkeypatch: pytest.MonkeyPatch, behind: str
) -> None:
    tenant, old, new = TenantId("a"), ScopeGeneration(1), ScopeGeneration(2)
    keys = ScopeKeys(world.redis, Sealer(MASTER), secrets.token_bytes, world.prefix)
    await keys.key(tenant, "scope", old)
    keys.forget(tenant)
    execute = world.redis.execute

    async def meet(command: str, *arguments: Any) -> Any:
        found = await execute(command, *arguments)
        if command == behind:
            monkeypatch.setattr(world.redis, "execute", execute)
            await (keys.destroy(tenant, new) if command == "HGET" else keys.key(tenant, "scope", old))
        return found

    monkeypatch.setattr(world.redis, "execute", meet)
    await (keys.key(tenant, "scope", old) if behind == "HGET" else keys.destroy(tenant, new))
    assert keys._cache == {}
    with pytest.raises(Forbidden):
        await keys.key(tenant, "scope", old)


async def test_keys_are_never_logged(world: World, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        await world.beat()
        await world.matched(grant_for())
        await world.extended(a_run(grant_for(), PROMPT[:4]))
    (key,) = world.keys._cache.values()
    assert key.hex() not in caplog.text
    assert repr(key) not in caplog.text


async def test_without_redis_a_new_scope_is_unavailable_and_a_known_one_still_matches(
    own_redis_server: RedisServer,
) -> None:
    async with connect_redis(own_redis_server.url) as redis:
        world = World(redis, "test")
        await world.start()
        await world.beat()
        await world.matched(grant_for("a"))
        own_redis_server.kill()
        await world.matched(grant_for("a"))
        with pytest.raises(Unavailable):
            await world.match(grant_for("b"))
        with pytest.raises(Unavailable):
            await world.extend(a_run(grant_for("b"), PROMPT[:4]))
        await world.service.stop()


async def test_spans_tell_counts_and_reasons(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(index_service, "tracer", provider.get_tracer("baton.index"))
    await world.beat()
    tags = (await world.matched(grant_for())).tags
    await world.stored(tags)
    await world.matched(grant_for())
    await world.extended(a_run(grant_for(), PROMPT[:8]))
    await world.extended(a_run(grant_for(), PROMPT[:8], BlockTag(bytes(16))))
    spans = [(span.name, dict(span.attributes or {})) for span in exporter.get_finished_spans()]
    assert [name for name, _ in spans] == ["index.match", "index.match", "index.extend", "index.extend"]
    assert (spans[0][1]["baton.reason"], spans[0][1]["baton.blocks"]) == ("nothing_held", 4)
    assert (spans[1][1]["baton.matched_blocks"], spans[1][1]["baton.holders"]) == (4, 1)
    assert (spans[2][1]["baton.status"], spans[2][1]["baton.blocks"]) == ("ok", 2)
    assert "unknown_parent" in str(spans[3][1]["baton.reason"])
