"""Streamed text equals decoding the whole byte string, for any bytes and any split."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from shared.text.detokenizer import Detokenizer

# token bytes that cut code points anywhere, next to valid text, lone continuation bytes, surrogates and overlong forms
PIECES = st.one_of(
    st.binary(max_size=4),
    st.text(max_size=3).map(lambda s: s.encode()),
    st.sampled_from([b"\xf0", b"\x9f", b"\x98", b"\x80", b"\xed\xa0\x80", b"\xc0\xaf", b"\xf4\x90", b"\xe2\x80", b""]),
)


def stream(vocabulary: list[bytes], calls: list[list[int]]) -> list[str]:
    detokenizer = Detokenizer(vocabulary.__getitem__)
    return [detokenizer.push(ids) for ids in calls] + [detokenizer.flush()]


@settings(max_examples=300, deadline=None)
@given(st.lists(PIECES, max_size=30), st.data())
def test_any_split_gives_the_whole_text(tokens: list[bytes], data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.integers(0, 4), max_size=len(tokens)))
    calls, at = [], 0
    for size in sizes:
        calls.append(list(range(at, min(at + size, len(tokens)))))
        at = min(at + size, len(tokens))
    calls.append(list(range(at, len(tokens))))
    assert "".join(stream(tokens, calls)) == b"".join(tokens).decode("utf-8", "replace")


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=40))
def test_valid_text_byte_by_byte_shows_only_whole_code_points(text: str) -> None:
    data = [bytes([b]) for b in text.encode()]
    pieces = stream(data, [[i] for i in range(len(data))])
    assert "".join(pieces) == text
    assert all(len(piece) <= 1 for piece in pieces)
    assert pieces[-1] == ""


def test_an_emoji_is_held_until_its_last_byte() -> None:
    detokenizer = Detokenizer([b"\xf0", b"\x9f", b"\x98", b"\x80"].__getitem__)
    assert [detokenizer.push([i]) for i in range(4)] == ["", "", "", "😀"]
    assert detokenizer.flush() == ""


def test_an_unfinished_code_point_ends_as_one_replacement() -> None:
    assert stream([b"a\xf0\x9f", b"\x98"], [[0], [1]]) == ["a", "", "\ufffd"]


def test_a_token_without_text_changes_nothing() -> None:
    assert stream([b"\xe2\x82", b"", b"\xac"], [[0], [1], [2]]) == ["", "", "€", ""]
