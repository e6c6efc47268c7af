"""When tokens go out, and what a worker's event loop is woken for."""

from __future__ import annotations

import itertools

import pytest

from services.decode.pace import Pace
from services.decode.step_news import Drawn, StepNews, Updated
from shared.engine.sequence_update import PREEMPTED, SequenceUpdate
from shared.engine.step_plan import ScheduledSequence, StepPlan


def publications(pace: Pace, ends: list[float]) -> list[float]:
    """The ends of steps whose tokens went out at once."""
    out = []
    for now in ends:
        if pace.due(now):
            pace.published(now)
            out.append(now)
    return out


def steps(count: int, each_s: float, start: float = 100.0) -> list[float]:
    return [start + i * each_s for i in range(count)]


@pytest.mark.parametrize(
    ("step_s", "together"), [(0.002, 17), (0.008, 4), (0.012, 2), (0.017, 2), (0.018, 1), (0.035, 1), (0.1, 1)]
)
def test_pieces_of_even_steps_come_within_the_interval(step_s: float, together: int) -> None:
    sent = publications(Pace(0.035), steps(300, step_s))
    gaps = [round((after - before) / step_s) for before, after in itertools.pairwise(sent)]
    assert set(gaps) == {together}
    assert together == 1 or together * step_s <= 0.035


def test_without_an_interval_every_step_goes_out() -> None:
    ends = steps(20, 0.001)
    assert publications(Pace(0.0), ends) == ends
    assert publications(Pace(0.0), [1.0, 1.0]) == [1.0, 1.0]


def test_a_first_step_and_one_behind_a_pause_go_out_at_once() -> None:
    pace = Pace(0.035)
    assert publications(pace, [5.0]) == [5.0]
    assert publications(pace, [9.0]) == [9.0]


def test_a_token_waits_for_the_interval_and_one_step_at_most() -> None:
    pace, waiting = Pace(0.035), list[float]()
    step_s = [0.008, 0.001, 0.030, 0.004, 0.050, 0.002, 0.2, 0.008, 0.033, 0.0005] * 40
    now = 0.0
    for length in step_s:
        now += length
        waiting.append(now)
        if pace.due(now):
            assert all(now - came <= 0.035 + length for came in waiting)
            waiting = []
            pace.published(now)


def test_what_waits_longer_than_the_interval_is_late() -> None:
    pace = Pace(0.035)
    assert not pace.is_late(1.0, 1.035)
    assert pace.is_late(1.0, 1.036)


class Worker:
    def __init__(self, interval_s: float = 0.035) -> None:
        self.now, self.woken, self.begun = 50.0, 0, {"a", "b"}
        self.pace = Pace(interval_s)
        self.news = StepNews(self.pace, self._wake, lambda seq_id: seq_id in self.begun, lambda: self.now)

    def _wake(self) -> None:
        self.woken += 1

    def draw(self, *seq_ids: str, steps: int = 1) -> bool:
        """Steps of 8 ms of a stretch; whether they woke."""
        rows = tuple(ScheduledSequence(seq_id, 0, (1,), ((0,),), 1, None) for seq_id in seq_ids)
        drawn = [(self.now + 0.008 * i, [7] * len(rows)) for i in range(1, steps + 1)]
        self.now = drawn[-1][0]
        return self._tells(lambda: self.news.drawn(StepPlan(1, rows), drawn))

    def update(self, *updates: SequenceUpdate, after_s: float = 0.008) -> bool:
        self.now += after_s
        return self._tells(lambda: self.news.updated(list(updates)))

    def publish(self) -> list[Drawn | Updated]:
        self.pace.published(self.now)
        return list(self.news.take())

    def _tells(self, tell: object) -> bool:
        before = self.woken
        tell()  # type: ignore[operator]
        return self.woken > before


def update(seq_id: str, *token_ids: int, **more: object) -> SequenceUpdate:
    return SequenceUpdate(seq_id, 0, token_ids, 0, ((),), **more)  # type: ignore[arg-type]


def test_the_loop_is_woken_when_tokens_are_due_and_takes_all_in_order() -> None:
    worker = Worker()
    assert worker.draw("a")
    worker.publish()
    assert [worker.draw("a", "b") for _ in range(4)] == [False, False, False, True]
    assert [told.at for told in worker.publish()] == pytest.approx([50.016, 50.024, 50.032, 50.040])
    assert not list(worker.news.take())
    assert [worker.draw("a") for _ in range(2)] == [False, False]
    assert not worker.update(update("a", 1, 2, 3)), "a stretch that ends is a step"
    assert worker.update(update("a", 4))
    assert [type(told) for told in worker.publish()] == [Drawn, Drawn, Updated, Updated]


def test_steps_are_computed_together_until_their_tokens_are_due() -> None:
    worker = Worker()
    assert worker.news.quiet_until(50.0, 0.008) == pytest.approx(50.035), "these go out, and the next piece is due then"
    worker.draw("a")
    worker.publish()  # at 50.008
    assert worker.news.quiet_until(50.016, 0.008) == pytest.approx(50.043)
    assert not worker.draw("a", steps=3)
    assert worker.draw("a")
    assert worker.news.quiet_until(50.040, 0.008) == pytest.approx(50.075)
    assert [len(told.steps) for told in worker.publish() if isinstance(told, Drawn)] == [3, 1]
    assert worker.draw("a", steps=6), "it took longer than expected"
    assert Worker(0.0).news.quiet_until(50.0, 0.008) == 50.0


def test_steps_that_the_loop_has_not_taken_yet_wake_it_again() -> None:
    worker = Worker()
    worker.draw("a")
    assert worker.draw("a"), "nothing has gone out"
    assert len(worker.publish()) == 2


def test_a_first_token_wakes_the_loop() -> None:
    worker = Worker()
    worker.draw("a")
    worker.publish()
    assert worker.draw("a", "new")
    worker.publish()
    assert worker.update(update("a", 3), update("new", 4))
    worker.publish()
    worker.begun.add("new")
    assert not worker.update(update("a", 3), update("new", 4))


@pytest.mark.parametrize(
    "news",
    [
        update("a", 1, finish="stop"),
        update("a", finish="length"),
        update("a", 1, event=PREEMPTED),
        update("a"),  # blocks of a prompt
        update("a", 1, prompt_logprobs=(object(),)),
    ],
)
def test_whatever_is_more_than_tokens_wakes_the_loop(news: SequenceUpdate) -> None:
    worker = Worker()
    worker.draw("a")
    worker.publish()
    assert not worker.update(update("b", 1))
    assert worker.update(update("b", 2), news)
    assert [len(told.updates) for told in worker.publish() if isinstance(told, Updated)] == [1, 2]


def test_an_order_between_two_steps_is_no_step() -> None:
    worker = Worker()
    worker.draw("a")
    worker.publish()
    assert worker.update(update("new"), after_s=0.0001)
    worker.publish()
    assert [worker.draw("a") for _ in range(4)] == [False, False, False, True], "8 ms each, from then on"


def test_tokens_of_a_step_that_does_not_end_are_late() -> None:
    worker = Worker()
    worker.draw("a")
    worker.publish()
    assert not worker.draw("a")
    assert not worker.news.is_late
    worker.now += 0.036
    assert worker.news.is_late
    worker.publish()
    assert not worker.news.is_late
