"""The tree of texts finds what their list, the longest first, finds."""

from __future__ import annotations

import re

from hypothesis import given, settings
from hypothesis import strategies as st

from shared.text.alternatives import MAX_DEPTH, longest_of

TEXTS = st.text(st.sampled_from("ab<| [\n"), max_size=6)


@settings(max_examples=300, deadline=None)
@given(st.lists(TEXTS, max_size=12), st.sets(st.integers(0, 11)), st.text(st.sampled_from("ab<| [\n"), max_size=40))
def test_the_longest_text_is_found(texts: list[str], marked: set[int], text: str) -> None:
    ends = {one: r"(?!a)" for i, one in enumerate(texts) if i in marked and one}
    listed = sorted({one for one in texts if one}, key=len, reverse=True)
    plain = "|".join(re.escape(one) + ends.get(one, "") for one in listed) or "(?!)"
    assert re.findall(longest_of(texts, ends), text) == re.findall(plain, text)


def test_texts_that_hold_one_another_nest_only_so_far() -> None:
    runs = ["x" * n for n in range(1, 200)]
    found = re.compile(longest_of(runs))
    for length in (1, MAX_DEPTH, MAX_DEPTH + 1, 199):
        assert found.fullmatch("x" * length)
    assert [len(run) for run in found.findall("x" * 300)] == [199, 101]


def test_texts_that_begin_alike_are_no_list() -> None:
    texts = [f"<|reserved_{i}|>" for i in range(1000)]
    assert longest_of(texts).count("reserved") == 1
    assert longest_of([]) == "(?!)"
