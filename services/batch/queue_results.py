"""The desk where a tenant fetches the results of its queued lines, page by page. JSON both ways, for any NATS client.

{"after": cursor, "limit": n} → {"data": [line, …], "after": cursor, "has_more": bool, "pending": n}

A page ends at `limit` lines or at MAX_PAGE_BYTES, whichever comes first. Results stay, so any page may be asked for
again; `after` of the last page goes on from where that one ended, also when it was empty.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import msgspec

from services.batch.open_requests import OpenRequests
from services.batch.output_files import result_line
from services.batch.queue_store import QueueStore
from services.batch.records import QUEUE_BATCH
from shared.contracts.errors import InvalidInput
from shared.contracts.ids import TenantId

MAX_LIMIT = 1000
MAX_PAGE_BYTES = 4 * 1024 * 1024
STEP = 32
"""Results read from the store at once."""
MAX_AT_ONCE = 4
"""Questions of one tenant answered at the same time."""


class ResultsQuestion(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a tenant asks: up to `limit` results behind the cursor `after`; empty: from the oldest."""

    after: str = ""
    limit: int = 100


class ResultsPage(msgspec.Struct, frozen=True):
    """What it is answered. `pending`: lines without a result, those not yet taken from the stream included."""

    data: list[msgspec.Raw]
    after: str
    has_more: bool
    pending: int


class ResultsDesk:
    """Answers for all tenants.

    Args:
        untaken: how many of a tenant's lines still lie in its stream.
    """

    def __init__(self, queue: QueueStore, untaken: Callable[[TenantId], Awaitable[int]]) -> None:
        self._queue = queue
        self._untaken = untaken
        self._open = OpenRequests(MAX_AT_ONCE, MAX_AT_ONCE)

    async def answer(self, tenant: TenantId, payload: bytes) -> bytes:
        """The answer to one question. Raises InvalidInput naming the field, Overloaded, Unavailable."""
        question = read_question(payload)
        async with self._open.one(tenant):
            return msgspec.json.encode(await self._page(tenant, question))

    async def _page(self, tenant: TenantId, question: ResultsQuestion) -> ResultsPage:
        # In the order a line goes: one that moves on meanwhile is then counted twice rather than not at all.
        pending = await self._untaken(tenant) + await self._queue.waiting(tenant)
        lines: list[msgspec.Raw] = []
        after, size, more = question.after, 0, True
        while more and len(lines) < question.limit and size < MAX_PAGE_BYTES:
            found, more = await self._queue.results(tenant, after, min(STEP, question.limit - len(lines)))
            for result in found:
                line = result_line(QUEUE_BATCH, result.number, result.result)
                if lines and size + len(line) > MAX_PAGE_BYTES:
                    return ResultsPage(lines, after, True, pending)
                lines.append(msgspec.Raw(line))
                size += len(line)
                after = result.cursor
            if not found:
                break
        return ResultsPage(lines, after, more, pending)


def read_question(payload: bytes) -> ResultsQuestion:
    """The question in a payload; an empty one asks for the first page. Raises InvalidInput naming the field."""
    try:
        question = msgspec.json.decode(payload, type=ResultsQuestion) if payload.strip() else ResultsQuestion()
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        message = 'ask with {"after": cursor, "limit": n}, both optional: after a string, limit an integer'
        raise InvalidInput(message, param="payload") from None
    if not 1 <= question.limit <= MAX_LIMIT:
        raise InvalidInput(f"limit must be 1 to {MAX_LIMIT}", param="limit")
    return question
