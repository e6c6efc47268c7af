"""Several prompts of one request, each a session of its own: one answer, ended by the first that fails."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from functools import reduce
from operator import add

from shared.ingress.choice_output import Piece
from shared.ingress.completion_body import Usage
from shared.ingress.session import Session
from shared.text.stream_effects import End


class RequestGroup:
    """What an answer needs of sessions that belong together: their choices count on from prompt to prompt.

    Args:
        sessions: of one client request, in the order of its prompts; at least one.
        news: set by each of them when it has something to tell.
    """

    def __init__(self, sessions: Sequence[Session], news: asyncio.Event) -> None:
        self._sessions = tuple(sessions)
        self._news = news
        self._failed: End | None = None
        first = sessions[0]
        self.plan = first.plan
        self.model = first.model
        self.request_id = first.request_id
        self.created = first.created
        self.klass = first.klass
        self.aborted = asyncio.Event()
        for session in sessions:  # too slow for one is too slow for all
            if session.aborted.is_set():
                self.aborted.set()
            session.aborted = self.aborted

    @property
    def num_choices(self) -> int:
        """Outputs over all prompts."""
        return sum(session.num_choices for session in self._sessions)

    @property
    def end(self) -> End | None:
        """How it ended for the client: with the first error, or when all have ended."""
        ends = [session.end for session in self._sessions]
        if self._failed is None:  # the first to fail: it ends the others, whose errors say only that
            self._failed = next((end for end in ends if end is not None and end.error is not None), None)
        if self._failed is not None:
            return self._failed
        return None if None in ends else ends[0]

    def usage(self) -> Usage:
        """Token counts so far, of all prompts."""
        return reduce(add, (session.usage() for session in self._sessions))

    def timings(self) -> dict[str, float]:
        """As of the prompt that ended last."""
        return max((session.timings() for session in self._sessions), key=lambda found: found["total_ms"])

    async def wait(self) -> None:
        """As `Session.wait`."""
        await self._news.wait()

    def take(self) -> list[Piece]:
        """As `Session.take`; when one session failed the others are cancelled."""
        pieces: list[Piece] = []
        before = 0
        for session in self._sessions:
            pieces += [replace(piece, choice=before + piece.choice) for piece in session.take()]
            before += session.num_choices
        if self.end is not None:
            self.cancel("another_prompt_failed")
            self._news.set()
        return pieces

    def sent(self, num_bytes: int) -> None:
        """Count bytes given to the client's connection."""
        self._sessions[0].sent(num_bytes)

    def cancel(self, reason: str) -> None:
        """End what still runs."""
        for session in self._sessions:
            session.cancel(reason)
