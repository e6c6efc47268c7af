"""From a worker's records to a client's bytes, for any text, any split, any loss: what a stream promises.

Random vocabularies cut code points anywhere; records come split, twice, late or not at all; the client takes at any
time. Whatever happens, the frames hold the text that decoding everything at once gives, and every client that resumes
at any event has the rest of it.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count, pairwise
from typing import Any

import pytest
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from services.gateway.chunks import ChunkWriter
from services.gateway.event_log import FRAME_END, EventLog, Place, Reach, make_parts, parse_place
from services.gateway.log_reader import LogReader
from shared.contracts.attempt import Attempt
from shared.contracts.errors import Conflict, InvalidInput
from shared.contracts.ids import Dispatch, Epoch, RequestId, WorkerId
from shared.contracts.parts import StreamRecord, Totals
from shared.contracts.tokens import completion_checksum, pack_tokens
from shared.ingress.choice_output import ChoiceOutput
from shared.ingress.choice_text import ChoiceText
from shared.ingress.completion_body import Usage
from shared.text import stream_effects as fx
from shared.text.stream_commit import StreamCommit

WORKER = WorkerId("decode-1")
ATTEMPT = Attempt(RequestId("req-1"), Epoch(1), Dispatch(1))
PIECES = st.one_of(
    st.text(max_size=3).map(lambda s: s.encode("utf-8", "ignore")),
    st.binary(max_size=3),
    st.sampled_from([b"a", b"b", b"ab", b"\xf0\x9f", b"\x98", b"\x80", b"\xf0\x9f\x98\x80", b"\xe2\x80", b"", b"\n"]),
)
EXAMPLES = 100
SHORT_S, LONG_S = 8.0, 120.0
STOPS = st.lists(st.text(alphabet="ab\n😀é", min_size=1, max_size=3), max_size=2)


def expected(tokens: list[bytes], stops: list[str]) -> tuple[str, bool]:
    """The text of an output, and whether a stop string ended it: the first to end, the longest of those."""
    text = b"".join(tokens).decode("utf-8", "replace")
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return text[: end - max(map(len, found))], True
    return text, False


@dataclass
class Client:
    """An ingress between a worker's records and a client, as `Session` and `SessionResponse` put its parts together."""

    vocabulary: list[bytes]
    stops: list[str]
    num_choices: int
    kind: str
    usage: bool
    frames: bytes = b""
    asked: list[fx.AskReplay] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.outputs = [
            ChoiceOutput(i, ChoiceText(self.vocabulary.__getitem__, self.stops)) for i in range(self.num_choices)
        ]
        self.stream = StreamCommit(
            ATTEMPT.request_id,
            [1],
            arrived=0.0,
            budget_s=60.0,
            num_choices=self.num_choices,
            find_stop=lambda choice, first, ids: self.outputs[choice].text.push(ids),
        )
        self.writer = ChunkWriter(self.kind, "req-1", "m", 1, self.usage)
        self.frames = b"".join(map(self.writer.role, range(self.num_choices)))
        self.stream.start(0.0)

    def take(self) -> None:
        pieces = [piece for output in self.outputs if (piece := output.take()) is not None]
        self.frames += b"".join(map(self.writer.piece, pieces))

    def record(self, record: StreamRecord) -> None:
        for effect in self.stream.on_record(WORKER, record, 0.0):
            match effect:
                case fx.Commit(choice=choice):
                    self.outputs[choice].collect()
                case fx.EndChoice(choice=choice, finish=finish):
                    self.outputs[choice].text.finish()
                    self.outputs[choice].collect()
                    self.outputs[choice].end(finish)
                case fx.AskReplay():
                    self.asked.append(effect)

    def end(self) -> bytes:
        self.take()
        end = self.stream.end
        assert end is not None
        assert end.error is None, end.error
        return self.frames + self.writer.end(Usage(1, self.stream.num_committed))


def records_of(choice: int, size: int, cuts: list[int]) -> list[StreamRecord]:
    """An output of token ids choice, choice + n, … as a worker would send it, cut at `cuts`."""
    ids = list(range(size))
    edges = sorted({0, size, *(cut % (size + 1) for cut in cuts)})
    spans = list(pairwise(edges)) or [(0, 0)]
    made = []
    for first, end in spans:
        last = end == size
        totals = Totals(completion_tokens=size, checksum=completion_checksum(ids)) if last else None
        packed = pack_tokens(ids[first:end])
        made.append(StreamRecord(ATTEMPT, choice, first, packed, "length" if last else "", totals))
    return made


