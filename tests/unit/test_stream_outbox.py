"""The outbox: frames per step, replay, finals resent until acknowledged, splitting."""

from __future__ import annotations

from services.decode.stream_outbox import StreamOutbox
from shared.contracts.attempt import Attempt
from shared.contracts.ids import Dispatch, Epoch, Incarnation, IngressId, RequestId, WorkerId
from shared.contracts.message import encode
from shared.contracts.messages import StreamFrame
from shared.contracts.parts import Totals
from shared.contracts.tokens import unpack_tokens

GW1, GW2 = IngressId("gw-1"), IngressId("gw-2")


def attempt(request: str = "req-a", epoch: int = 1) -> Attempt:
    return Attempt(RequestId(request), Epoch(epoch), Dispatch(1))


def outbox(max_bytes: int = 512 * 1024) -> StreamOutbox:
    return StreamOutbox(WorkerId("decode-1"), Incarnation(5), max_bytes)


def flat(frames: list[tuple[IngressId, StreamFrame]]) -> list[tuple[str, int, list[int], str]]:
    return [
        (r.attempt.request_id, r.first_seq, unpack_tokens(r.token_ids), r.finish) for _, f in frames for r in f.records
    ]


def test_one_frame_per_ingress_and_step() -> None:
    box = outbox()
    for name, ingress in (("req-a", GW1), ("req-b", GW1), ("req-c", GW2)):
        box.open(attempt(name), ingress, 1, 0)
        box.tokens(attempt(name), 0, [1])
    frames = box.frames(0)
    assert [(i, len(f.records), f.number) for i, f in frames] == [(GW1, 2, 1), (GW2, 1, 1)]
    assert box.frames(0) == []
    box.tokens(attempt("req-a"), 0, [2, 3])
    assert flat(box.frames(0)) == [("req-a", 1, [2, 3], "")]


def test_sequence_numbers_go_on_after_earlier_epochs() -> None:
    box = outbox()
    box.open(attempt(), GW1, 1, 40)
    box.tokens(attempt(), 0, [7])
    assert flat(box.frames(0)) == [("req-a", 40, [7], "")]
    assert box.replay(attempt(), 0, 39).held is False


def test_final_is_resent_with_backoff_until_acked() -> None:
    box = outbox()
    box.open(attempt(), GW1, 1, 0)
    box.tokens(attempt(), 0, [7, 8])
    box.finish(attempt(), 0, "stop", Totals(completion_tokens=2))
    assert flat(box.frames(0)) == [("req-a", 0, [7, 8], "stop")]
    assert box.resends(0.4) == []
    assert flat(box.resends(0.5)) == [("req-a", 2, [], "stop")]
    assert box.resends(1.4) == []
    assert len(box.resends(1.5)) == 1
    assert box.acked([attempt()]) == [attempt()]
    assert box.resends(50) == []
    assert len(box) == 0


def test_an_ack_of_an_attempt_still_running_is_ignored() -> None:
    box = outbox()
    box.open(attempt(), GW1, 2, 0)
    box.finish(attempt(), 0, "stop", Totals())
    box.frames(0)
    assert box.acked([attempt()]) == []
    box.finish(attempt(), 1, "length", Totals())
    box.frames(0)
    assert box.acked([attempt()]) == [attempt()]


def test_the_first_end_wins_and_later_tokens_are_dropped() -> None:
    box = outbox()
    box.open(attempt(), GW1, 1, 0)
    box.finish(attempt(), 0, "stop", Totals())
    box.finish(attempt(), 0, "error", None)
    box.tokens(attempt(), 0, [1])
    assert flat(box.frames(0)) == [("req-a", 0, [], "stop")]


def test_listing_names_the_next_sequence_numbers() -> None:
    box = outbox()
    box.open(attempt(), GW1, 2, 10)
    box.tokens(attempt(), 1, [1, 2])
    box.frames(0)
    ((ingress, frame),) = box.listings()
    assert (ingress, frame.listing, frame.records) == (GW1, True, ())
    assert frame.held[0].next_seq == (10, 12)


def test_replay_answers_what_was_sent() -> None:
    box = outbox()
    box.open(attempt(), GW1, 1, 0)
    box.tokens(attempt(), 0, [1, 2, 3])
    box.frames(0)
    box.tokens(attempt(), 0, [4])
    (record,) = box.replay(attempt(), 0, 1).records
    assert (record.first_seq, unpack_tokens(record.token_ids)) == (1, [2, 3])
    assert box.replay(attempt(epoch=2), 0, 0).held is False


def test_restamp_sends_again_from_what_the_ingress_has() -> None:
    box = outbox()
    box.open(attempt(), GW1, 1, 0)
    box.tokens(attempt(), 0, [1, 2, 3])
    box.frames(0)
    box.restamp(attempt(epoch=2), GW2, 1)
    box.tokens(attempt(), 0, [9])  # of the fenced attempt
    box.tokens(attempt(epoch=2), 0, [4])
    frames = box.frames(0)
    assert flat(frames) == [("req-a", 1, [2, 3, 4], "")]
    assert frames[0][0] == GW2
    assert frames[0][1].records[0].attempt == attempt(epoch=2)


def test_restamp_refuses_what_the_tokens_here_do_not_reach() -> None:
    box = outbox()
    box.open(attempt(), GW1, 1, 5)
    box.tokens(attempt(), 0, [1, 2])
    for from_seq in (4, 8):
        assert not box.restamp(attempt(epoch=2), GW2, from_seq)
    assert not box.restamp(attempt("req-b", epoch=2), GW2, 0), "not held"
    assert flat(box.frames(0)) == [("req-a", 5, [1, 2], "")], "nothing was changed"
    assert box.restamp(attempt(epoch=2), GW2, 7)
    assert box.frames(0) == []


def test_dropping_an_attempt_spares_a_newer_one() -> None:
    box = outbox()
    box.open(attempt(), GW1, 1, 0)
    box.open(attempt(epoch=2), GW1, 1, 0)
    box.drop(attempt())
    assert box.holds(attempt(epoch=2))
    box.drop(attempt(epoch=2))
    assert len(box) == 0


def test_frames_and_records_are_split_by_size() -> None:
    box = outbox(max_bytes=4096)
    for i in range(30):
        box.open(attempt(f"req-{i}"), GW1, 1, 0)
        box.tokens(attempt(f"req-{i}"), 0, list(range(100)))
    box.open(attempt("req-long"), GW1, 1, 0)
    box.tokens(attempt("req-long"), 0, list(range(3000)))
    frames = box.frames(0)
    assert all(len(encode(f)) <= 4096 for _, f in frames)
    tokens = [t for name, _, part, _ in flat(frames) if name == "req-long" for t in part]
    assert tokens == list(range(3000))
    assert [f.number for _, f in frames] == list(range(1, len(frames) + 1))


def test_a_choice_the_ingress_ended_owes_no_final() -> None:
    box = outbox()
    box.open(attempt(), GW1, 2, 0)
    box.tokens(attempt(), 0, [1])
    box.settle(attempt(), 0, "stop", Totals(completion_tokens=1))
    box.finish(attempt(), 1, "length", Totals())
    assert flat(box.frames(0)) == [("req-a", 0, [], "length")]
    assert len(flat(box.resends(1))) == 1
    box.settle(attempt(), 1, "stop", Totals())
    assert not box.holds(attempt())
