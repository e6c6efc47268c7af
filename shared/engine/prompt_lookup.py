"""Drafts out of a sequence's own text, and of what its output was predicted to be: where its last tokens stood before,
what followed them then. Pure.

The index holds where each run of GRAM tokens ended last and, from there, where it ended before that. It is kept token
by token as the text grows, so that looking something up costs no more in a long text than in a short one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

GRAM = 3
"""Shortest match: shorter ones stand everywhere in a text and say little of what follows."""
MOST_MATCH = 32
"""Longer matches are not told apart."""
_PLACES = 8
"""Earlier places of the last GRAM tokens that are looked at, the latest first."""
_BITS = 21
_MASK = (1 << _BITS * GRAM) - 1


@dataclass(frozen=True, slots=True)
class Found:
    """Tokens that may come next, and how many tokens before them were alike."""

    token_ids: tuple[int, ...]
    match: int
    predicted: bool = False  # out of the prediction


class PromptLookup:
    """The index over one text.

    Args:
        prediction: what its output may turn out to be, as somebody said.
    """

    def __init__(self, prediction: Sequence[int] = ()) -> None:
        self._prediction = tuple(prediction)
        self._text: list[int] = []  # the prediction, then what was read
        self._key = 0  # the last GRAM tokens
        self._last: dict[int, int] = {}  # tokens of a run → position of its last one
        self._before: list[int] = []  # per position where the same run ended before; -1: nowhere

    def num_unread(self, num_tokens: int) -> int:
        """Tokens that `read` has still to take in of a text of so many, and of the prediction before it."""
        return len(self._prediction) + num_tokens - len(self._text)

    def read(self, tokens: Sequence[int], most: int) -> bool:
        """Take in what `tokens`, the text from its beginning, has beyond what was read before, at most so many tokens.

        Returns:
            True when all of it was, and the prediction before it.
        """
        first, predicted = len(self._text), len(self._prediction)
        more = list(self._prediction[first : first + most])
        behind = max(0, first - predicted)
        more += tokens[behind : behind + most - len(more)]
        key, last, before = self._key, self._last, self._before
        for position, token in enumerate(more, start=first):
            key = (key << _BITS | token) & _MASK
            before.append(last.get(key, -1))
            last[key] = position
        self._key = key
        self._text.extend(more)
        return not self.num_unread(len(tokens))

    def find(self, most: int, num_output: int = GRAM) -> Found | None:
        """What followed the last tokens where the longest match ends, at most so many; of equals the latest place.

        A match that reaches up to the text's end goes on with itself: text that repeats itself does so again.

        Args:
            num_output: tokens of the output so far: of one that has just begun, all count as a match with the
                prediction's first.
        """
        text = self._text
        end = len(text) - 1
        if most < 1 or end < GRAM:
            return None
        if num_output < GRAM and (beginning := self._beginning(most, num_output)) is not None:
            return beginning
        best, best_match, place = -1, GRAM - 1, self._before[end]
        for _ in range(_PLACES):
            if place < 0 or best_match >= MOST_MATCH:
                break
            match = _alike(text, place, end)
            if match > best_match and place + 1 != len(self._prediction):  # nothing follows its last token
                best, best_match = place, match
            place = self._before[place]
        if best < 0:
            return None
        if best + 1 < len(self._prediction):
            return Found(self._prediction[best + 1 : best + 1 + most], best_match, predicted=True)
        period = end - best
        return Found(tuple(text[best + 1 + i % period] for i in range(most)), best_match)

    def _beginning(self, most: int, num_output: int) -> Found | None:
        begun, rest = self._prediction[:num_output], self._prediction[num_output : num_output + most]
        alike = not num_output or begun == tuple(self._text[-num_output:])
        return Found(rest, MOST_MATCH, predicted=True) if rest and alike else None


def _alike(text: Sequence[int], a: int, b: int) -> int:
    """How many tokens up to positions a < b are the same, MOST_MATCH at most."""
    most = min(MOST_MATCH, a + 1)
    for count in range(most):
        if text[a - count] != text[b - count]:
            return count
    return most
