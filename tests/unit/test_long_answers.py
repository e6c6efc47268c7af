"""Answers with many log-probabilities are formed while the event loop goes on."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace
from typing import Any, cast

from services.gateway.answers import SessionResponse
from shared.contracts.logprobs import TokenLogprob
from shared.ingress.answer import MANY_SCORES, Answered, whole_answer
from shared.ingress.choice_output import Piece, ScoredToken
from shared.ingress.completion_body import Usage
from shared.text.stream_effects import End

CHOICES = 3


class _Session:
    """An answer that has ended, with so many scored tokens a choice."""

    def __init__(self, scores: int) -> None:
        self.turns: list[int] = []  # what `turn` was as tokens were formed
        self.threads: set[int] = set()
        self.turn = 0
        self.num_choices, self.request_id, self.created, self.klass = CHOICES, "req-1", 0, "interactive"
        sampling = SimpleNamespace(logprobs=0)
        self.plan = SimpleNamespace(
            kind="completions",
            model="m",
            sampling=sampling,
            tier="",
            timings=False,
            include_usage=False,
            running_usage=False,
            stream=True,
        )
        tokenizer = SimpleNamespace(token_bytes=self._token_bytes)
        self.model = SimpleNamespace(codec=SimpleNamespace(tokenizer=tokenizer))
        self.end = End("stop")
        self.aborted = asyncio.Event()
        tokens = [ScoredToken(1, 0, TokenLogprob(-1.0))] * scores
        self._pieces = [Piece(i, "x", "stop", tokens) for i in range(CHOICES)]

    def _token_bytes(self, token_id: int, skip_special: bool = True) -> bytes:
        self.threads.add(threading.get_ident())
        self.turns.append(self.turn)
        return b"x"

    async def wait(self) -> None:
        pass

    def take(self) -> list[Piece]:
        pieces, self._pieces = self._pieces, []
        return pieces

    def usage(self) -> Usage:
        return Usage(1, 1)

    def sent(self, num_bytes: int) -> None:
        pass

    def cancel(self, reason: str) -> None:
        pass


async def test_a_long_whole_answer_is_formed_beside_the_event_loop() -> None:
    long, short = _Session(MANY_SCORES), _Session(1)
    body = await whole_answer(cast(Answered, long))
    assert [len(choice["logprobs"]["tokens"]) for choice in body["choices"]] == [MANY_SCORES] * CHOICES
    assert threading.get_ident() not in long.threads
    await whole_answer(cast(Answered, short))
    assert short.threads == {threading.get_ident()}


async def test_others_have_their_turn_between_the_choices_of_a_stream() -> None:
    session = _Session(MANY_SCORES + 1)

    async def others() -> None:
        while True:
            session.turn += 1
            await asyncio.sleep(0)

    async def receive() -> Any:
        await asyncio.Event().wait()

    async def send(message: Any) -> None:
        pass

    other = asyncio.create_task(others())
    await SessionResponse(cast(Answered, session), {})({"type": "http"}, receive, send)
    other.cancel()
    assert len(set(session.turns)) == CHOICES
