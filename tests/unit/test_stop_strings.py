"""The streaming matcher against a search of the whole text."""

from __future__ import annotations

import time
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.contracts.errors import InvalidInput
from shared.text.stop_strings import StopMatch, StopStrings

# few letters, so that prefixes, overlaps and repeats are common; two outside the basic plane or combining
ALPHABET = st.text(st.sampled_from("abé😀\u0301"), max_size=4)
STOPS = st.lists(ALPHABET.filter(bool), max_size=4)


def oracle(deltas: list[str], stops: list[str]) -> tuple[str, StopMatch | None]:
    """Text before the match and the match, by looking at every prefix of the whole text."""
    text = "".join(deltas)
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            stop = max(found, key=len)
            seen = 0
            for index, delta in enumerate(deltas):
                seen += len(delta)
                if seen >= end:
                    return text[: end - len(stop)], StopMatch(stop, index + 1)
    return text, None


def longest_held(text: str, stops: list[str]) -> int:
    """Length of the longest suffix of `text` that is a proper prefix of a stop string."""
    return max(
        (k for stop in stops for k in range(len(stop)) if text.endswith(stop[:k])),
        default=0,
    )


@settings(max_examples=500, deadline=None)
@given(st.lists(ALPHABET, max_size=12), STOPS)
def test_matches_the_whole_string_oracle(deltas: list[str], stops: list[str]) -> None:
    matcher = StopStrings(stops)
    sent, pushed = "", ""
    for index, delta in enumerate(deltas):
        sent += matcher.push(index, delta)
        pushed += delta
        if matcher.match is None:
            assert sent == pushed[: len(pushed) - longest_held(pushed, stops)]
    sent += matcher.flush()
    assert (sent, matcher.match) == oracle(deltas, stops)


@settings(max_examples=200, deadline=None)
@given(st.text(st.sampled_from("ab"), max_size=20), STOPS, st.data())
def test_the_text_does_not_depend_on_the_split(text: str, stops: list[str], data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=5)))
    parts = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]

    def run(deltas: list[str]) -> tuple[str, str | None]:
        matcher = StopStrings(stops)
        sent = "".join(matcher.push(i, d) for i, d in enumerate(deltas)) + matcher.flush()
        return sent, matcher.match.stop if matcher.match else None

    assert run(parts) == run(list(text)) == run([text])


def pushes(stops: list[str], deltas: list[str]) -> tuple[list[str], StopMatch | None]:
    matcher = StopStrings(stops)
    return [matcher.push(i, d) for i, d in enumerate(deltas)] + [matcher.flush()], matcher.match


@pytest.mark.parametrize(
    ("stops", "deltas", "pieces", "match"),
    [
        (["END"], ["a E", "N", "D b"], ["a ", "", "", ""], StopMatch("END", 3)),
        (["END"], ["a E", "N", "X"], ["a ", "", "ENX", ""], None),
        (["END"], ["a EN"], ["a ", "EN"], None),
        (["abcd", "bc"], ["abcd"], ["a", ""], StopMatch("bc", 1)),
        (["bc", "abc"], ["xabc"], ["x", ""], StopMatch("abc", 1)),
        (["aab"], ["a", "a", "a", "b"], ["", "", "a", "", ""], StopMatch("aab", 4)),
        (["x"], ["", "", "yx"], ["", "", "y", ""], StopMatch("x", 3)),
        (["\n\n"], ["a\n", "\nb"], ["a", "", ""], StopMatch("\n\n", 2)),
        ([], ["abc"], ["abc", ""], None),
        (["x"], ["x", "y"], ["", "", ""], StopMatch("x", 1)),
    ],
)
def test_examples(stops: list[str], deltas: list[str], pieces: list[str], match: StopMatch | None) -> None:
    assert pushes(stops, deltas) == (pieces, match)


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(InvalidInput) as caught:
        StopStrings(["a", ""])
    assert caught.value.param == "stop"


def test_cost_is_linear_in_the_text() -> None:
    """The worst case of a naive search: a long stop string of one letter, fed a letter at a time, never complete."""
    matcher = StopStrings(["a" * 50_000 + "b"])
    started = time.perf_counter()
    for index in range(100_000):
        matcher.push(index, "a")
    matcher.push(100_000, "c")
    assert matcher.match is None
    assert time.perf_counter() - started < 3.0


def test_outputs_with_the_same_stop_strings_share_what_is_large() -> None:
    stops = [f"{i:04d}" * 256 for i in range(4)]
    StopStrings(stops)
    tracemalloc.start()
    try:
        kept = [StopStrings(stops) for _ in range(128)]
        grown, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert grown < 1_000_000
    assert kept[0].push(0, "x" + stops[0]) == "x"
    assert kept[1].match is None
    assert kept[1].push(0, "y") == "y"
