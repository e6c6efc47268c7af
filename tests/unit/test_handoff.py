"""The hand-off cores: cumulative commits, pulls in any order, digests, fencing, local fallback."""

from __future__ import annotations

import random

import msgspec
import pytest

from shared.contracts.attempt import Attempt
from shared.contracts.errors import ErrorInfo
from shared.contracts.ids import BlockGeneration, Dispatch, Epoch, Incarnation, RequestId, WorkerId
from shared.contracts.messages import HandoffAck, HandoffCommit
from shared.contracts.parts import BlockRef
from shared.kv.handoff import (
    Closed,
    Free,
    Pull,
    Received,
    SendAck,
    SendCommit,
    SendRelease,
    Sink,
    SinkEffect,
    Source,
    SourceIdentity,
    TurnLocal,
)

PREFILL, DECODE = WorkerId("prefill-1"), WorkerId("decode-1")
TOKEN = b"t" * 16


def attempt(dispatch: int = 1) -> Attempt:
    return Attempt(RequestId("req-a"), Epoch(1), Dispatch(dispatch))


def make_source(
    num_tokens: int = 10, first_token: int = 0, sizes: tuple[int, ...] = (4,), *, a: Attempt | None = None
) -> Source:
    identity = SourceIdentity(PREFILL, Incarnation(3), "fp", "pool-a", sizes)
    return Source(identity, a or attempt(), DECODE, Incarnation(9), TOKEN, first_token, num_tokens, 5.0, 0.0)


def make_sink(num_tokens: int = 10, first_token: int = 0, sizes: tuple[int, ...] = (4,)) -> Sink:
    return Sink(DECODE, attempt(), PREFILL, TOKEN, "fp", sizes, first_token, num_tokens)


def advance(source: Source, computed: int, now: float = 0.0) -> HandoffCommit:
    refs = [[BlockRef(100 * g + p, BlockGeneration(1)) for p in due] for g, due in enumerate(source.due(computed))]
    return source.name(computed, refs, 0, now).message


def only_pull(effects: list[SinkEffect]) -> Pull:
    (pull,) = effects
    assert isinstance(pull, Pull)
    return pull


def positions(pull: Pull) -> list[tuple[int, int, int]]:
    return [(i.group, i.position, i.valid_tokens) for i in pull.items]


def test_blocks_are_named_when_final_and_the_tail_last() -> None:
    source = make_source()
    first = advance(source, 6)
    assert [b.block_id for b in first.groups[0].blocks] == [0]
    assert (first.number, first.num_tokens, first.last) == (1, 6, False)
    last = advance(source, 10)
    assert [b.block_id for b in last.groups[0].blocks] == [0, 1, 2]
    assert (last.number, last.num_tokens, last.last) == (2, 10, True)
    assert source.complete


def test_commits_start_at_the_sinks_hit() -> None:
    commit = advance(make_source(first_token=4), 10)
    assert (commit.groups[0].first_position, [b.block_id for b in commit.groups[0].blocks]) == (1, [1, 2])


def test_sink_pulls_while_prefill_goes_on() -> None:
    source, sink = make_source(), make_sink()
    pull = only_pull(sink.commit(advance(source, 4)))
    assert positions(pull) == [(0, 0, 4)]
    assert sink.commit(advance(source, 10)) == [], "one pull at a time"
    pull = only_pull(sink.pulled(pull.ticket, []))
    assert positions(pull) == [(0, 1, 4), (0, 2, 2)]
    ack, received = sink.pulled(pull.ticket, [])
    assert received == Received(attempt(), 10, True)
    assert isinstance(ack, SendAck)
    assert (ack.message.number, ack.message.num_tokens, ack.message.done) == (2, 10, True)
    assert source.ack(ack.message, 0) == [Free(attempt(), "done")]
    assert source.tick(99) == []


def test_a_lost_commit_needs_nothing_but_the_next() -> None:
    source, sink = make_source(), make_sink()
    advance(source, 4)
    pull = only_pull(sink.commit(advance(source, 8)))
    assert positions(pull) == [(0, 0, 4), (0, 1, 4)]


