"""Which cached blocks are given up: whose, and which of his. A pool of the real kind throughout."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest import eviction as simulator
from shared.contracts.ids import BlockTag, ScopeGeneration, TenantId
from shared.kv.block_pool import GroupPool, Keeping, Owner
from shared.kv.eviction import Eviction, level_of, num_levels
from shared.kv.tenant_shares import TenantShares

TRACE = Path(__file__).parents[1] / "golden" / "mooncake_conversation_1200.jsonl"
"""Of Mooncake's conversation trace (kvcache-ai/Mooncake, Apache-2.0) the first 4 blocks of its first 1,200 prompts."""
POLICIES: tuple[Eviction, ...] = ("recency", "priority", "reuse")


def owner(tenant: str) -> Owner:
    return TenantId(tenant), ScopeGeneration(1)


A, B = owner("a"), owner("b")
BATCH, URGENT = Keeping(rank=2), Keeping(rank=0)


def ask(pool: GroupPool, prompt: tuple[int, ...], whose: Owner = A, keeping: Keeping = URGENT) -> int:
    """One request from its match to its end, a block a token; how many blocks it found."""
    tags = [BlockTag(repr((whose, prompt[: i + 1])).encode()) for i in range(len(prompt))]
    hits = pool.match(tags, prompt)
    pool.share(hits, keeping)
    new = pool.allocate(len(tags) - len(hits), whose, keeping)
    for block_id, tag, token in zip(new, tags[len(hits) :], prompt[len(hits) :], strict=True):
        pool.tag(block_id, pool.generation(block_id), tag, (token,))
    pool.free([*hits, *new])
    pool.check()
    return len(hits)


def test_levels_put_reuse_before_class_and_class_before_age() -> None:
    assert {level_of("recency", rank, reused) for rank in range(3) for reused in (False, True)} == {0}
    assert [level_of("priority", rank, True) for rank in (2, 1, 0)] == [0, 1, 2]
    reuse = [level_of("reuse", rank, reused) for reused in (False, True) for rank in (2, 1, 0)]
    assert reuse == list(range(6))
    assert [num_levels(policy) for policy in POLICIES] == [1, 3, 6]


@pytest.mark.parametrize("policy", POLICIES)
def test_the_one_used_longest_ago_goes_first_where_nothing_else_tells_them_apart(policy: Eviction) -> None:
    pool = GroupPool(4, 1, policy)
    for token in range(4):
        ask(pool, (token,))
    ask(pool, (9,))
    assert [len(pool.match([BlockTag(repr((A, (token,))).encode())], (token,))) for token in range(4)] == [0, 1, 1, 1]


def test_what_was_used_twice_outlives_a_scan() -> None:
    found = {}
    for policy in POLICIES:
        pool = GroupPool(8, 1, policy)
        ask(pool, (1, 2, 3))
        ask(pool, (1, 2, 3))
        for token in range(100, 120):
            ask(pool, (token,))
        found[policy] = ask(pool, (1, 2, 3))
    assert found == {"recency": 0, "priority": 0, "reuse": 3}


def test_what_is_hot_no_more_makes_room_for_what_is() -> None:
    """The new hot prefixes never meet in the pool by themselves: that they were given up is remembered."""
    pool = GroupPool(8, 1, "reuse")
    for _ in range(3):
        ask(pool, (1, 2, 3, 4, 5, 6, 7, 8))
    last = [ask(pool, (token, token + 1000)) for _ in range(6) for token in (20, 30, 40)][-3:]
    assert last == [2, 2, 2]


def test_urgent_classes_blocks_go_last() -> None:
    for policy, expected in (("recency", 0), ("priority", 2), ("reuse", 2)):
        pool = GroupPool(6, 1, policy)  # type: ignore[arg-type]
        ask(pool, (1, 2), keeping=URGENT)
        for token in range(50, 70):
            ask(pool, (token,), keeping=BATCH)
        assert ask(pool, (1, 2)) == expected, policy
    # a block is as urgent as the most urgent request that used it
    pool = GroupPool(6, 1, "priority")
    ask(pool, (1, 2), keeping=BATCH)
    ask(pool, (1, 2), keeping=URGENT)
    ask(pool, (1, 2), keeping=BATCH)
    for token in range(50, 70):
        ask(pool, (token,), keeping=BATCH)
    assert ask(pool, (1, 2)) == 2


@pytest.mark.parametrize("policy", POLICIES)
def test_a_tenants_flood_pushes_out_his_own_alone(policy: Eviction) -> None:
    pool = GroupPool(20, 1, policy)
    quiet = tuple(range(1, 9))
    ask(pool, quiet, B, BATCH)
    # whatever he does, hot and urgent or not, while what the other holds is within an equal share
    for turn in range(200):
        ask(pool, (100 + turn % 30, 200, 300 + turn), A, URGENT)
        ask(pool, (100 + turn % 30, 200), A, URGENT)
    assert ask(pool, quiet, B, BATCH) == len(quiet)
    # what is beyond his share is not reserved for him: nothing is left idle
    pool = GroupPool(20, 1, policy)
    ask(pool, tuple(range(20)), B)
    ask(pool, tuple(range(10)), A)
    assert pool.counts.cached == 20
    assert ask(pool, tuple(range(10)), A) == 10


