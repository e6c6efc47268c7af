"""The first tokens of a list that only grows, as it was: a step's look at a sequence, without a copy of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import overload


class TokenPrefix(Sequence[int]):
    """Tokens [0, length) of `tokens`. Another thread may append to the list; nobody may change what is there."""

    __slots__ = ("_length", "_tokens")

    def __init__(self, tokens: list[int], length: int) -> None:
        if not 0 <= length <= len(tokens):
            raise ValueError(f"a prefix of {length} of {len(tokens)} tokens")
        self._tokens = tokens
        self._length = length

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[int, ...]: ...
    def __getitem__(self, index: int | slice) -> int | tuple[int, ...]:
        if isinstance(index, slice):
            places = range(self._length)[index]
            if places.step < 0:  # where it ends may be -1, which would count from a list's end
                return tuple(self._tokens[place] for place in places)
            return tuple(self._tokens[places.start : places.stop : places.step])
        return self._tokens[range(self._length)[index]]

    def __iter__(self) -> Iterator[int]:
        return islice(self._tokens, self._length)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TokenPrefix | tuple) and self[:] == tuple(other)

    __hash__ = None  # type: ignore[assignment]