def test_reordered_and_repeated_commits_are_dropped() -> None:
    source, sink = make_source(), make_sink()
    old, new = advance(source, 4), advance(source, 8)
    pull = only_pull(sink.commit(new))
    assert sink.commit(old) == []
    assert sink.commit(new) == []
    ack, received = sink.pulled(pull.ticket, [])
    assert received == Received(attempt(), 8, False)
    assert sink.commit(new) == [ack], "its ack was lost"


def test_a_lost_final_ack_is_given_again() -> None:
    source, sink = make_source(), make_sink()
    last = advance(source, 10)
    ack, _ = sink.pulled(only_pull(sink.commit(last)).ticket, [])
    assert sink.commit(last) == [ack]


def test_unacked_commits_are_resent_with_backoff() -> None:
    source = make_source()
    commit = advance(source, 4)
    assert source.tick(0.4) == []
    assert source.tick(0.5) == [SendCommit(DECODE, commit)]
    assert source.tick(1.4) == []
    assert source.tick(1.5) == [SendCommit(DECODE, commit)]
    source.ack(HandoffAck(attempt=attempt(), worker=DECODE, number=1, num_tokens=4), 1.6)
    assert source.tick(4) == []


def test_the_sink_asks_when_the_beat_shows_more_than_the_commits() -> None:
    source, sink = make_source(), make_sink()
    advance(source, 8)
    assert sink.beat(3, now=1) == []
    (ask,) = sink.beat(8, now=1)
    assert isinstance(ask, SendAck)
    assert ask.message.resend
    assert sink.beat(8, now=1.5) == [], "not twice within a second"
    (again,) = source.ack(ask.message, 1)
    assert isinstance(again, SendCommit)
    assert again.message.num_tokens == 8


def test_a_digest_mismatch_recomputes_from_the_good_part() -> None:
    source, sink = make_source(), make_sink()
    pull = only_pull(sink.commit(advance(source, 10)))
    release, local = sink.pulled(pull.ticket, [(0, 1)])
    assert isinstance(release, SendRelease)
    assert local == TurnLocal(attempt(), 4, "digest_mismatch", ((0, 1),))
    late = sink.commit(advance(make_source(), 10))
    assert isinstance(late[0], SendRelease)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"fingerprint": "other"}, "fingerprint_mismatch"),
        ({"error": ErrorInfo("Internal/nan", "x")}, "prefill_failed:Internal/nan"),
        ({"num_tokens": 9}, "wrong_length"),
        ({"num_tokens": 99}, "wrong_length"),
        ({"groups": ()}, "wrong_groups"),
    ],
)
def test_a_commit_that_cannot_be_used_goes_local(change: dict[str, object], reason: str) -> None:
    commit = msgspec.structs.replace(advance(make_source(), 10), **change)
    effects = make_sink(first_token=4).commit(commit)
    assert effects[-1] == TurnLocal(attempt(), 4, reason)


def test_a_commit_that_starts_beyond_the_hit_goes_local() -> None:
    effects = make_sink(first_token=0).commit(advance(make_source(first_token=4), 10))
    assert effects[-1] == TurnLocal(attempt(), 0, "gap")


@pytest.mark.parametrize(
    "change", [{"lease_token": b"x" * 16}, {"attempt": attempt(0)}, {"attempt": attempt(2)}, {"source": "prefill-2"}]
)
def test_foreign_commits_are_dropped(change: dict[str, object]) -> None:
    commit = msgspec.structs.replace(advance(make_source(), 10), **change)
    assert make_sink().commit(commit) == []


def test_going_local_waits_for_the_pull_in_flight() -> None:
    sink = make_sink()
    pull = only_pull(sink.commit(advance(make_source(), 10)))
    assert sink.go_local("prefill_lease") == []
    effects = sink.pulled(pull.ticket, [])
    assert effects[-1] == TurnLocal(attempt(), 10, "prefill_lease"), "what came is not computed again"
    assert sink.state == "local"


