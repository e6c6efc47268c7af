"""Several prompts answered as one: what the client is told when one of them fails."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from shared.contracts.errors import Cancelled, Overloaded
from shared.ingress.answer import whole_answer
from shared.ingress.request_group import RequestGroup
from shared.ingress.session import Session
from shared.text.stream_effects import End


class _Session:
    """As much of a session as a group looks at."""

    plan = model = None
    request_id, created, klass, num_choices = "req-1", 0, "", 1

    def __init__(self) -> None:
        self.end: End | None = None
        self.aborted = asyncio.Event()

    def take(self) -> list[Any]:
        return []

    def cancel(self, reason: str) -> None:
        self.end = self.end or End("cancelled", Cancelled(f"request cancelled: {reason}"))


async def test_the_error_is_that_of_the_prompt_that_failed() -> None:
    sessions, news = [_Session() for _ in range(3)], asyncio.Event()
    group = RequestGroup(cast(list[Session], sessions), news)
    sessions[1].end = End("error", Overloaded("no room", retry_after_s=1.0))
    news.set()
    with pytest.raises(Overloaded, match="no room"):
        await whole_answer(group)
    assert all(session.end is not None for session in sessions)
    assert isinstance(group.end and group.end.error, Overloaded)
