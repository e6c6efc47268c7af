"""Drafts out of a text: the longest match counts, however the text came, and nothing is found that is not there."""

from __future__ import annotations

import itertools
import random

import pytest

from shared.engine.prompt_lookup import GRAM, MOST_MATCH, Found, PromptLookup

EVERYTHING = 10**9


def find(text: list[int], most: int = 4) -> Found | None:
    lookup = PromptLookup()
    assert lookup.read(text, EVERYTHING)
    return lookup.find(most)


def test_what_followed_the_last_tokens_before_is_found() -> None:
    assert find([1, 2, 3, 4, 5, 6, 9, 2, 3, 4]) == Found((5, 6, 9, 2), 3)
    assert find([1, 2, 3, 4, 5, 6, 9, 2, 3, 4], most=1) == Found((5,), 3)


def test_the_longest_match_wins_and_the_latest_of_equals() -> None:
    long_first = [7, 1, 2, 3, 50, 9, 1, 2, 3, 60, 7, 1, 2, 3]
    assert find(long_first, 1) == Found((50,), 4)
    equals = [5, 1, 2, 3, 50, 6, 1, 2, 3, 60, 7, 1, 2, 3]
    assert find(equals, 1) == Found((60,), 3)


@pytest.mark.parametrize("period", [1, 2, 5])
def test_a_text_that_repeats_itself_goes_on_so(period: int) -> None:
    text = [10 + i % period for i in range(40)]
    found = find(text, 12)
    assert found is not None
    assert found.token_ids == tuple(10 + i % period for i in range(40, 52))


@pytest.mark.parametrize("text", [[], [1], [1, 1], [1, 2, 3], [1, 2, 1, 2], [1, 2, 3, 4, 1, 2]])
def test_too_short_a_match_is_none(text: list[int]) -> None:
    assert find(text) is None


def test_nothing_is_drafted_where_nothing_is_wanted() -> None:
    assert find([1, 2, 3, 4, 1, 2, 3], 0) is None


def test_tokens_beyond_the_keys_bits_are_not_taken_for_others() -> None:
    big = 1 << 21
    assert find([big + 1, big + 2, big + 3, 4, 1, 2, 3]) is None


def test_it_finds_what_a_search_by_hand_finds_however_the_text_came() -> None:
    rng = random.Random(1)
    for _ in range(200):
        text = [rng.randrange(4) for _ in range(rng.randrange(60))]
        lookup = PromptLookup()
        while not lookup.read(text, 1 + rng.randrange(7)):
            pass
        found, matches = lookup.find(3), by_hand(text)
        assert (found is None) == (not matches)
        if found is not None:
            # the latest places are looked at: among these nothing is longer
            assert found.match == max(match for match, _ in matches[:8])
            place = next(place for match, place in matches[:8] if match == found.match)
            onward = list(itertools.islice(itertools.cycle(text[place + 1 :]), 3))
            assert list(found.token_ids) == onward


def test_a_prediction_is_drafted_from_its_beginning_on() -> None:
    prediction = [20, 21, 22, 23, 24, 25]
    lookup = PromptLookup(prediction)
    text = [1, 2, 3, 4, 5]
    for output in ([], [20], [20, 21], [20, 21, 22]):
        while not lookup.read(text + output, 2):
            pass
        found = lookup.find(2, len(output))
        assert found is not None
        assert found.token_ids == tuple(prediction[len(output) : len(output) + 2])
        assert found.predicted


def test_an_output_that_leaves_its_prediction_comes_back_to_it() -> None:
    prediction = [20, 21, 22, 23, 24, 25]
    for output, wanted in (([20, 9], None), ([20, 9, 22, 23], None), ([9, 22, 23, 24], (25,)), ([9, 23, 24, 25], None)):
        lookup = PromptLookup(prediction)
        assert lookup.read([1, 2, 3, *output], EVERYTHING)
        found = lookup.find(4, len(output))
        assert (found.token_ids if found else None) == wanted, "a prediction ends where it ends"


def test_the_longer_match_wins_over_a_prediction() -> None:
    lookup = PromptLookup([1, 2, 3, 99])
    assert lookup.read([7, 1, 2, 3, 50, 7, 1, 2, 3], EVERYTHING)
    assert lookup.find(1, 9) == Found((50,), 4)


def by_hand(text: list[int]) -> list[tuple[int, int]]:
    """(tokens alike, position of the last of them) of every earlier place, the latest first."""
    found = []
    for place in range(len(text) - 2, GRAM - 2, -1):
        match = 0
        while match < MOST_MATCH and match <= place and text[place - match] == text[len(text) - 1 - match]:
            match += 1
        if match >= GRAM:
            found.append((match, place))
    return found
