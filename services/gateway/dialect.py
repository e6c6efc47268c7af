"""The ways in which a session's answer is written: one for each API. What is answered is the same."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from services.gateway.chunks import ChunkWriter, error_frame
from shared.contracts.errors import BatonError, InvalidInput
from shared.ingress import messages_request
from shared.ingress.answer import Answered, logprobs_of, told_tier, whole_answer, whole_pieces
from shared.ingress.choice_output import Piece
from shared.ingress.messages_body import MessageWriter
from shared.ingress.responses_body import Event, ResponseWriter
from shared.ingress.responses_request import named_here
from shared.ingress.responses_schema import InputItem, ResponsesRequest
from shared.text.line_ends import in_lines

_encode = msgspec.json.encode


class Writer(Protocol):
    """The bytes of one stream."""

    def begin(self) -> bytes:
        """What comes before anything was made."""

    def piece(self, piece: Piece) -> bytes:
        """What came of a choice."""

    def end(self) -> bytes:
        """The end of a session that ended well."""

    def failed(self, error: BatonError) -> bytes:
        """The end of one that did not."""


class Dialect(Protocol):
    """One API's way."""

    def writer(self, answered: Answered) -> Writer:
        """Of a stream."""

    async def whole(self, answered: Answered) -> dict[str, Any]:
        """The body of an answer that is not streamed. Raises the error the session ended with."""

    def named(self, error: InvalidInput) -> InvalidInput:
        """The error with its field's name in this API."""


class ChunkDialect:
    """Of chat completions and completions."""

    def writer(self, answered: Answered) -> Writer:
        """Of a stream."""
        return _Chunks(answered)

    async def whole(self, answered: Answered) -> dict[str, Any]:
        """The body of an answer that is not streamed. Raises the error the session ended with."""
        return await whole_answer(answered)

    def named(self, error: InvalidInput) -> InvalidInput:
        """As it is."""
        return error


CHUNKS = ChunkDialect()


class _Chunks:
    def __init__(self, answered: Answered) -> None:
        plan = answered.plan
        self._answered = answered
        self._writer = ChunkWriter(
            plan.kind,
            answered.request_id,
            plan.model,
            answered.created,
            plan.include_usage,
            logprobs_of(answered),
            told_tier(answered),
            answered.usage if plan.running_usage else None,
        )

    def begin(self) -> bytes:
        return b"".join(map(self._writer.role, range(self._answered.num_choices)))

    def piece(self, piece: Piece) -> bytes:
        return in_lines(self._writer.piece(piece))

    def end(self) -> bytes:
        timings = {"timings": self._answered.timings()} if self._answered.plan.timings else {}
        return self._writer.end(self._answered.usage(), timings)

    def failed(self, error: BatonError) -> bytes:
        return error_frame(error)


@dataclass(frozen=True, slots=True)
class ResponsesDialect:
    """Of the Responses API; `asked` is what the response repeats, `items` its input."""

    asked: ResponsesRequest
    items: tuple[InputItem, ...] = ()

    def writer(self, answered: Answered) -> Writer:
        """Of a stream."""
        return _Events(answered, self._response(answered))

    async def whole(self, answered: Answered) -> dict[str, Any]:
        """The response, once it has ended. Raises the error the session ended with."""
        response = self._response(answered)
        for piece in (await whole_pieces(answered))[0]:
            response.piece(piece)
        found: dict[str, Any] = response.end(answered.usage())["response"]
        return found

    def named(self, error: InvalidInput) -> InvalidInput:
        """The error with its field's name in this API."""
        return named_here(error)

    def _response(self, answered: Answered) -> ResponseWriter:
        tier = told_tier(answered).get("service_tier", "")
        return ResponseWriter(self.asked, answered.plan, answered.request_id, answered.created, tier)


class _Events:
    def __init__(self, answered: Answered, response: ResponseWriter) -> None:
        self._answered = answered
        self._response = response

    def begin(self) -> bytes:
        return frames(self._response.begin())

    def piece(self, piece: Piece) -> bytes:
        return frames(self._response.piece(piece))

    def end(self) -> bytes:
        return frames([self._response.end(self._answered.usage())])

    def failed(self, error: BatonError) -> bytes:
        return frames(self._response.failed(error))


class MessagesDialect:
    """Of Anthropic's Messages API. Errors get its form in `messages_front`."""

    def writer(self, answered: Answered) -> Writer:
        """Of a stream."""
        return _MessageEvents(answered)

    async def whole(self, answered: Answered) -> dict[str, Any]:
        """The message, once it has ended. Raises the error the session ended with."""
        message = _message(answered)
        for piece in (await whole_pieces(answered))[0]:
            message.piece(piece)
        return message.whole(answered.usage())

    def named(self, error: InvalidInput) -> InvalidInput:
        """The error with its field's name in this API."""
        return messages_request.named_here(error)


MESSAGES = MessagesDialect()


def _message(answered: Answered) -> MessageWriter:
    return MessageWriter(answered.request_id, answered.plan.model, len(answered.plan.prompt))


class _MessageEvents:
    def __init__(self, answered: Answered) -> None:
        self._answered = answered
        self._message = _message(answered)

    def begin(self) -> bytes:
        return frames(self._message.begin())

    def piece(self, piece: Piece) -> bytes:
        return frames(self._message.piece(piece))

    def end(self) -> bytes:
        return frames(self._message.end(self._answered.usage()))

    def failed(self, error: BatonError) -> bytes:
        return error_frame(error)


def frames(events: Iterable[Event]) -> bytes:
    """Events with their names, as they are sent."""
    return b"".join(b"event: %s\ndata: %s\n\n" % (event["type"].encode(), in_lines(_encode(event))) for event in events)