def run(data: st.DataObject) -> tuple[Client, list[Any], list[tuple[str, bool]]]:
    vocabulary = data.draw(st.lists(PIECES, max_size=12))
    stops = data.draw(STOPS)
    num_choices = data.draw(st.integers(1, 3))
    kind, usage = data.draw(st.sampled_from(["chat", "completions"])), data.draw(st.booleans())
    client = Client(vocabulary, stops, num_choices, kind, usage)
    sent = [
        record
        for choice in range(num_choices)
        for record in records_of(choice, len(vocabulary), data.draw(st.lists(st.integers(0, 99), max_size=5)))
    ]
    order = data.draw(st.permutations(sent))
    for record in (*order, *data.draw(st.lists(st.sampled_from(sent), max_size=4))):
        client.record(record)
        if data.draw(st.booleans()):
            client.take()
    for record in sent:  # what was lost comes with the replay
        client.record(record)
    return client, frames_of(client.end()), [expected(vocabulary, stops)] * num_choices


def frames_of(body: bytes) -> list[Any]:
    """The events; every one is valid UTF-8 by itself."""
    assert body.endswith(b"\n\n")
    events = [part.removeprefix(b"data: ").decode() for part in body.removesuffix(b"\n\n").split(b"\n\n")]
    return [event if event == "[DONE]" else json.loads(event) for event in events]


def texts_of(events: list[Any], num_choices: int) -> list[str]:
    texts = [""] * num_choices
    for event in events:
        for choice in () if event == "[DONE]" else event["choices"]:
            texts[choice["index"]] += choice.get("text") or choice.get("delta", {}).get("content") or ""
    return texts


def finishes_of(events: list[Any], num_choices: int) -> list[list[str]]:
    found: list[list[str]] = [[] for _ in range(num_choices)]
    for event in events:
        for choice in () if event == "[DONE]" else event["choices"]:
            assert not found[choice["index"]], "a choice goes on behind its end"
            if choice["finish_reason"]:
                found[choice["index"]].append(choice["finish_reason"])
    return found


def check_stream(data: st.DataObject) -> None:
    client, events, wanted = run(data)
    assert texts_of(events, client.num_choices) == [text for text, _ in wanted]
    reasons = [["stop" if stopped else "length"] for _, stopped in wanted]
    assert finishes_of(events, client.num_choices) == reasons
    assert events[-1] == "[DONE]"
    assert events.count("[DONE]") == 1
    usages = [event for event in events[:-1] if event.get("usage")]
    assert len(usages) == client.usage
    if client.usage:
        assert events[-2]["choices"] == []
    assert all(("usage" in event) == client.usage for event in events[:-1])


def check_resume(data: st.DataObject) -> None:
    """A client drops again and again, in this run and in others of the same request, which cut the text otherwise."""
    first, _, wanted = run(data)
    logs = [log_of(1, first.frames + first.writer.end(Usage(1, 1)))]
    for number in (2, 3):
        other = Client(first.vocabulary, first.stops, first.num_choices, first.kind, first.usage)
        for choice in range(first.num_choices):
            cuts = data.draw(st.lists(st.integers(0, 99), max_size=5))
            for record in records_of(choice, len(first.vocabulary), cuts):
                other.record(record)
                other.take()
        logs.append(log_of(number, other.end()))
    had: list[bytes] = []
    place: Place | None = None
    for log in (*data.draw(st.lists(st.sampled_from(logs), max_size=4)), logs[-1]):
        reader = LogReader(log, place)
        news = reader.read()
        if log is not logs[-1] or place is None:
            news = news[: data.draw(st.integers(0, len(news)))]
        had += [event for _, event in news]
        place = parse_place(str(news[-1][0])) if news else place
        if had and had[-1] == b"data: [DONE]":
            break  # nobody asks for more
    else:
        had += [event for _, event in LogReader(logs[-1], place).read()]
    events = decoded(had)
    assert texts_of(events, first.num_choices) == [text for text, _ in wanted]
    assert [len(part) for part in finishes_of(events, first.num_choices)] == [1] * first.num_choices
    roles = [c["index"] for e in events[:-1] for c in e["choices"] if "role" in c.get("delta", ())]
    assert roles == (list(range(first.num_choices)) if first.kind == "chat" else [])
    assert events[-1] == "[DONE]"


def decoded(events: list[bytes]) -> list[Any]:
    return frames_of(b"".join(event + FRAME_END for event in events)) if events else []


def log_of(run_number: int, body: bytes) -> EventLog:
    log = EventLog(run_number)
    log.begin(200, stream=True)
    log.extend(body.removesuffix(FRAME_END).split(FRAME_END), last=True)
    return log


def examine(check: Callable[[st.DataObject], None], seconds: float) -> None:
    """`check` over random data until the time is over. Its seed is printed: `BATON_FUZZ_SEED=S` does the same again."""
    first = int(os.environ.get("BATON_FUZZ_SEED") or secrets.randbits(32))
    deadline = time.monotonic() + seconds
    for number in count(first):
        print(f"BATON_FUZZ_SEED={number}")
        chosen = settings(max_examples=EXAMPLES, deadline=None, database=None, suppress_health_check=list(HealthCheck))
        seed(number)(chosen(given(st.data())(check)))()
        if time.monotonic() > deadline or "BATON_FUZZ_SEED" in os.environ:
            return


def test_frames_hold_the_text_whatever_the_split() -> None:
    examine(check_stream, SHORT_S)


