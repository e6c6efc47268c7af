"""The masks of a step's rows: which tokens their grammars allow, worked out while the step computes.

Places in grammars are kept by sequence, and can be lost: each is made anew from the output's tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shared.contracts.errors import BatonError
from shared.grammar.compiler import LazyCompiler
from shared.grammar.constraint import Constraint, GrammarFault, GrammarWorn, panics_mapped

Bits = NDArray[np.uint32]

KEEP_STEPS = 256
"""Steps after which the place of a sequence that took no part is let go of."""


RENEW_TOKENS = 16
"""A grammar that is worn again after fewer tokens would slow the steps of its neighbours down; its output ends."""


@dataclass(frozen=True, slots=True)
class ConstrainedRow:
    """A sequence that samples under a grammar.

    Attributes:
        index: of the sequence in its step.
        outputs: the output up to each row that is drawn from, in order.
    """

    index: int
    seq_id: str
    grammar: str
    outputs: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class StepMasks:
    """Per sequence its rows' masks, [rows, ceil(vocab_size / 32)] uint32, or why it cannot go on."""

    bits: dict[int, Bits]
    faults: dict[int, str]


@dataclass(slots=True)
class _Place:
    """A sequence's place; when it was last needed, and after how many tokens its grammar was compiled anew."""

    constraint: Constraint
    seen: int = 0
    renewed_at: int = -RENEW_TOKENS


NO_MASKS = StepMasks({}, {})


class RowMasks:
    """Masks for one engine. Steps come in order; one is worked out at a time.

    Args:
        vocab_size: of the logits; 0 = as many as the tokenizer has.
    """

    def __init__(self, compiler: LazyCompiler, vocab_size: int) -> None:
        self._compiler = compiler
        self._vocab_size = vocab_size
        self._places: dict[str, _Place] = {}
        self._step = 0
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammar")

    def begin(self, rows: Sequence[ConstrainedRow]) -> Future[StepMasks]:
        """Start on a step's masks, beside whatever the caller does next."""
        return self._thread.submit(self.now, rows)

    def now(self, rows: Sequence[ConstrainedRow]) -> StepMasks:
        """The same on the caller's own thread."""
        self._step += 1
        masks = StepMasks({}, {})
        for row in rows:
            try:
                masks.bits[row.index] = self._row(row)
            except GrammarFault as exc:
                masks.faults[row.index] = str(exc)
            except BatonError as exc:
                masks.faults[row.index] = f"the grammar does not compile here: {exc.message}"
        self._forget()
        return masks

    def _row(self, row: ConstrainedRow) -> Bits:
        compiler = self._compiler.get()
        place = self._places.get(row.seq_id) or _Place(compiler.constraint(row.grammar))
        self._places[row.seq_id] = place
        place.seen = self._step
        try:
            return self._fill(place.constraint, row, compiler.vocab_size)
        except GrammarWorn:
            length = len(row.outputs[-1])
            if length - place.renewed_at < RENEW_TOKENS:
                raise
            place.constraint, place.renewed_at = compiler.renew(row.grammar), length
            return self._fill(place.constraint, row, compiler.vocab_size)

    def _fill(self, constraint: Constraint, row: ConstrainedRow, known_size: int) -> Bits:
        # the library needs room for all it knows, which may be more tokens than the model has
        wanted, known = (-(-size // 32) for size in (self._vocab_size or known_size, known_size))
        bits = np.zeros((len(row.outputs), max(wanted, known)), dtype=np.uint32)
        with panics_mapped():
            for own, output in zip(bits, row.outputs, strict=True):
                constraint.advance_to(output)
                constraint.fill(own)
        return np.ascontiguousarray(bits[:, :wanted])

    def _forget(self) -> None:
        if self._step % KEEP_STEPS == 0:
            oldest = self._step - KEEP_STEPS
            self._places = {seq_id: place for seq_id, place in self._places.items() if place.seen > oldest}
