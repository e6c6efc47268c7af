"""Many texts as one regular expression that reads what they begin with in common only once. Pure.

`re` tries the branches of an expression in turn: with a thousand texts that begin alike, a thousand at each such place.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby

MAX_DEPTH = 40
"""Groups in groups; `re` parses them by recursion. Deeper, texts stand side by side."""


def longest_of(texts: Iterable[str], ends: Mapping[str, str] | None = None) -> str:
    """An expression that matches the longest of the texts; nothing for none. An empty text does not count.

    Args:
        ends: a further expression that must match behind a text, so that else a shorter one is taken.
    """
    # (?!) matches nowhere
    return _tree(sorted(set(texts) - {""}), 0, ends or {}, MAX_DEPTH) or "(?!)"


def _tree(texts: Sequence[str], start: int, ends: Mapping[str, str], depth: int) -> str:
    """Of sorted texts that are alike up to `start`."""
    if not depth:
        longest_first = sorted(texts, key=len, reverse=True)
        return "|".join(re.escape(text[start:]) + ends.get(text, "") for text in longest_first)
    branches = []
    for _, group in groupby(texts, lambda text: text[start : start + 1]):
        alike = list(group)
        if len(alike) == 1:
            branches.append(re.escape(alike[0][start:]) + ends.get(alike[0], ""))
        else:
            # sorted, so what the first and the last have in common all have
            end = next(i for i in range(start, len(alike[-1])) if alike[0][i : i + 1] != alike[-1][i])
            branches.append(f"{re.escape(alike[0][start:end])}(?:{_tree(alike, end, ends, depth - 1)})")
    # the text that ends here is the first of them, and the shortest
    return "|".join(reversed(branches))
