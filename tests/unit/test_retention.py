"""KV is kept for as long as its tenant's record says, from the end of its last use, and then overwritten."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from shared.contracts.ids import BlockTag, ScopeGeneration, TenantId
from shared.kv.block_pool import GroupPool, Keeping, Owner
from shared.kv.retention import NEVER, Retention, lasts_s
from tests.unit.batcher_support import fifty, make_batcher, make_spec, output_of, step

A: Owner = (TenantId("a"), ScopeGeneration(1))
B: Owner = (TenantId("b"), ScopeGeneration(1))
TAG = BlockTag(b"t")


def test_a_records_number_is_a_time_or_none() -> None:
    assert [lasts_s(seconds) for seconds in (-1, 0, 60)] == [NEVER, 0.0, 60.0]


def test_a_cached_block_ends_when_nobody_used_it_for_so_long() -> None:
    pool = GroupPool(4, 1)
    kept = Keeping(retention_s=60.0)
    (block,) = pool.allocate(1, A, kept)
    assert pool.tag(block, pool.generation(block), TAG, (7,))
    pool.expire(1000.0)
    pool.free([block])
    # used again in between, it begins anew, and in use it does not end at all
    assert pool.expire(1059.0) == 0
    pool.share([block], kept)
    assert pool.expire(2000.0) == 0
    pool.free([block])
    assert pool.expire(2059.9) == 0
    assert pool.match([TAG], (7,)) == [block]
    pool.drain_events()
    assert pool.expire(2060.0) == 1
    # then nobody finds it, the index hears of it, and it is overwritten before anybody has it
    assert pool.match([TAG], (7,)) == []
    assert pool.drain_events().removed == (TAG,)
    assert block not in pool.allocate(3, B)
    assert pool.take_dirty() == [block]
    pool.cleaned([block])
    assert pool.allocate(1, B) == [block]
    pool.check()


def test_the_newest_requests_record_counts_and_others_blocks_stay() -> None:
    pool = GroupPool(4, 1)
    mine, others = pool.allocate(1, A, Keeping(retention_s=60.0)), pool.allocate(1, B)
    for (block,), tag in ((mine, TAG), (others, BlockTag(b"u"))):
        assert pool.tag(block, pool.generation(block), tag, (7,))
    pool.free([*mine, *others])
    pool.share(mine, Keeping(retention_s=5.0))
    pool.free(mine)
    assert pool.expire(5.0) == 1
    assert pool.expire(1e9) == 0
    assert pool.match([BlockTag(b"u")], (7,)) == others


def test_what_has_no_tag_ends_too_and_a_late_tag_finds_nothing() -> None:
    pool = GroupPool(2, 1)
    (block,) = pool.allocate(1, A, Keeping(retention_s=60.0))
    generation = pool.generation(block)
    pool.free([block])
    pool.expire(60.0)
    assert not pool.tag(block, generation, TAG, (7,))
    assert pool.take_dirty() == [block]
    pool.cleaned([block])
    assert not pool.tag(block, generation, TAG, (7,))
    # before that it finds its block, and the time goes on
    (block,) = pool.allocate(1, A, Keeping(retention_s=60.0))
    pool.free([block])
    pool.expire(100.0)
    assert pool.tag(block, pool.generation(block), TAG, (7,))
    pool.expire(119.0)
    assert pool.match([TAG], (7,)) == [block]
    pool.expire(120.0)
    assert pool.match([TAG], (7,)) == []
    pool.check()


def test_what_is_never_kept_is_overwritten_when_it_is_let_go_of() -> None:
    pool = GroupPool(2, 1)
    blocks = pool.allocate(2, A, Keeping(retention_s=0.0))
    pool.free(blocks)
    assert pool.counts.free == 0
    assert sorted(pool.take_dirty()) == blocks
    pool.cleaned(blocks)
    assert pool.counts.free == 2
    pool.check([0, 0])


def test_bytes_behind_what_the_next_owner_wrote_end_with_the_first_one() -> None:
    pool = GroupPool(1, 4)
    (block,) = pool.allocate(1, A, Keeping(retention_s=60.0))
    pool.free([block])
    # the next owner, whose KV may be kept for ever, fills a part of it
    assert pool.allocate(1, B) == [block]
    assert pool.expire(60.0) == 0
    pool.free([block])
    assert pool.expire(61.0) == 1
    pool.cleaned(pool.take_dirty())
    # one who fills it leaves nothing of the first, and keeps his own
    pool.allocate(1, A, Keeping(retention_s=60.0))
    pool.free([block])
    pool.allocate(1, B)
    assert pool.tag(block, pool.generation(block), TAG, (1, 2, 3, 4))
    pool.free([block])
    assert pool.expire(1e6) == 0
    pool.check()


@given(
    st.lists(
        st.tuples(st.sampled_from(["let_go", "taken", "ended"]), st.integers(0, 4), st.integers(0, 9)), max_size=300
    )
)
def test_ends_are_told_once_and_in_time(steps: list[tuple[str, int, int]]) -> None:
    retention, naive, now = Retention(), dict[int, float](), 0.0
    for what, block, seconds in steps:
        if what == "let_go" and block not in naive:
            naive[block] = now + seconds
            retention.let_go(block, now + seconds)
        elif what == "taken":
            assert retention.taken(block) == naive.pop(block, NEVER)
        else:
            now += seconds
            over = {b for b, ends in naive.items() if ends <= now}
            assert set(retention.ended(now)) == over
            naive = {b: ends for b, ends in naive.items() if b not in over}
        assert len(retention) == len(naive)


def test_a_batcher_has_what_ended_overwritten() -> None:
    batcher = make_batcher()
    for name, retention_s in (("a", 30), ("b", -1), ("c", 0)):
        batcher.reserve(make_spec(name, prompt=10, retention_s=retention_s))
    batcher.expire(1000.0)
    while not batcher.is_idle:
        step(batcher)
    at_once = batcher.take_blocks_to_zero()
    assert at_once
    batcher.zeroed(at_once)
    batcher.expire(1029.0)
    assert batcher.take_blocks_to_zero() == ()
    batcher.expire(1030.0)
    later = batcher.take_blocks_to_zero()
    assert len(later) == len(at_once)
    assert not set(later) & set(at_once)
    batcher.zeroed(later)
    batcher.expire(1e9)
    assert batcher.take_blocks_to_zero() == ()
    batcher.check()


def test_who_needs_blocks_that_are_being_zeroed_takes_none_from_others() -> None:
    """Sequences whose KV is never kept fill the pool: the newest gives way, and its blocks are what the others get."""
    batcher = make_batcher(num_blocks=13)
    for name in ("a", "b", "c"):
        batcher.reserve(make_spec(name, prompt=7, max_tokens=14, retention_s=0))
    preempted: list[str] = []
    while not batcher.is_idle:
        plan = batcher.plan()
        if plan is not None:
            preempted += [u.seq_id for u in batcher.commit(output_of(plan, fifty)) if u.event == "preempted"]
        # zeroed only now: whoever waits does so for a turn
        batcher.zeroed(batcher.take_blocks_to_zero())
        batcher.check()
    assert set(preempted) == {"c"}


def test_blocks_that_cannot_be_zeroed_are_lost_and_nobody_waits_for_them() -> None:
    pool = GroupPool(3, 1)
    pool.free(pool.allocate(2, A, Keeping(retention_s=0.0)))
    first, second = pool.take_dirty()
    assert pool.num_cleaning == 2
    pool.not_cleaned([first])
    pool.cleaned([second])
    assert pool.num_cleaning == 0
    assert pool.counts.available == 2
    assert first not in pool.allocate(2, B)
    pool.check()
