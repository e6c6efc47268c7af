"""The answer of a request that nobody reads piece by piece."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import Any

from shared.ingress.choice_output import Piece
from shared.ingress.completion_body import Call, Choice, call_id, whole_body
from shared.ingress.logprob_body import FormLogprobs, chat_logprobs, completion_logprobs
from shared.ingress.request_group import RequestGroup
from shared.ingress.session import Session
from shared.tools.tool_stream import CallArguments, CallStart

MANY_SCORES = 2000
"""Scored tokens whose form takes some ten milliseconds; what has more is formed beside the event loop."""

Answered = Session | RequestGroup


async def whole_pieces(answered: Answered) -> list[list[Piece]]:
    """What came of each choice, once the request has ended. Raises the error it ended with."""
    pieces: list[list[Piece]] = [[] for _ in range(answered.num_choices)]
    while True:
        await answered.wait()
        for piece in answered.take():
            pieces[piece.choice].append(piece)
        if answered.end is not None:
            break
    if answered.end.error is not None:
        raise answered.end.error
    return pieces


async def whole_answer(answered: Answered) -> dict[str, Any]:
    """The body of a request's answer, once it has ended. Raises the error it ended with."""
    pieces = await whole_pieces(answered)
    plan = answered.plan
    make = partial(_choices, pieces, logprobs_of(answered), answered.request_id)
    scores = sum(len(piece.tokens) for parts in pieces for piece in parts)
    choices = await asyncio.to_thread(make) if scores > MANY_SCORES else make()
    extra = told_tier(answered) | ({"timings": answered.timings()} if plan.timings else {})
    return whole_body(plan.kind, answered.request_id, plan.model, answered.created, choices, answered.usage(), extra)


def logprobs_of(answered: Answered) -> FormLogprobs | None:
    """How the answer writes log-probabilities; None when none were asked for."""
    plan = answered.plan
    if plan.sampling.logprobs < 0:
        return None
    form = chat_logprobs if plan.kind == "chat" else completion_logprobs
    return partial(form, token_bytes=partial(answered.model.codec.tokenizer.token_bytes, skip_special=False))


def told_tier(answered: Answered) -> dict[str, str]:
    """The service tier that served the request, if it named one."""
    if not answered.plan.tier:
        return {}
    asked, urgent = answered.plan.tier == "priority", answered.klass == "interactive"
    return {"service_tier": ("priority" if asked else "default") if urgent else "flex"}


def _choices(pieces: Sequence[list[Piece]], form: FormLogprobs | None, request_id: str) -> list[Choice]:
    return [_choice(parts, form, request_id) for parts in pieces]


def _choice(parts: list[Piece], form: FormLogprobs | None, request_id: str) -> Choice:
    tokens = [token for part in parts for token in part.tokens]
    text, finish = "".join(part.text for part in parts), parts[-1].finish
    return Choice(
        text,
        finish,
        None if form is None else form(tokens),
        "".join(part.thoughts for part in parts),
        _calls(parts, request_id),
    )


def _calls(parts: list[Piece], request_id: str) -> tuple[Call, ...]:
    news = [piece for part in parts for piece in part.calls]
    names = {piece.index: piece.name for piece in news if isinstance(piece, CallStart)}
    return tuple(
        Call(
            call_id(request_id, parts[0].choice, index),
            name,
            "".join(piece.text for piece in news if isinstance(piece, CallArguments) and piece.index == index),
        )
        for index, name in names.items()
    )
