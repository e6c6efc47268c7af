"""Workers by their beats: leases, incarnations, fingerprints, and counters between beats."""

from __future__ import annotations

from services.scheduler.worker_registry import WorkerRegistry
from shared.contracts.ids import Incarnation, WorkerId
from tests.unit.scheduler_support import beat


def registry() -> WorkerRegistry:
    return WorkerRegistry("default", lease_s=10.0)


def test_a_beat_joins_and_the_lease_ends_it() -> None:
    workers = registry()
    assert workers.on_beat(0.0, beat("d1")).joined
    assert not workers.on_beat(5.0, beat("d1", number=2)).joined
    assert workers.expire(14.9) == []
    (lost,) = workers.expire(15.0)
    assert (lost.worker, lost.incarnation, lost.reason) == ("d1", 1, "lease_expired")
    assert workers.expire(16.0) == []
    assert workers.on_beat(17.0, beat("d1", number=3)).joined  # a paused process may come back


def test_stale_beats_and_other_pools_change_nothing() -> None:
    workers = registry()
    workers.on_beat(0.0, beat("d1", number=5, incarnation=Incarnation(7)))
    assert not workers.on_beat(1.0, beat("d1", number=5, incarnation=Incarnation(7))).taken
    assert not workers.on_beat(1.0, beat("d1", number=9, incarnation=Incarnation(6))).taken
    assert not workers.on_beat(1.0, beat("d2", pool="elsewhere")).taken
    assert len(workers) == 1


def test_a_new_incarnation_replaces_the_old_process() -> None:
    workers = registry()
    workers.on_beat(0.0, beat("d1", number=50))
    outcome = workers.on_beat(1.0, beat("d1", number=1, incarnation=Incarnation(2)))
    assert outcome.taken
    assert outcome.replaced is not None
    assert (outcome.replaced.incarnation, outcome.replaced.reason) == (1, "replaced")


def test_a_worker_that_does_not_fit_is_refused_with_both_values() -> None:
    workers = registry()
    workers.on_beat(0.0, beat("d1", fingerprint="aaa"))
    outcome = workers.on_beat(0.0, beat("p1", "prefill", fingerprint="bbb"))
    assert outcome.refused is not None
    assert (outcome.refused.field, outcome.refused.value, outcome.refused.expected) == ("fingerprint", "bbb", "aaa")
    assert WorkerId("p1") not in workers
    fake = workers.on_beat(0.0, beat("p2", "prefill", fingerprint="aaa", fake=True))
    assert fake.refused is not None
    assert fake.refused.field == "fake"
    workers.lose(WorkerId("d1"), 0.0, "gone")
    assert workers.on_beat(1.0, beat("p1", "prefill", number=2, fingerprint="bbb")).taken  # the pool was empty


def test_a_silent_worker_is_asked_once_a_second_and_is_gone_when_nobody_listens() -> None:
    workers = registry()
    workers.on_beat(0.0, beat("d1"))
    workers.on_beat(1.0, beat("p1", "prefill"))
    assert workers.quiet(2.4) == []
    assert [(v.worker, v.role) for v in workers.quiet(2.5)] == [("d1", "decode")]
    assert workers.quiet(3.4) == []
    assert [v.worker for v in workers.quiet(3.5)] == ["d1", "p1"]
    workers.on_beat(3.6, beat("p1", "prefill", number=2))
    assert workers.nobody_listens(WorkerId("p1"), asked_s=3.5, now=3.7) is None  # it has beaten since
    lost = workers.nobody_listens(WorkerId("d1"), asked_s=3.5, now=3.7)
    assert lost is not None
    assert (lost.worker, lost.incarnation, lost.reason) == ("d1", 1, "gone")
    assert workers.nobody_listens(WorkerId("d1"), asked_s=3.5, now=3.8) is None
    assert [v.worker for v in workers.views()] == ["p1"]