def test_a_client_can_go_on_from_any_event_in_this_run_or_another() -> None:
    examine(check_resume, SHORT_S)


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("check", [check_stream, check_resume])
def test_frames_and_places_at_length(check: Callable[[st.DataObject], None]) -> None:
    examine(check, LONG_S)


# ---------------------------------------------------------------------------------------------- logs


def test_a_log_that_was_kept_in_parts_is_the_same_log() -> None:
    log = EventLog(3)
    log.begin(200, stream=True)
    writer = ChunkWriter("chat", "req-1", "m", 1, False)
    long = "x" * 500_000
    pieces = [writer.role(0), writer.delta(0, "one"), writer.delta(0, long), writer.finish(0, "stop"), b"data: [DONE]"]
    events = [piece.removesuffix(FRAME_END) for piece in pieces]
    log.extend(events[:2])
    parts = make_parts(log, 0)
    parts += make_parts(log, 2, events[2:], last=True)
    log.extend(events[2:], last=True)
    mirror = EventLog(3)
    for part in parts:
        mirror.feed(part)
    assert mirror.events == log.events
    assert (mirror.status, mirror.stream, mirror.complete) == (200, True, True)
    assert [mirror.place(i) for i in range(6)] == [log.place(i) for i in range(6)]
    assert str(log.place(5)) == f"3-5-{3 + len(long)}f"


TOOL = b'data: {"choices":[{"index":0,"delta":{"tool_calls":[{"index":0}]}}]}'
SAID = b'data: {"choices":[{"index":0,"delta":{"content":"%s"}}]}'


def chat_log(number: int, *events: bytes) -> EventLog:
    log = EventLog(number)
    log.begin(200, stream=True)
    log.extend(events)
    return log


def test_a_stream_of_more_than_text_goes_on_in_its_own_run_alone() -> None:
    first, second = chat_log(1, SAID % b"a", TOOL, SAID % b"b"), chat_log(2, SAID % b"a", TOOL, SAID % b"b")
    assert [event for _, event in LogReader(first, first.place(2)).read()] == [SAID % b"b"]
    with pytest.raises(Conflict):
        LogReader(second, first.place(2)).read()
    # nothing but text had come
    assert [event for _, event in LogReader(second, first.place(1)).read()] == [TOOL, SAID % b"b"]
    with pytest.raises(Conflict):
        LogReader(chat_log(2, TOOL), first.place(1)).read()


def test_a_text_that_is_cut_has_no_line_end_within() -> None:
    first, second = chat_log(1, SAID % b"a"), chat_log(2, SAID % b"a\\u2028b\\u0085")
    ((_, event),) = LogReader(second, first.place(1)).read()
    assert event == SAID % b"\\u2028b\\u0085"


def test_behind_an_error_the_next_run_goes_on() -> None:
    failed = chat_log(1, SAID % b"ab", b'data: {"error":{"message":"gone"}}')
    ((_, event),) = LogReader(chat_log(2, SAID % b"abc"), failed.place(2)).read()
    assert event == SAID % b"c"


def test_a_client_ahead_of_its_own_run_waits_and_behind_its_end_is_refused() -> None:
    log = chat_log(1, SAID % b"a")
    reader = LogReader(log, Place(1, 2, (Reach(2),)))
    assert reader.waits
    assert reader.read() == []
    log.extend([SAID % b"b", SAID % b"c"])
    assert [event for _, event in reader.read()] == [SAID % b"c"]
    ended = chat_log(1, SAID % b"a")
    ended.extend([], last=True)
    with pytest.raises(Conflict):
        LogReader(ended, Place(1, 9, (Reach(9),))).read()


def test_who_skips_stays_where_it_is_when_the_run_changes_again() -> None:
    place = Place(1, 9, (Reach(5),))
    short = LogReader(chat_log(2, SAID % b"abc"), place)
    assert short.read() == []
    assert short.place == Place(2, 1, (Reach(5),))
    rest = LogReader(chat_log(3, SAID % b"abcd", SAID % b"efg"), short.place).read()
    assert [(str(at), event) for at, event in rest] == [("3-2-7", SAID % b"fg")]
    empty = LogReader(chat_log(2), place)
    assert empty.read() == []
    assert [event for _, event in LogReader(chat_log(3, SAID % b"abcdef"), empty.place).read()] == [SAID % b"f"]


@pytest.mark.parametrize("text", ["", "1", "1-", "a-b", "1-2-", "1-2-3x", "-1-2", "1-2-3f-", "1" * 30 + "-1"])
def test_other_ids_are_refused(text: str) -> None:
    with pytest.raises(InvalidInput):
        parse_place(text)


async def test_readers_are_told_of_news() -> None:
    log = EventLog(1)
    waiting = [asyncio.create_task(log.news()) for _ in range(3)]
    await asyncio.sleep(0)
    log.begin(200, stream=False)
    await asyncio.wait_for(asyncio.gather(*waiting), 10)
