"""Made-up tokens that keep to a grammar, for fake workers. No torch.

Like `made_up_token` a pure function of the seed, the position and what came before; endings are drawn more often than
chance would have it, so that outputs end.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from shared.engine.fake_runner import made_up_token
from shared.engine.step_plan import IN_FLIGHT, StepPlan
from shared.grammar.compiler import LazyCompiler
from shared.grammar.row_masks import ConstrainedRow, RowMasks

_ENDINGS = (b'"', b"}", b"]", b'"}', b'"]')
Tokens = tuple[tuple[int, ...], ...]


class FakeConstrained:
    """Draws for the sequences of a fake runner that have a grammar."""

    def __init__(self, compiler: LazyCompiler) -> None:
        self._compiler = compiler
        self._masks = RowMasks(compiler, 0)
        self._last: dict[str, tuple[int, ...]] = {}  # what the step before drew

    def replace(self, plan: StepPlan, sampled: Tokens) -> tuple[Tokens, frozenset[int]]:
        """`sampled` with the tokens of constrained sequences in it, and those that cannot go on."""
        rows = [row for i in range(len(plan.sequences)) if (row := self._row(plan, i)) is not None]
        if not rows:
            return sampled, frozenset()
        found = self._masks.now(rows)
        drawn = list(sampled)
        for i, bits in found.bits.items():
            sequence = plan.sequences[i]
            assert sequence.sampling is not None
            position = sequence.start + len(sequence.token_ids)
            drawn[i] = (self._draw(bits[-1], sequence.sampling.seed, position),)
        for i in found.faults:
            drawn[i] = ()
        self._last = {row.seq_id: drawn[row.index] for row in rows}
        return tuple(drawn), frozenset(found.faults)

    def _row(self, plan: StepPlan, index: int) -> ConstrainedRow | None:
        sequence = plan.sequences[index]
        if sequence.sampling is None or not sequence.sampling.grammar:
            return None
        last = self._last.get(sequence.seq_id, ())
        own = sequence.token_ids[max(0, sequence.num_prompt_tokens - sequence.start) :]
        tokens = (last[-1] if token == IN_FLIGHT and last else token for token in own)
        output = (*sequence.history[sequence.num_prompt_tokens :], *tokens)
        return ConstrainedRow(index, sequence.seq_id, sequence.sampling.grammar, (output,))

    def _draw(self, bits: NDArray[np.uint32], seed: int, position: int) -> int:
        allowed = np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little"))
        compiler = self._compiler.get()
        endings = np.intersect1d(allowed, [*compiler.eos_ids, *compiler.ids_of(_ENDINGS)])
        if len(endings) and made_up_token(seed, 2 * position, range(3)) == 0:
            allowed = endings
        return int(allowed[made_up_token(seed, 2 * position + 1, range(len(allowed)))])
