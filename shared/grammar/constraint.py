"""One output's place in its grammar: a pure function of the output's tokens, whichever way it came to them.

An output may lose its last tokens (a draft that was not accepted) or come with many at once (a resumed request, a
sequence that was preempted): the matcher is rolled back to what both have in common and goes on from there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import llguidance
import numpy as np
from numpy.typing import NDArray

Bits = NDArray[np.uint32]


class GrammarFault(Exception):
    """The output cannot go on under its grammar; its words name no text of the client's."""


class GrammarWorn(GrammarFault):
    """What is kept of a grammar, for all its outputs together, has reached its limit: a fresh one may go on."""

    def __init__(self) -> None:
        super().__init__("the grammar takes too much work")


@contextmanager
def panics_mapped() -> Iterator[None]:
    """A fault inside the library, which comes as no `Exception`, ends what needed it and not the process."""
    try:
        yield
    except BaseException as exc:
        if type(exc).__name__ == "PanicException":
            raise GrammarWorn from exc
        raise


class Constraint:
    """The place of one output. Used by one thread at a time.

    Args:
        matcher: a fresh one, this constraint's own.
        eos_ids: tokens that end the output.
        vocab_size: tokens the grammar knows of.
    """

    def __init__(self, matcher: llguidance.LLMatcher, eos_ids: Sequence[int], vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._num_words = -(-vocab_size // 32)
        self._matcher = matcher
        self._eos_ids = tuple(eos_ids)
        self._tokens: list[int] = []

    def advance_to(self, output: Sequence[int]) -> None:
        """Take the place behind `output`.

        Raises:
            GrammarFault: the grammar does not allow these tokens; the place is then behind the last one it allows.
            GrammarWorn: see there; this place is of no further use.
        """
        mine = self._tokens
        if len(output) < len(mine) or list(output[: len(mine)]) != mine:
            self._roll_back(_common(mine, output))
        for token in output[len(self._tokens) :]:
            self._take(token)
            self._tokens.append(token)

    @property
    def may_end(self) -> bool:
        """True when the output so far is whole."""
        return bool(self._matcher.is_accepting())

    def fill(self, row: Bits) -> None:
        """Write which tokens may come next: bit i % 32 of word i // 32 for token i. [num_words] uint32, contiguous.

        Words behind the vocabulary stay zero.

        Raises:
            GrammarFault: none can.
            GrammarWorn: see there; this place is of no further use.
        """
        row[:] = 0
        if self._ended or self._matcher.is_stopped():
            if self._matcher.is_error():
                raise GrammarWorn
            self._allow_end(row)
            return
        own = row[: self._num_words]  # the library takes this size and no other
        self._matcher.unsafe_compute_mask_ptr(own.ctypes.data, own.nbytes)
        if self._matcher.is_error():
            raise GrammarWorn
        if not row.any():
            raise GrammarFault("no token can follow")

    @property
    def _ended(self) -> bool:
        return bool(self._tokens) and self._tokens[-1] in self._eos_ids

    def _allow_end(self, row: Bits) -> None:
        if not self._eos_ids:
            raise GrammarFault("this model has no token that ends an output")
        for token in self._eos_ids:
            row[token // 32] |= np.uint32(1 << token % 32)

    def _take(self, token: int) -> None:
        if self._ended:
            raise GrammarFault("a token follows the end of its grammar")
        if token in self._eos_ids:
            # kept from the matcher, whose way back over it leads one token too far (1.9.1)
            if not self.may_end:
                raise GrammarFault("it ends before its grammar does")
        elif not (0 <= token < self._vocab_size and self._matcher.validate_tokens([token]) == 1):
            raise GrammarWorn if self._matcher.is_error() else GrammarFault("a token breaks its grammar")
        elif not self._matcher.consume_token(token):
            raise GrammarWorn

    def _roll_back(self, length: int) -> None:
        lost = len(self._tokens) - length - self._ended
        if lost > 0 and not self._matcher.rollback(lost):
            raise GrammarFault("the grammar cannot go back")
        del self._tokens[length:]


def _common(first: Sequence[int], second: Sequence[int]) -> int:
    """How many leading tokens both have in common."""
    for i, (a, b) in enumerate(zip(first, second, strict=False)):
        if a != b:
            return i
    return min(len(first), len(second))
