"""The ingress-stream core: rules one by one, then random networks."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from shared.contracts.attempt import Attempt
from shared.contracts.errors import (
    WORKER_STOPPING,
    BatonError,
    Internal,
    InvalidInput,
    Overloaded,
    Unavailable,
    to_wire,
)
from shared.contracts.ids import Dispatch, Epoch, RequestId, Term, WorkerId
from shared.contracts.messages import Placed
from shared.contracts.parts import HeldAttempt, StreamRecord, Totals
from shared.contracts.tokens import completion_checksum, pack_tokens
from shared.text.stream_choice import StreamRules
from shared.text.stream_commit import StreamCommit
from shared.text.stream_effects import (
    AckFinal,
    AskReplay,
    Commit,
    Effect,
    End,
    EndChoice,
    SendCancel,
    SendFinish,
    SettleRequest,
    SubmitAttempt,
)

ID = RequestId("req-1")
W1, W2 = WorkerId("decode-1"), WorkerId("decode-2")
PROMPT = [1, 2, 3]
FIRST = Attempt(ID, Epoch(1), Dispatch(1))


def attempt(epoch: int = 1, dispatch: int = 1) -> Attempt:
    return Attempt(ID, Epoch(epoch), Dispatch(dispatch))


def placed(epoch: int = 1, dispatch: int = 1, worker: WorkerId = W1, **more: object) -> Placed:
    return Placed(
        number=1,
        attempt=attempt(epoch, dispatch),
        term=Term(1),
        decode_worker=worker,
        **more,  # type: ignore[arg-type]
    )


def record(first: int, ids: list[int], *, epoch: int = 1, dispatch: int = 1, finish: str = "", **more: object):  # type: ignore[no-untyped-def]
    return StreamRecord(attempt(epoch, dispatch), 0, first, pack_tokens(ids), finish, **more)  # type: ignore[arg-type]


def running(**more: object) -> StreamCommit:
    stream = StreamCommit(ID, PROMPT, arrived=0.0, budget_s=100.0, **more)  # type: ignore[arg-type]
    stream.start(0.0)
    stream.on_placed(placed(), 0.0)
    return stream


def kinds(effects: list[Effect]) -> list[str]:
    return [type(effect).__name__ for effect in effects]


def test_tokens_are_committed_and_the_final_ends_settles_and_acknowledges() -> None:
    stream = running()
    assert stream.on_record(W1, record(0, [7]), 1.0) == [Commit(0, 0, [7])]
    totals = Totals(prompt_tokens=3, cached_tokens=2, completion_tokens=2, checksum=completion_checksum([7, 8]))
    effects = stream.on_record(W1, record(1, [8], finish="length", totals=totals), 2.0)
    assert kinds(effects) == ["Commit", "EndChoice", "End", "SettleRequest", "AckFinal"]
    settle = effects[3]
    assert isinstance(settle, SettleRequest)
    assert (settle.prompt_tokens, settle.completion_tokens, settle.cached_tokens) == (3, 2, 2)
    assert settle.compute[0].worker == W1
    # the final again is acknowledged again and nothing else
    assert stream.on_record(W1, record(1, [8], finish="length", totals=totals), 3.0) == [AckFinal(attempt(), W1)]


def test_duplicates_are_dropped_and_overlaps_cut() -> None:
    stream = running()
    stream.on_record(W1, record(0, [7, 8]), 1.0)
    assert stream.on_record(W1, record(0, [7, 8]), 1.0) == []
    assert stream.on_record(W1, record(1, [8, 9]), 1.0) == [Commit(0, 2, [9])]


def test_a_gap_is_held_and_asked_for_once() -> None:
    stream = running()
    assert stream.on_record(W1, record(1, [8]), 1.0) == [AskReplay(attempt(), W1, 0, 0)]
    assert stream.on_record(W1, record(2, [9]), 1.1) == []
    assert stream.on_record(W1, record(0, [7]), 1.2) == [Commit(0, 0, [7]), Commit(0, 1, [8]), Commit(0, 2, [9])]


def test_a_listing_shows_a_lost_tail() -> None:
    stream = running()
    stream.on_record(W1, record(0, [7]), 1.0)
    assert stream.on_listing(W1, HeldAttempt(attempt(), (1,)), 2.0) == []
    assert stream.on_listing(W1, HeldAttempt(attempt(), (3,)), 3.0) == [AskReplay(attempt(), W1, 0, 1)]
    effects = stream.on_replayed(attempt(), W1, 0, True, [record(1, [8, 9])], 3.1)
    assert effects == [Commit(0, 1, [8, 9])]


def test_an_unanswered_replay_is_repeated_then_the_attempt_is_lost() -> None:
    stream = running(rules=StreamRules(max_replays=2))
    stream.on_record(W1, record(1, [8]), 1.0)
    assert stream.on_tick(1.5) == []
    assert stream.on_tick(2.0) == [AskReplay(attempt(), W1, 0, 0)]
    assert kinds(stream.on_tick(3.0)) == ["SendCancel", "SubmitAttempt"]


def test_a_lost_worker_raises_the_epoch_cancels_the_old_attempt_and_goes_on_with_the_committed() -> None:
    stream = running()
    stream.on_record(W1, record(0, [7, 8]), 1.0)
    effects = stream.on_worker_lost(W1, 2.0)
    assert effects[0] == SendCancel(attempt(), W1, "worker lost")
    assert effects[1] == SubmitAttempt(attempt(2, 0), [1, 2, 3, 7, 8], 3, 2.0)
    # the dead one speaks again: nothing is committed
    assert stream.on_record(W1, record(2, [99]), 2.1) == []
    assert kinds(stream.on_record(W1, record(2, [99]), 4.0)) == ["SendCancel"]
    stream.on_placed(placed(2, 1, W2), 3.0)
    assert stream.on_record(W2, record(2, [9], epoch=2), 3.1) == [Commit(0, 2, [9])]


def test_deaths_of_the_worker_are_told_from_other_losses() -> None:
    stream = running()
    stream.on_listing(W1, None, 1.0)
    stream.on_listing(W1, None, 4.0)  # it forgot the attempt
    assert (stream.lost, stream.died) == (1, 0)
    stream.on_placed(placed(2, 1, W2), 5.0)
    stream.on_worker_lost(W1, 5.0)
    assert (stream.lost, stream.died) == (1, 0)
    stream.on_worker_lost(W2, 5.0)
    assert (stream.lost, stream.died) == (2, 1)
    stream.on_placed(placed(3, 1, W1), 6.0)
    stream.on_tick(30.0, None)  # silent
    assert (stream.lost, stream.died) == (3, 2)


def test_a_later_session_of_a_request_starts_above_its_earlier_epochs() -> None:
    stream = StreamCommit(ID, PROMPT, arrived=0.0, budget_s=100.0, epoch=Epoch(17))
    assert stream.start(0.0) == [SubmitAttempt(attempt(17, 0), PROMPT, 3, 0.0)]
    assert kinds(stream.on_placed(placed(16, 9, W1), 0.1)) == ["SendCancel"]
    assert not stream.worker
    # it is fresh like any first submit: an overload ends it
    (end, settle) = stream.on_submit_failed(Overloaded("full"), 0.2)
    assert isinstance(end, End)
    assert isinstance(settle, SettleRequest)
    assert isinstance(end.error, Overloaded)
    assert settle.attempt.epoch == 17


def test_a_session_goes_on_from_tokens_of_an_earlier_one() -> None:
    stream = StreamCommit(ID, PROMPT, arrived=0.0, budget_s=60.0, epoch=Epoch(1025))
    assert stream.restore([7, 8]) == [Commit(0, 0, [7, 8])]
    (submit,) = stream.start(0.0)
    assert isinstance(submit, SubmitAttempt)
    assert (submit.token_ids, submit.num_prompt_tokens) == ([*PROMPT, 7, 8], len(PROMPT))
    stream.on_placed(placed(1025), 0.1)
    final = Totals(completion_tokens=3, checksum=completion_checksum([7, 8, 9]))
    effects = stream.on_record(W1, record(2, [9], epoch=1025, finish="length", totals=final), 0.2)
    assert effects[0] == Commit(0, 2, [9])
    assert next(e for e in effects if isinstance(e, SettleRequest)).completion_tokens == 3


def test_tokens_that_complete_a_stop_string_are_no_beginning() -> None:
    stream = StreamCommit(ID, PROMPT, arrived=0.0, budget_s=60.0, find_stop=lambda choice, first, ids: 1)
    with pytest.raises(Internal):
        stream.restore([7, 8])


def test_losing_a_prefill_worker_changes_nothing() -> None:
    stream = StreamCommit(ID, PROMPT, arrived=0.0, budget_s=100.0)
    stream.start(0.0)
    stream.on_placed(placed(prefill_worker=W2), 0.0)
    assert stream.on_worker_lost(W2, 1.0) == []


def test_too_many_lost_workers_are_an_error() -> None:
    stream = running(rules=StreamRules(max_lost=2))
    stream.on_worker_lost(W1, 1.0)
    stream.on_placed(placed(2, 1, W2), 1.0)
    effects = stream.on_worker_lost(W2, 2.0)
    end = effects[0]
    assert isinstance(end, End)
    assert end.finish == "error"
    assert isinstance(end.error, Unavailable)
    assert stream.on_placed(placed(3, 1, W1), 3.0) == []


def test_workers_that_stop_on_purpose_one_after_the_other_lose_nobody_but_not_for_ever() -> None:
    stream = running(rules=StreamRules(max_lost=2, max_moves=3))
    error = to_wire(Unavailable("the worker was stopped", code=WORKER_STOPPING))
    for epoch in range(1, 5):
        effects = stream.on_record(W1, record(0, [], epoch=epoch, finish="error", error=error), 1.0 * epoch)
        assert kinds(effects) == ["SendCancel", "SubmitAttempt"]
        stream.on_placed(placed(epoch + 1, 1), 1.0 * epoch)
    end = stream.on_record(W1, record(0, [], epoch=5, finish="error", error=error), 5.0)[0]
    assert (stream.lost, stream.died, stream.moved) == (5, 0, 5)
    assert isinstance(end, End)
    assert isinstance(end.error, Unavailable)


def test_a_new_scheduler_term_resends_the_same_epoch_until_there_is_a_token() -> None:
    stream = StreamCommit(ID, PROMPT, arrived=0.0, budget_s=100.0)
    stream.start(0.0)
    assert stream.on_queued(Term(4), 0.0) == []
    assert stream.on_scheduler_term(Term(4), 1.0) == []
    assert stream.on_scheduler_term(Term(5), 2.0) == [SubmitAttempt(attempt(1, 0), PROMPT, 3, 2.0)]
    stream.on_record(W1, record(0, [7]), 3.0)
    assert stream.on_scheduler_term(Term(6), 4.0) == []


def test_a_newer_dispatch_replaces_the_older_in_the_same_epoch() -> None:
    stream = running()
    stream.on_placed(placed(1, 2, W2), 1.0)
    assert stream.on_record(W1, record(0, [7]), 1.0) == []
    assert stream.on_record(W2, record(0, [7], dispatch=2), 1.0) == [Commit(0, 0, [7])]


def test_a_stop_match_in_the_final_record_wins_over_its_length() -> None:
    stream = running(find_stop=lambda choice, first, ids: first + ids.index(9) + 1 if 9 in ids else None)
    effects = stream.on_record(W1, record(0, [7, 9, 8], finish="length"), 1.0)
    assert effects == [
        Commit(0, 0, [7, 9]),
        EndChoice(0, "stop"),
        SendFinish(attempt(), W1, 0, 2),
        End("stop"),
    ]
    assert stream.on_record(W1, record(3, [8]), 1.1) == []
    closing = stream.on_finish_reply(0, Totals(completion_tokens=2, wasted_tokens=1), 1.2)
    assert kinds(closing) == ["SettleRequest", "AckFinal"]
    assert closing[0].completion_tokens == 2  # type: ignore[attr-defined]
    assert closing[0].compute[0].totals.wasted_tokens == 1  # type: ignore[attr-defined]
    assert stream.on_finish_reply(0, None, 1.3) == []


def test_without_an_answer_to_finish_the_request_settles_alone() -> None:
    stream = running()
    stream.on_record(W1, record(0, [7, 8]), 1.0)
    assert kinds(stream.on_stop_match(0, 1, 1.0)) == ["EndChoice", "SendFinish", "End"]
    assert stream.on_tick(1.5) == []
    assert kinds(stream.on_tick(3.1)) == ["SettleRequest", "AckFinal"]
    assert stream.committed() == [7]


def test_client_gone_cancels_both_workers_and_charges_what_was_committed() -> None:
    stream = StreamCommit(ID, PROMPT, arrived=0.0, budget_s=100.0)
    stream.start(0.0)
    stream.on_placed(placed(prefill_worker=W2), 0.0)
    stream.on_record(W1, record(0, [7]), 1.0)
    effects = stream.on_client_gone("client_gone", 2.0)
    assert kinds(effects) == ["End", "SendCancel", "SendCancel"]
    (settle,) = stream.on_cancel_reply(attempt(), W1, Totals(computed_tokens=4), 2.1)
    assert (settle.prompt_tokens, settle.completion_tokens, settle.finish) == (3, 1, "cancelled")  # type: ignore[attr-defined]


def test_client_gone_while_queued_settles_nothing_and_cancels_a_late_placement() -> None:
    stream = StreamCommit(ID, PROMPT, arrived=0.0, budget_s=100.0)
    stream.start(0.0)
    effects = stream.on_client_gone("client_gone", 1.0)
    assert kinds(effects) == ["End", "SettleRequest"]
    assert (effects[1].prompt_tokens, effects[1].completion_tokens) == (0, 0)  # type: ignore[attr-defined]
    assert kinds(stream.on_placed(placed(), 2.0)) == ["SendCancel"]


def test_refusals_silence_absence_budget_and_bad_finals_end_as_errors() -> None:
    stream = StreamCommit(ID, PROMPT, arrived=0.0, budget_s=100.0)
    stream.start(0.0)
    effects = stream.on_placement_refused(attempt(1, 0), to_wire(Overloaded("full", retry_after_s=2)), 1.0)
    assert kinds(effects) == ["End", "SettleRequest"]
    assert isinstance(effects[0].error, Overloaded)  # type: ignore[attr-defined]

    stream = running()
    assert stream.on_tick(10.0) == []
    assert stream.on_tick(10.5, worker_seen=9.0) == []
    assert kinds(stream.on_tick(10.5)) == ["SendCancel", "SubmitAttempt"]

    stream = running()
    assert stream.on_listing(W1, None, 1.0) == []
    assert kinds(stream.on_listing(W1, None, 4.0)) == ["SendCancel", "SubmitAttempt"]

    stream = running()
    assert kinds(stream.on_tick(100.0)) == ["End", "SendCancel"]

    stream = running()
    bad = record(0, [7], finish="stop", totals=Totals(checksum=b"x" * 16))
    effects = stream.on_record(W1, bad, 1.0)
    assert isinstance(effects[1].error, Internal)  # type: ignore[attr-defined]

    stream = running()
    failed = record(0, [], finish="error", error=to_wire(Internal("engine fault")))
    assert kinds(stream.on_record(W1, failed, 1.0)) == ["End", "SettleRequest", "AckFinal"]


def test_a_placement_told_after_the_last_token_is_still_known() -> None:
    stream = StreamCommit(ID, PROMPT, arrived=0.0, budget_s=100.0)
    stream.start(0.0)
    assert "End" in kinds(stream.on_record(W1, record(0, [7], finish="stop"), 1.0))
    assert kinds(stream.on_placed(placed(worker=W2), 1.0)) == ["SendCancel"]  # not the one that ran it
    assert stream.placed is None
    assert stream.on_placed(placed(path="handed_off"), 1.0) == []
    assert stream.placed is not None
    assert stream.placed.path == "handed_off"


def test_a_worker_that_cannot_go_on_is_replaced() -> None:
    stream = running()
    leaving = record(0, [], finish="error", error=to_wire(Unavailable("draining")))
    assert kinds(stream.on_record(W1, leaving, 1.0)) == ["SendCancel", "SubmitAttempt"]


def test_other_tokens_for_a_committed_position_lose_the_attempt() -> None:
    stream = running()
    stream.on_record(W1, record(0, [7, 8]), 1.0)
    assert kinds(stream.on_record(W1, record(1, [9]), 1.0)) == ["SendCancel", "SubmitAttempt"]


def test_a_resumed_submit_that_fails_is_tried_again() -> None:
    for error in (Unavailable("scheduler"), Overloaded("full")):
        stream = running()
        stream.on_worker_lost(W1, 1.0)
        assert stream.on_submit_failed(error, 50.0) == []
        assert kinds(stream.on_tick(51.0)) == ["SubmitAttempt"]


def test_a_first_submit_is_tried_again_for_a_few_seconds_under_the_same_attempt() -> None:
    stream = StreamCommit(ID, PROMPT, arrived=0.0, budget_s=100.0, rules=StreamRules(first_submit_s=3.0))
    (first,) = stream.start(5.0)
    assert stream.on_submit_failed(Unavailable("election"), 5.0) == []
    assert stream.on_tick(5.5) == []
    assert stream.on_tick(6.0) == [SubmitAttempt(first.attempt, PROMPT, len(PROMPT), 6.0)]  # type: ignore[attr-defined]
    assert stream.on_submit_failed(Unavailable("election"), 7.0) == []
    stream.on_tick(8.0)
    assert kinds(stream.on_submit_failed(Unavailable("election"), 8.0)) == ["End", "SettleRequest"]
    assert stream.end is not None
    assert isinstance(stream.end.error, Unavailable)


@pytest.mark.parametrize("error", [Overloaded("full"), InvalidInput("never")])
def test_a_first_submit_that_is_refused_for_good_ends_at_once(error: BatonError) -> None:
    stream = StreamCommit(ID, PROMPT, arrived=0.0, budget_s=100.0)
    stream.start(0.0)
    assert kinds(stream.on_submit_failed(error, 0.1)) == ["End", "SettleRequest"]


@dataclass
class FakeNetwork:
    """A worker that makes `output`, and a network that drops, repeats and reorders its records."""

    rng: random.Random
    output: list[int]
    records: list[StreamRecord] = field(default_factory=list)
    worker: WorkerId = W1
    attempt: Attempt = FIRST
    next: int = 0

    def step(self) -> None:
        size = self.rng.randint(1, 3)
        ids = self.output[self.next : self.next + size]
        if not ids:
            return
        self.records.append(self._record(self.next, ids))
        self.next += len(ids)

    def _record(self, first: int, ids: list[int]) -> StreamRecord:
        last = first + len(ids) == len(self.output)
        totals = Totals(completion_tokens=len(self.output), checksum=completion_checksum(self.output)) if last else None
        return StreamRecord(self.attempt, 0, first, pack_tokens(ids), "length" if last else "", totals)

    def deliver(self) -> StreamRecord | None:
        if not self.records or self.rng.random() < 0.3:
            return None
        taken = self.records.pop(self.rng.randrange(min(4, len(self.records))))
        chance = self.rng.random()
        if chance < 0.2:
            return None
        if chance < 0.4:
            self.records.append(taken)
        return taken


@pytest.mark.parametrize("seed", range(150))
def test_random_networks_commit_exactly_what_the_worker_made(seed: int) -> None:
    rng = random.Random(seed)
    output = [rng.randrange(50_000) for _ in range(rng.randint(1, 60))]
    stream = StreamCommit(ID, PROMPT, arrived=0.0, budget_s=1e6, rules=StreamRules(max_lost=100))
    network = FakeNetwork(rng, output)
    text: list[int] = []
    ends = settles = 0
    todo = stream.start(0.0)
    todo += stream.on_placed(placed(), 0.0)
    now = 0.0
    while ends == 0:
        now += 0.05
        assert now < 2000, f"seed {seed}: no end"
        network.step()
        if (taken := network.deliver()) is not None:
            todo += stream.on_record(network.worker, taken, now)
        if rng.random() < 0.05:
            todo += stream.on_listing(network.worker, HeldAttempt(network.attempt, (network.next,)), now)
        if rng.random() < 0.01:
            todo += stream.on_worker_lost(network.worker, now)
        if network.next == len(output) and not network.records:  # finals are resent until acknowledged
            last = len(output) - 1
            network.records.append(network._record(last, output[last:]))
        todo += stream.on_tick(now)
        for effect in todo:
            match effect:
                case Commit(_, first, ids):
                    assert first == len(text)
                    text += ids
                case AskReplay(asked, _, _, first) if asked == network.attempt and rng.random() < 0.7:
                    made = output[first : network.next]
                    again = [network._record(first, made)] if made else []
                    todo += stream.on_replayed(asked, network.worker, 0, True, again, now)
                case SubmitAttempt(asked, ids, _, _) if asked.epoch > network.attempt.epoch:
                    assert ids == PROMPT + text
                    worker = WorkerId(f"decode-{asked.epoch}")
                    old = network.records
                    network = FakeNetwork(rng, output, old, worker, attempt(asked.epoch), len(text))
                    todo += stream.on_placed(placed(asked.epoch, 1, worker), now)
                case End():
                    ends += 1
                case SettleRequest():
                    settles += 1
        todo.clear()
    assert text == output
    assert (ends, settles, stream.num_committed) == (1, 1, len(output))


def choice_record(choice: int, ids: list[int], totals: Totals | None = None, **more: object) -> StreamRecord:
    finish = "length" if totals is not None else ""
    return StreamRecord(FIRST, choice, 0, pack_tokens(ids), finish, totals, **more)  # type: ignore[arg-type]


def spent(ids: list[int], seconds: float) -> Totals:
    return Totals(
        prompt_tokens=3,
        cached_tokens=2,
        completion_tokens=len(ids),
        computed_tokens=9,
        checksum=completion_checksum(ids),
        decode_s=seconds,
    )


def test_compute_of_several_choices_adds_up() -> None:
    stream = running(num_choices=3)
    stream.on_record(W1, choice_record(0, [7, 8], spent([7, 8], 1.0)), 1.0)
    stream.on_record(W1, choice_record(2, [9], spent([9], 2.0)), 1.0)
    stream.on_record(W1, choice_record(2, [9], spent([9], 2.0)), 1.0)  # a final is sent until it is acknowledged
    effects = stream.on_record(W1, choice_record(1, [7], spent([7], 4.0)), 2.0)
    settle = next(effect for effect in effects if isinstance(effect, SettleRequest))
    assert (settle.prompt_tokens, settle.completion_tokens, settle.cached_tokens) == (3, 4, 2)
    (row,) = settle.compute
    assert (row.totals.completion_tokens, row.totals.computed_tokens, row.totals.decode_s) == (4, 27, 7.0)


def test_a_cancelled_request_takes_the_workers_word_for_all_choices() -> None:
    stream = running(num_choices=2)
    stream.on_record(W1, choice_record(0, [7], spent([7], 1.0)), 1.0)
    stream.on_client_gone("client_gone", 2.0)
    effects = stream.on_cancel_reply(FIRST, W1, Totals(prompt_tokens=3, completion_tokens=5, decode_s=6.0), 3.0)
    settle = next(effect for effect in effects if isinstance(effect, SettleRequest))
    assert [row.totals.decode_s for row in settle.compute] == [6.0]


def test_scores_are_cut_where_tokens_are() -> None:
    stream = running()
    scores = bytes(range(12))
    effects = stream.on_record(W1, choice_record(0, [7, 8, 9], logprobs=scores, prompt_logprobs=b"prompt"), 1.0)
    assert effects == [Commit(0, 0, [7, 8, 9], scores, b"prompt")]
    again = StreamRecord(FIRST, 0, 2, pack_tokens([9, 10]), logprobs=scores[:8], prompt_logprobs=b"prompt")
    assert stream.on_record(W1, again, 1.0) == [Commit(0, 3, [10], scores[4:8])]
