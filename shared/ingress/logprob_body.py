"""Log-probabilities in the two forms of OpenAI's answers. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from shared.ingress.choice_output import ScoredToken

FLOOR = -9999.0
"""Stands for minus infinity and what is near it: JSON has no infinities."""

TokenBytes = Callable[[int], bytes]
FormLogprobs = Callable[[Sequence[ScoredToken]], dict[str, Any]]


def chat_logprobs(tokens: Sequence[ScoredToken], token_bytes: TokenBytes) -> dict[str, Any]:
    """Of a chat choice: every token with its text, its bytes and those most likely at its place."""
    return {"content": [_chat_token(token, token_bytes) for token in tokens], "refusal": None}


def completion_logprobs(tokens: Sequence[ScoredToken], token_bytes: TokenBytes) -> dict[str, Any]:
    """Of a completion choice: four lists. The token itself is among its `top_logprobs`; a prompt's first has null."""
    return {
        "tokens": [token_name(token_bytes(token.token_id)) for token in tokens],
        "token_logprobs": [None if token.logprob is None else _finite(token.logprob.logprob) for token in tokens],
        "top_logprobs": [_named(token, token_bytes) for token in tokens],
        "text_offset": [token.offset for token in tokens],
    }


def token_name(raw: bytes) -> str:
    """A token's text; bytes that are no text by themselves as `bytes:\\xf0\\x9f`, so that no two look alike."""
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def _chat_token(token: ScoredToken, token_bytes: TokenBytes) -> dict[str, Any]:
    assert token.logprob is not None
    own = _chat_entry(token_bytes(token.token_id), token.logprob.logprob)
    return own | {"top_logprobs": [_chat_entry(token_bytes(i), value) for i, value in token.logprob.top]}


def _chat_entry(raw: bytes, logprob: float) -> dict[str, Any]:
    return {"token": raw.decode("utf-8", "replace"), "logprob": _finite(logprob), "bytes": list(raw)}


def _named(token: ScoredToken, token_bytes: TokenBytes) -> dict[str, float] | None:
    if token.logprob is None:
        return None
    named = {token_name(token_bytes(i)): _finite(value) for i, value in token.logprob.top}
    return {token_name(token_bytes(token.token_id)): _finite(token.logprob.logprob)} | named


def _finite(logprob: float) -> float:
    # a float32's digits, and no more
    return max(FLOOR, min(0.0, round(logprob, 6)))