def test_who_is_silent_and_does_not_answer_gets_nothing_new_until_it_beats() -> None:
    workers = registry()
    workers.on_beat(0.0, beat("d1"))
    workers.no_answer(WorkerId("d1"), asked_s=3.0, now=4.0)  # not silent for long
    assert [v.worker for v in workers.views()] == ["d1"]
    workers.no_answer(WorkerId("d1"), asked_s=4.0, now=5.0)
    assert workers.views() == []
    assert WorkerId("d1") in workers  # what it runs is not given up before its lease ends
    workers.on_beat(6.0, beat("d1", number=2))
    assert [v.worker for v in workers.views()] == ["d1"]
    workers.no_answer(WorkerId("d1"), asked_s=5.9, now=11.5)  # it has beaten since
    assert [v.worker for v in workers.views()] == ["d1"]


def test_a_worker_whose_engine_stands_still_is_lost_until_it_goes_on() -> None:
    workers = registry()
    workers.on_beat(0.0, beat("d1"))
    outcome = workers.on_beat(1.0, beat("d1", number=2, stalled=True))
    assert outcome.replaced is not None
    assert (outcome.taken, outcome.replaced.worker, outcome.replaced.reason) == (False, "d1", "stalled")
    again = workers.on_beat(2.0, beat("d1", number=3, stalled=True))
    assert (again.taken, again.replaced) == (False, None)
    assert workers.on_beat(3.0, beat("d1", number=4)).joined
    assert [v.worker for v in workers.views()] == ["d1"]


def test_silence_counts_only_while_we_could_have_heard() -> None:
    workers = registry()
    workers.on_beat(0.0, beat("d1"))
    assert workers.quiet(9.0, deaf_s=7.0) == []
    assert len(workers.quiet(9.5, deaf_s=7.0)) == 1


def test_late_beats_of_a_lost_process_do_not_bring_it_back() -> None:
    workers = registry()
    workers.on_beat(0.0, beat("d1", number=5, incarnation=Incarnation(7)))
    workers.lose(WorkerId("d1"), 1.0, "gone")
    assert not workers.on_beat(1.1, beat("d1", number=5, incarnation=Incarnation(7))).taken
    assert not workers.on_beat(1.1, beat("d1", number=9, incarnation=Incarnation(6))).taken
    assert workers.on_beat(1.2, beat("d1", number=6, incarnation=Incarnation(7))).joined  # it was only cut off
    workers.lose(WorkerId("d1"), 2.0, "gone")
    workers.expire(1_000.0)
    assert workers._lost == {}  # remembered for a while only


def test_placements_count_until_the_next_beat() -> None:
    workers = registry()
    workers.on_beat(0.0, beat("d1", running=1))
    workers.note_placed(WorkerId("d1"), (10,), 300)
    workers.note_placed(WorkerId("d1"), (95,), 20)
    view = workers.view(WorkerId("d1"))
    assert view is not None
    assert (view.free_blocks, view.running, view.queue_tokens) == ((0,), 3, 320)
    workers.on_beat(1.0, beat("d1", number=2))
    assert workers.views()[0].free_blocks == (100,)
    workers.note_placed(WorkerId("nobody"), (1,), 1)
    # each of those placed will want a block to grow into
    assert view.held_back == ()
    workers.on_beat(0.0, beat("d2", held_back=(3,)))
    workers.note_placed(WorkerId("d2"), (10,), 300)
    other = workers.view(WorkerId("d2"))
    assert other is not None
    assert other.held_back == (4,)
    workers.on_beat(0.0, beat("d3", queue_tokens=7, class_tokens=(1, 2, 4)))
    workers.note_placed(WorkerId("d3"), (10,), 300, rank=1)
    by_class = workers.view(WorkerId("d3"))
    assert by_class is not None
    assert [by_class.tokens_before(rank) for rank in range(3)] == [1, 303, 307]
    assert by_class.queue_tokens == 307
    assert workers.view(WorkerId("nobody")) is None


def test_flags_show_in_views() -> None:
    workers = registry()
    workers.on_beat(0.0, beat("d1", draining=True, fake=True, token_budget=0))
    view = workers.views()[0]
    assert view.draining
    assert view.fake
    assert view.token_budget == 128