def test_closing_waits_for_the_pull_in_flight() -> None:
    sink = make_sink()
    pull = only_pull(sink.commit(advance(make_source(), 10)))
    assert sink.close() == []
    assert sink.pulled(pull.ticket, [])[-1] == Closed(attempt())
    assert sink.close() == []


def test_restamp_keeps_pulled_blocks_and_the_pull_in_flight() -> None:
    source, sink = make_source(), make_sink()
    first = only_pull(sink.commit(advance(source, 4)))
    sink.commit(advance(source, 8))
    second = only_pull(sink.pulled(first.ticket, []))
    assert sink.restamp(attempt(2), PREFILL, TOKEN) == [], "the old source is being read"
    assert sink.commit(advance(source, 10)) == [], "the old attempt is fenced"
    newer = make_source(first_token=sink.contiguous, a=attempt(2))
    assert sink.commit(advance(newer, 10)) == [], "its first block is being pulled"
    released, *effects = sink.pulled(second.ticket, [(0, 1)])
    assert isinstance(released, SendRelease)
    assert released.message.attempt == attempt(1)
    third = only_pull(effects)
    assert positions(third) == [(0, 1, 4), (0, 2, 2)], "the old attempt's bad block comes from the new source"
    assert sink.pulled(third.ticket, [])[-1] == Received(attempt(2), 10, True)


def test_restamp_releases_the_old_source_under_the_old_attempt() -> None:
    sink = make_sink()
    (released,) = sink.restamp(attempt(2), WorkerId("prefill-2"), TOKEN)
    assert isinstance(released, SendRelease)
    assert (released.source, released.message.attempt) == (PREFILL, attempt(1))
    local = sink.go_local("prefill_lease")[0]
    assert isinstance(local, SendRelease)
    assert (local.source, local.message.attempt) == ("prefill-2", attempt(2))


def test_two_groups_with_different_block_sizes() -> None:
    source, sink = make_source(sizes=(4, 2), num_tokens=7), make_sink(sizes=(4, 2), num_tokens=7)
    pull = only_pull(sink.commit(advance(source, 5)))
    assert positions(pull) == [(0, 0, 4), (1, 0, 2), (1, 1, 2)]
    assert sink.pulled(pull.ticket, [])[-1] == Received(attempt(), 4, False)
    pull = only_pull(sink.commit(advance(source, 7)))
    assert positions(pull) == [(0, 1, 3), (1, 2, 2), (1, 3, 1)]
    assert sink.pulled(pull.ticket, [])[-1] == Received(attempt(), 7, True)


def test_the_source_ends_with_its_lease_or_the_peers_restart() -> None:
    source = make_source()
    assert source.beat(9, 1, now=4) == []
    assert source.beat(9, 1, now=8) == [], "listed, but its engine stands still"
    assert source.tick(9) == [Free(attempt(), "lease")]
    other = make_source()
    assert other.beat(10, 1, now=1) == [Free(attempt(), "decode_restarted")]


def test_any_order_of_commits_ends_complete() -> None:
    for seed in range(50):
        rng = random.Random(seed)
        tokens = rng.randint(1, 60)
        hit = rng.randrange(0, tokens, 4)
        source, sink = make_source(tokens, hit), make_sink(tokens, hit)
        cuts = sorted({rng.randint(1, tokens) for _ in range(5)} | {tokens})
        commits = [advance(source, c) for c in cuts]
        sent = [c for c in commits[:-1] if rng.random() < 0.7] + [commits[-1]] * 2
        rng.shuffle(sent)
        effects: list[SinkEffect] = []
        for commit in sent:
            effects += sink.commit(commit)
            if rng.random() < 0.5:
                effects += [e for p in effects if isinstance(p, Pull) for e in sink.pulled(p.ticket, [])]
        while pulls := [p for p in effects if isinstance(p, Pull)]:
            effects = [e for p in pulls for e in sink.pulled(p.ticket, [])]
        assert (sink.state, sink.contiguous) == ("done", tokens), f"seed {seed}"
