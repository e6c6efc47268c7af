"""The answer of a session that nobody reads piece by piece."""

from __future__ import annotations

from typing import Any

from shared.ingress.completion_body import Choice, whole_body
from shared.ingress.session import Session


async def whole_answer(session: Session) -> dict[str, Any]:
    """The body of a session's answer, once it has ended. Raises the error it ended with."""
    texts: list[str] = []
    finish = ""
    while True:
        await session.wait()
        text, reason = session.take()
        texts.append(text)
        finish = reason or finish
        if session.end is not None:
            break
    if session.end.error is not None:
        raise session.end.error
    plan = session.plan
    choices = [Choice("".join(texts), finish)]
    return whole_body(plan.kind, session.request_id, plan.model, session.created, choices, session.usage())
