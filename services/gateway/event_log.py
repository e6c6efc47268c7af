"""What one run of a keyed request answered, event by event, and how far a client is in it. Pure but for waiting.

A client's place is told in every event's `id:` line: the run, how many of its events the client has, and per choice how
many characters of text. Inside one run the number of events says where to go on. Another run, of a gateway that took
the request over, says the same text in other pieces; there the characters say it.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import msgspec

from shared.contracts.errors import InvalidInput

DATA = b"data: "
FRAME_END = b"\n\n"
PART_BYTES = 192 * 1024
"""A part of a record is closed at this size; a single event may be longer, and is cut."""
_PLACE = re.compile(r"(\d{1,9})-(\d{1,9})((?:-\d{1,9}f?)*)")
_PLAIN_DELTA = {"role", "content", "refusal"}


class Reach(msgspec.Struct, frozen=True):
    """How much of a choice was sent: characters of text, and whether its finish reason was."""

    chars: int = 0
    finished: bool = False


@dataclass(frozen=True, slots=True)
class Place:
    """Where a client is: `index` events of `run`, in which the choices have come to `reached`.

    `reached` is empty where characters do not tell: in a stream of more than text.
    """

    run: int
    index: int
    reached: tuple[Reach, ...] = ()

    def __str__(self) -> str:
        tail = "".join(f"-{reach.chars}{'f' if reach.finished else ''}" for reach in self.reached)
        return f"{self.run}-{self.index}{tail}"


def parse_place(text: str) -> Place:
    """The place in a `Last-Event-ID`. Raises InvalidInput."""
    match = _PLACE.fullmatch(text)
    if match is None:
        raise InvalidInput("Last-Event-ID is none of this API's", param="Last-Event-ID")
    run, index, tail = match.groups()
    reached = (Reach(int(part.rstrip("f")), part.endswith("f")) for part in tail.split("-")[1:])
    return Place(int(run), int(index), tuple(reached))


class Part(msgspec.Struct, array_like=True):
    """A piece of a log as it is kept: `status` with the first one only."""

    status: int = 0
    stream: bool = False
    events: list[bytes] = []
    last: bool = False


_encode_part = msgspec.msgpack.Encoder().encode
_decode_part = msgspec.msgpack.Decoder(Part).decode


class EventLog:
    """The answer of one run: a stream's events, or one body. Any number of readers, one writer."""

    def __init__(self, run: int) -> None:
        self.run = run
        self.status = 0
        """Of HTTP; 0 until the answer begins."""
        self.stream = False
        self.headers: Mapping[str, str] = MappingProxyType({})
        self.events: list[bytes] = []
        self.complete = False
        self._places: list[Place] = []
        self._reached: list[Reach] = []
        self._plain = True
        self._news = asyncio.Event()
        self._cut = b""

    # ------------------------------------------------------------------------------------------ writing

    def begin(self, status: int, *, stream: bool, headers: Mapping[str, str] = MappingProxyType({})) -> None:
        """The answer begins. `headers` are for readers here, and not kept."""
        self.status, self.stream, self.headers = status, stream, headers
        self._tell()

    def extend(self, events: Iterable[bytes], *, last: bool = False) -> None:
        """More events, without their ends; `last`: no more come."""
        for event in events:
            if self.stream:
                self._measure(event)
            self.events.append(event)
            reached = tuple(self._reached) if self._plain else ()
            self._places.append(Place(self.run, len(self.events), reached))
        self.complete |= last
        self._tell()

    def feed(self, part: bytes) -> None:
        """A part that the run's owner wrote."""
        found = _decode_part(part)
        if found.status:
            self.status, self.stream = found.status, found.stream
        events = found.events
        if events:
            events[0] = self._cut + events[0]
            self._cut = b""
        if events and not found.last and events[-1].endswith(_CUT):
            self._cut = events.pop().removesuffix(_CUT)
        self.extend(events, last=found.last)

    async def news(self) -> None:
        """Returns when something has changed since the call."""
        await self._news.wait()

    # ------------------------------------------------------------------------------------------ reading

    def place(self, index: int) -> Place:
        """Where a client is that has the first `index` events."""
        return self._places[index - 1] if index else Place(self.run, 0)

    # ------------------------------------------------------------------------------------------ inside

    def _tell(self) -> None:
        self._news.set()
        self._news = asyncio.Event()

    def _measure(self, event: bytes) -> None:
        found = json_of(event)
        if not isinstance(found, dict):
            self._plain &= event == DATA + b"[DONE]"
            return
        if not isinstance(found.get("choices"), list):
            self._plain &= "error" in found
            return
        for choice in found["choices"]:
            index = choice.get("index", 0)
            self._reached += [Reach()] * (index + 1 - len(self._reached))
            reach, text = self._reached[index], text_of(choice)
            self._plain &= is_plain(choice)
            self._reached[index] = Reach(reach.chars + len(text), reach.finished or bool(choice.get("finish_reason")))


def make_parts(
    log: EventLog, first: int, more: Sequence[bytes] = (), *, end: int | None = None, last: bool = False
) -> list[bytes]:
    """A log's events from `first` to `end`, or all, and `more` after them, as parts to be kept; the head with the first
    event."""
    made, size = [Part() if first else Part(log.status, log.stream)], 0
    for event in (*log.events[first:end], *more):
        for piece in _pieces(event):
            if size and size + len(piece) > PART_BYTES:
                made.append(Part())
                size = 0
            made[-1].events = [*made[-1].events, piece]
            size += len(piece)
    made[-1].last = last
    return [_encode_part(part) for part in made]


_CUT = b"\x00"
"""Ends a piece of an event that goes on in the next part; no event holds it, JSON writes it otherwise."""


def _pieces(event: bytes) -> Sequence[bytes]:
    if len(event) <= PART_BYTES:
        return (event,)
    cuts = [event[at : at + PART_BYTES] for at in range(0, len(event), PART_BYTES)]
    return [*(piece + _CUT for piece in cuts[:-1]), cuts[-1]]


def json_of(event: bytes) -> Any:
    """The JSON object of an event; None for another one."""
    if not event.startswith(DATA + b"{"):
        return None
    return msgspec.json.decode(event[len(DATA) :])


def text_of(choice: dict[str, Any]) -> str:
    """The text of a chunk's choice."""
    return choice.get("text") or choice.get("delta", {}).get("content") or ""


def is_plain(choice: dict[str, Any]) -> bool:
    """True if a chunk's choice tells nothing but text and its end."""
    delta = choice.get("delta", {})
    return not choice.get("logprobs") and set(delta) <= _PLAIN_DELTA and not delta.get("refusal")
