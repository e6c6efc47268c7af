"""What a client sees of a choice: text, its tokens' scores with the last of their text, an echo before both."""

from __future__ import annotations

from typing import Any

import pytest

from shared.contracts.errors import ProtocolError
from shared.contracts.logprobs import TokenLogprob, cut_logprobs, pack_logprobs, unpack_logprobs
from shared.ingress.choice_output import ChoiceOutput, Piece, make_echo
from shared.ingress.choice_text import ChoiceText
from shared.ingress.logprob_body import FLOOR, chat_logprobs, completion_logprobs
from tests.tiny_tokenizer import tiny_tokenizer

TOKENIZER = tiny_tokenizer()


def output(stops: tuple[str, ...] = (), *, echo: bool = False, **text: Any) -> ChoiceOutput:
    return ChoiceOutput(0, ChoiceText(TOKENIZER.token_bytes, stops, keep_ends=True, **text), echo=echo)


def push(found: ChoiceOutput, text: str) -> list[Piece]:
    """Every token by itself, as steps give them."""
    pieces: list[Piece] = []
    for token_id in TOKENIZER.encode(text):
        kept = found.text.push([token_id])
        found.score([token_id], [TokenLogprob(-float(token_id))])
        found.collect()
        pieces += [piece] if (piece := found.take()) is not None else []
        if kept is not None:
            break
    return pieces


def end(found: ChoiceOutput, finish: str = "stop") -> Piece:
    found.text.finish()
    found.collect()
    found.end(finish)
    piece = found.take()
    assert piece is not None
    assert found.take() is None
    return piece


def ids(pieces: list[Piece]) -> list[int]:
    return [token.token_id for piece in pieces for token in piece.tokens]


def test_scores_come_with_the_last_of_their_text() -> None:
    found = output()
    pieces = push(found, "aď龜")  # one, two and three bytes, a token each
    assert [(piece.text, len(piece.tokens)) for piece in pieces] == [("a", 1), ("ď", 2), ("龜", 3)]
    assert [token.offset for piece in pieces for token in piece.tokens] == [0, 1, 1, 2, 2, 2]
    assert end(found) == Piece(0, "", "stop")


def test_a_held_stop_string_is_not_told_by_its_scores() -> None:
    found = output(("stop",))
    pieces = push(found, "a sto")
    assert "".join(piece.text for piece in pieces) == "a "
    assert ids(pieces) == TOKENIZER.encode("a ")
    pieces += push(found, "p and more")
    last = end(found)
    assert "".join(piece.text for piece in [*pieces, last]) == "a "
    # every token that is billed has a score
    assert ids([*pieces, last]) == TOKENIZER.encode("a stop")


def test_what_only_looked_like_a_stop_comes_with_its_scores() -> None:
    found = output(("stop",))
    pieces = [*push(found, "a sto"), end(found, "length")]
    assert ("".join(piece.text for piece in pieces), pieces[-1].finish) == ("a sto", "length")
    assert ids(pieces) == TOKENIZER.encode("a sto")


def test_a_stop_string_may_stay_and_counts_behind_the_least_tokens_only() -> None:
    kept = output(("b",), keep_stop=True)
    assert "".join(piece.text for piece in [*push(kept, "abc"), end(kept)]) == "ab"
    late = output(("b",), min_tokens=3)
    assert "".join(piece.text for piece in [*push(late, "abbcb"), end(late)]) == "abbc"


def test_an_echo_stands_before_text_and_scores() -> None:
    prompt = TOKENIZER.encode("ď?")
    found = output(echo=True)
    assert push(found, "x") == []  # nothing before the prompt is scored
    found.begin(make_echo(prompt, "ď?", [None, TokenLogprob(-1.0), TokenLogprob(-2.0)], TOKENIZER))
    piece = found.take()
    assert piece is not None
    assert piece.text == "ď?x"
    assert ids([piece]) == [*prompt, *TOKENIZER.encode("x")]
    assert [token.offset for token in piece.tokens] == [0, 0, 1, 2]
    assert [token.logprob for token in piece.tokens][:2] == [None, TokenLogprob(-1.0)]


def test_bodies_hold_no_infinity_and_name_bytes() -> None:
    found = output()
    tokens = [token for piece in push(found, "a") for token in piece.tokens]
    half = TOKENIZER.encode("ď")[0]
    scored = [tokens[0]._replace(logprob=TokenLogprob(float("-inf"), ((half, -0.5), (tokens[0].token_id, -1e9))))]
    body = completion_logprobs(scored, TOKENIZER.token_bytes)
    assert body["token_logprobs"] == [FLOOR]
    assert body["top_logprobs"] == [{"a": FLOOR, "bytes:\\xc4": -0.5}]
    chat = chat_logprobs(scored, TOKENIZER.token_bytes)["content"][0]
    assert (chat["token"], chat["logprob"], chat["bytes"]) == ("a", FLOOR, [97])
    assert chat["top_logprobs"][0]["token"] == "�"
    first = completion_logprobs([tokens[0]._replace(logprob=None)], TOKENIZER.token_bytes)
    assert (first["token_logprobs"], first["top_logprobs"]) == ([None], [None])


@pytest.mark.parametrize("top", [0, 1, 5])
def test_packed_scores_come_back(top: int) -> None:
    entries = [TokenLogprob(-0.5 * i, tuple((i + j, -1.0 * j) for j in range(min(top, i)))) for i in range(4)]
    data = pack_logprobs(entries, top)
    assert unpack_logprobs(data, 4) == entries
    assert unpack_logprobs(cut_logprobs(data, 4, 1, 3), 2) == entries[1:3]
    assert unpack_logprobs(b"", 3) == []
    for count in (3, 5, 0):
        with pytest.raises(ProtocolError):
            unpack_logprobs(data, count)