def test_blocks_in_use_count_as_held() -> None:
    """Who floods by what he runs gives up his own cached blocks, although the other has more of those."""
    pool = GroupPool(20, 1)
    ask(pool, tuple(range(1, 9)), B)
    ask(pool, (101, 102), A)
    running = pool.allocate(10, A)
    running += pool.allocate(2, A)
    assert ask(pool, tuple(range(1, 9)), B) == 8
    pool.free(running)
    pool.check([0] * 20)


def test_a_share_of_what_was_lost_is_remembered_for_everybody() -> None:
    """The memory is bounded, and a flood forgets its own first."""
    pool = GroupPool(8, 1, "reuse")
    ask(pool, (1, 2), B)
    ask(pool, tuple(range(10, 18)), B)  # B pushes out its own
    for turn in range(200):
        ask(pool, (1000 + turn,), A)
    lost = pool._cached._lost.counts()
    assert sum(lost.values()) <= 4 * 8
    assert lost[A[0]] > lost[B[0]] > 0
    pool.purge(B[0], ScopeGeneration(2))
    assert B[0] not in pool._cached._lost.counts()


@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 5), st.integers(1, 6), st.integers(0, 2)), max_size=60),
    st.sampled_from(POLICIES),
)
def test_no_block_outlives_its_parent(requests: list[tuple[int, int, int, int]], policy: Eviction) -> None:
    pool, owners = GroupPool(9, 1, policy), (A, B, owner("c"))
    for tenant, chain, length, rank in requests:
        ask(pool, tuple(chain * 10 + i for i in range(length)), owners[tenant], Keeping(rank))
        held = set(pool.tags())
        for whose in owners:
            for root in range(6):
                there = [
                    BlockTag(repr((whose, tuple(root * 10 + i for i in range(n)))).encode()) in held
                    for n in range(1, 7)
                ]
                assert there == sorted(there, reverse=True)


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.integers(-3, 3), st.sets(st.sampled_from("abcd"))), max_size=200))
def test_the_largest_share_is_that_of_a_naive_count(changes: list[tuple[str, int, set[str]]]) -> None:
    shares, naive = TenantShares(), dict.fromkeys("abcd", 0)
    for tenant, change, counting in changes:
        if naive[tenant] + change < 0:
            with pytest.raises(ValueError, match="less than nothing"):
                shares.add(TenantId(tenant), change)
            continue
        shares.add(TenantId(tenant), change)
        naive[tenant] += change
        assert shares.counts() == {t: n for t, n in naive.items() if n}
        most = max((naive[t] for t in counting), default=0)
        if most:
            assert naive[shares.largest(lambda t: t in counting)] == most  # noqa: B023
        else:
            with pytest.raises(LookupError):
                shares.largest(lambda t: t in counting)  # noqa: B023


def test_many_changes_leave_no_long_heap() -> None:
    shares, rng = TenantShares(), random.Random(1)
    names = [TenantId(str(i)) for i in range(10)]
    for _ in range(5000):
        shares.add(rng.choice(names), 1)
    assert len(shares._heap) <= 2 * 10 + 65


def test_the_default_finds_more_of_a_public_trace_than_recency() -> None:
    prompts = simulator.read_prompts(TRACE.read_text().splitlines())
    ((_, found),) = simulator.compare(prompts, [300])
    assert found["recency"] * 1.08 < found["reuse"] < found["belady"]
    assert GroupPool(1, 1).eviction == "reuse"


def test_a_simulated_pool_that_holds_everything_finds_everything_that_comes_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"hash_ids": [1, 2, 3]}\n{"hash_ids": [1, 2, 4]}\n{"hash_ids": []}\n{"hash_ids": [1, 2, 3]}\n')
    assert simulator.main([str(trace), "--blocks", "4", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "4 prompts, 9 blocks, 4 of them different"
    assert lines[2].split() == ["4", "0.556", "0.556", "0.556", "0.556"]
    for wrong in ("{}", "[]", "no", '{"hash_ids": ["x"]}', '{"hash_ids": 5}'):
        trace.write_text('{"hash_ids": [1]}\n' + wrong + "\n")
        with pytest.raises(SystemExit):
            simulator.main([str(trace)])
        assert "line 2" in capsys.readouterr().err


@pytest.mark.parametrize("policy", POLICIES)
def test_others_within_their_share_are_spared_as_long_as_the_largest_holder_has_cached_blocks(policy: Eviction) -> None:
    pool = GroupPool(12, 1, policy)
    ask(pool, (1, 2, 3), B)
    ask(pool, (7, 8, 9), A)
    pool.allocate(6, A)
    pool.allocate(3, A)  # A's own three go
    assert pool._cached.held() == {A[0]: 9, B[0]: 3}
    # and when all that A holds is in use, B's
    pool.allocate(2, A)
    assert pool._cached.held() == {A[0]: 11, B[0]: 1}
    pool.check()
