"""What a decode worker still owes its ingresses: tokens to send or replay, and finals not yet acknowledged. Pure.

One frame per step and ingress carries the records of all that ingress's requests. Sequence numbers count output tokens
of a choice over all attempts: a request resumed elsewhere starts at the number of tokens committed before. Tokens are
kept until the attempt's finals are acknowledged; finals are resent, less and less often, until then.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import msgspec

from shared.contracts.attempt import Attempt
from shared.contracts.errors import ErrorInfo
from shared.contracts.ids import Incarnation, IngressId, RequestId, WorkerId
from shared.contracts.message import MAX_MESSAGE_BYTES
from shared.contracts.messages import StreamFrame, StreamReplayed
from shared.contracts.parts import HeldAttempt, StreamRecord, Totals
from shared.contracts.tokens import pack_tokens

RESEND_FIRST_S = 0.5
RESEND_MAX_S = 5.0
FORGET_FINAL_S = 120.0
"""An unacknowledged final is given up after this long; the ingress has by then ended the request another way."""
RECORD_BYTES = 512
"""Upper bound of a record's or listing entry's size on the wire without its tokens (ids, counters, totals)."""


@dataclass(slots=True)
class _Choice:
    base: int  # sequence number of tokens[0]
    tokens: list[int] = field(default_factory=list)
    logprobs: bytearray = field(default_factory=bytearray)  # of `tokens`, packed; empty when none are asked for
    prompt_logprobs: bytearray = field(default_factory=bytearray)
    sent: int = 0  # tokens handed to a frame
    finish: str = ""
    totals: Totals | None = None
    error: ErrorInfo | None = None
    final_sent: bool = False
    settled: bool = False  # the ingress ended it itself: it waits for no final

    @property
    def next_seq(self) -> int:
        return self.base + self.sent

    def records(self, attempt: Attempt, choice: int, start: int, limit_bytes: int) -> list[StreamRecord]:
        """Records of tokens[start:sent] and, when it is due, the final."""
        if start and start + 1 == self.sent and not (self.logprobs or self.final_sent):  # as in most steps
            return [StreamRecord(attempt, choice, self.base + start, pack_tokens((self.tokens[start],)))]
        width = len(self.logprobs) // len(self.tokens) if self.logprobs else 0  # bytes a token
        step = max(1, (limit_bytes - RECORD_BYTES) // (4 + width))
        records = [
            StreamRecord(
                attempt,
                choice,
                self.base + i,
                pack_tokens(self.tokens[i : min(i + step, self.sent)]),
                logprobs=bytes(self.logprobs[i * width : min(i + step, self.sent) * width]) if width else b"",
            )
            for i in range(start, max(self.sent, start + 1), step)
        ]
        if start == 0 and self.prompt_logprobs:
            records[0] = msgspec.structs.replace(records[0], prompt_logprobs=bytes(self.prompt_logprobs))
        if self.final_sent:
            records[-1] = msgspec.structs.replace(records[-1], finish=self.finish, totals=self.totals, error=self.error)
        return records


@dataclass(slots=True)
class _Entry:
    attempt: Attempt
    ingress: IngressId
    choices: list[_Choice]
    resend_at: float = 0.0
    backoff_s: float = RESEND_FIRST_S
    ended_at: float = 0.0

    @property
    def ended(self) -> bool:
        return all(c.final_sent for c in self.choices)


class StreamOutbox:
    """The tokens and finals of every attempt a decode worker has not been released from."""

    def __init__(self, worker: WorkerId, incarnation: Incarnation, max_bytes: int = MAX_MESSAGE_BYTES) -> None:
        self._worker = worker
        self._incarnation = incarnation
        self._max_bytes = max_bytes
        self._entries: dict[RequestId, _Entry] = {}
        self._dirty: dict[IngressId, dict[tuple[RequestId, int], None]] = {}
        self._numbers: dict[IngressId, int] = {}

    def __len__(self) -> int:
        return len(self._entries)

    # ------------------------------------------------------------------------------------------ what comes in

    def open(self, attempt: Attempt, ingress: IngressId, num_choices: int, base_seq: int) -> None:
        """Begin an attempt whose first new token has sequence number `base_seq`; replaces older ones."""
        self.drop_request(attempt.request_id)
        self._entries[attempt.request_id] = _Entry(attempt, ingress, [_Choice(base_seq) for _ in range(num_choices)])

    def restamp(self, attempt: Attempt, ingress: IngressId, from_seq: int) -> bool:
        """The held request goes on as `attempt`: the next frame holds what is there from `from_seq` on.

        Answers False, and changes nothing, when the tokens kept here do not reach from `from_seq` to the newest: the
        request is not held, or it came with tokens that the ingress lacks, or lacks tokens that the ingress has.
        """
        entry = self._entries.get(attempt.request_id)
        if entry is None or not all(c.base <= from_seq <= c.base + len(c.tokens) for c in entry.choices):
            return False
        self._clean(entry)
        entry.attempt, entry.ingress = attempt, ingress
        for number, choice in enumerate(entry.choices):
            choice.sent = from_seq - choice.base
            choice.final_sent = choice.settled
            if len(choice.tokens) > choice.sent or choice.finish:
                self._mark(entry, number)
        return True

    def tokens(self, attempt: Attempt, choice: int, token_ids: Sequence[int], logprobs: bytes = b"") -> None:
        """New output tokens, and their log-probabilities if the choice wants them, packed.

        Dropped when the attempt is not open or the choice has ended.
        """
        entry = self._get(attempt)
        if entry is not None and token_ids and not entry.choices[choice].finish:
            held = entry.choices[choice]
            held.tokens.extend(token_ids)
            held.logprobs += logprobs
            self._mark(entry, choice)

    def scored(self, attempt: Attempt, choice: int, logprobs: bytes) -> None:
        """More log-probabilities of the prompt's tokens, packed; they go out with the first output token."""
        entry = self._get(attempt)
        if entry is not None:
            entry.choices[choice].prompt_logprobs += logprobs

    def finish(
        self, attempt: Attempt, choice: int, finish: str, totals: Totals | None, error: ErrorInfo | None = None
    ) -> None:
        """The choice ended (stop | length | cancelled | error). The first end wins."""
        entry = self._get(attempt)
        if entry is None or entry.choices[choice].finish:
            return
        held = entry.choices[choice]
        held.finish, held.totals, held.error = finish, totals, error
        self._mark(entry, choice)

    def settle(self, attempt: Attempt, choice: int, finish: str, totals: Totals) -> None:
        """The ingress ended the choice itself and has its totals: no final is owed. With the last choice the attempt
        is forgotten."""
        entry = self._get(attempt)
        if entry is None:
            return
        held = entry.choices[choice]
        held.finish, held.totals, held.final_sent, held.settled = finish, totals, True, True
        if all(c.settled for c in entry.choices):
            self.drop_request(attempt.request_id)

    def holds(self, attempt: Attempt) -> bool:
        return self._get(attempt) is not None

    def generated(self, attempt: Attempt, choice: int) -> list[int]:
        """The choice's tokens of this worker so far; empty when not held."""
        entry = self._get(attempt)
        return list(entry.choices[choice].tokens) if entry is not None else []

    def finished(self, attempt: Attempt, choice: int) -> Totals | None:
        """Totals of a choice that has ended already; None while it runs or when it is not held."""
        entry = self._get(attempt)
        return entry.choices[choice].totals if entry is not None else None

    def acked(self, attempts: Iterable[Attempt]) -> list[Attempt]:
        """The ingress has the finals of these attempts (of all their choices). Returns those forgotten by it."""
        done = [a for a in attempts if (entry := self._get(a)) is not None and entry.ended]
        for attempt in done:
            self.drop_request(attempt.request_id)
        return done

    def drop(self, attempt: Attempt) -> None:
        """Forget an attempt, but not a newer one of its request."""
        if self._get(attempt) is not None:
            self.drop_request(attempt.request_id)

    def drop_request(self, request_id: RequestId) -> None:
        """Forget everything about a request: cancelled, finished by its ingress, or replaced."""
        entry = self._entries.pop(request_id, None)
        if entry is not None:
            self._clean(entry)

    # ------------------------------------------------------------------------------------------ what goes out

    def frames(self, now: float) -> list[tuple[IngressId, StreamFrame]]:
        """Frames with everything new since the last call. Call it once per engine step."""
        out: list[tuple[IngressId, StreamFrame]] = []
        dirty, self._dirty = self._dirty, {}
        for ingress, keys in dirty.items():
            records: list[StreamRecord] = []
            for request_id, number in keys:
                entry = self._entries[request_id]
                choice = entry.choices[number]
                if choice.settled:
                    continue
                start, choice.sent = choice.sent, len(choice.tokens)
                choice.final_sent = bool(choice.finish)
                records += choice.records(entry.attempt, number, start, self._max_bytes)
                if choice.final_sent:
                    entry.resend_at, entry.ended_at = now + entry.backoff_s, now
            out += [(ingress, frame) for frame in self._split(ingress, records)]
        return out

    def resends(self, now: float) -> list[tuple[IngressId, StreamFrame]]:
        """Finals whose acknowledgement is overdue, again; each time after a longer wait."""
        due: dict[IngressId, list[StreamRecord]] = {}
        for entry in tuple(self._entries.values()):
            if not entry.resend_at or not any(c.final_sent and not c.settled for c in entry.choices):
                continue  # nothing of it has ended, as of most
            if entry.ended and now - entry.ended_at >= FORGET_FINAL_S:
                self.drop_request(entry.attempt.request_id)
            elif now >= entry.resend_at:
                entry.backoff_s = min(RESEND_MAX_S, entry.backoff_s * 2)
                entry.resend_at = now + entry.backoff_s
                for number, choice in enumerate(entry.choices):
                    if choice.final_sent and not choice.settled:
                        due.setdefault(entry.ingress, []).extend(
                            choice.records(entry.attempt, number, choice.sent, self._max_bytes)
                        )
        return [(ingress, f) for ingress, records in due.items() for f in self._split(ingress, records)]

    def listings(self) -> list[tuple[IngressId, StreamFrame]]:
        """Once a second: per ingress, every attempt held with its next sequence numbers, which shows lost tails."""
        held: dict[IngressId, list[HeldAttempt]] = {}
        for entry in self._entries.values():
            item = HeldAttempt(entry.attempt, tuple(c.next_seq for c in entry.choices))
            held.setdefault(entry.ingress, []).append(item)
        out: list[tuple[IngressId, StreamFrame]] = []
        limit = max(1, self._max_bytes // RECORD_BYTES)
        for ingress, items in held.items():
            for i in range(0, len(items), limit):
                # Only a frame that lists everything may claim to be complete.
                complete = len(items) <= limit
                out.append((ingress, self._frame(ingress, held=tuple(items[i : i + limit]), listing=complete)))
        return out

    def replay(self, attempt: Attempt, choice: int, from_seq: int) -> StreamReplayed:
        """The choice's records from `from_seq` on, as far as they were sent."""
        entry = self._get(attempt)
        if entry is None or not 0 <= choice < len(entry.choices):
            return StreamReplayed(held=False)
        ring = entry.choices[choice]
        if from_seq < ring.base:
            # Tokens of earlier attempts were never here: only the ingress or their worker has them.
            return StreamReplayed(held=False)
        start = min(ring.sent, from_seq - ring.base)
        return StreamReplayed(held=True, records=tuple(ring.records(attempt, choice, start, self._max_bytes)))

    # ------------------------------------------------------------------------------------------ inside

    def _get(self, attempt: Attempt) -> _Entry | None:
        entry = self._entries.get(attempt.request_id)
        if entry is None or (entry.attempt is not attempt and entry.attempt != attempt):
            return None
        return entry

    def _mark(self, entry: _Entry, choice: int) -> None:
        self._dirty.setdefault(entry.ingress, {})[entry.attempt.request_id, choice] = None

    def _clean(self, entry: _Entry) -> None:
        keys = self._dirty.get(entry.ingress)
        if keys is not None:
            for number in range(len(entry.choices)):
                keys.pop((entry.attempt.request_id, number), None)
            if not keys:
                del self._dirty[entry.ingress]

    def _split(self, ingress: IngressId, records: list[StreamRecord]) -> list[StreamFrame]:
        frames: list[StreamFrame] = []
        part: list[StreamRecord] = []
        size = 0
        for record in records:
            cost = RECORD_BYTES + len(record.token_ids) + len(record.logprobs) + len(record.prompt_logprobs)
            if part and size + cost > self._max_bytes:
                frames.append(self._frame(ingress, records=tuple(part)))
                part, size = [], 0
            part.append(record)
            size += cost
        if part:
            frames.append(self._frame(ingress, records=tuple(part)))
        return frames

    def _frame(
        self,
        ingress: IngressId,
        records: tuple[StreamRecord, ...] = (),
        held: tuple[HeldAttempt, ...] = (),
        listing: bool = False,
    ) -> StreamFrame:
        number = self._numbers[ingress] = self._numbers.get(ingress, 0) + 1
        return StreamFrame(
            worker=self._worker,
            incarnation=self._incarnation,
            number=number,
            records=records,
            held=held,
            listing=listing,
        )
