"""A look at a sequence's first tokens: as they were, however the sequence grows."""

from __future__ import annotations

import pytest

from shared.contracts.ids import BlockGeneration
from shared.contracts.sampling import SamplingParams
from shared.engine.sequence import Sequence
from shared.engine.sequence_spec import SequenceSpec
from shared.engine.step_plan import IN_FLIGHT
from shared.engine.token_prefix import TokenPrefix
from shared.kv.block_table import BlockTable

BACK = (slice(None, None, -1), slice(1, None, -1), slice(9, 0, -2), slice(0, None, 2), slice(0, 2, -1))


def test_it_is_the_tuple_it_stands_for() -> None:
    tokens = [5, 6, 7, 8]
    first = TokenPrefix(tokens, 3)
    tokens.extend((9, 10))
    same = (5, 6, 7)
    assert first == same
    assert first != (5, 6)
    assert (*first, 1) == (5, 6, 7, 1)
    assert len(first) == 3
    for part in (slice(None), slice(1, None), slice(2, 9), slice(-2, None), slice(5, None), slice(0, 1), *BACK):
        assert first[part] == same[part], part
    assert (first[0], first[-1], 7 in first, 8 in first) == (5, 7, True, False)
    with pytest.raises(IndexError):
        first[3]
    assert TokenPrefix(tokens, 0) == ()
    with pytest.raises(ValueError, match="a prefix of 7 of 6 tokens"):
        TokenPrefix(tokens, 7)


def test_a_step_sees_its_sequence_as_it_was_planned() -> None:
    """Not copied: what penalties and grammars look back at is as long as the context, and asked for at every step."""
    params = SamplingParams(max_tokens=8, presence_penalty=0.5)
    table = BlockTable(8, (1, 2), (BlockGeneration(1), BlockGeneration(1)), num_shared=0)
    sequence = Sequence(SequenceSpec("a", (5, 6, 7), 3, params), 0, (table,), 0)
    assert sequence.schedule(2).history == ()
    last = sequence.schedule(1)
    ahead = sequence.schedule(1)  # its token is in flight
    sequence.tokens.append(9)
    assert (last.history, last.token_ids) == ((5, 6), (7,))
    assert (ahead.history, ahead.token_ids) == ((5, 6, 7), (IN_FLIGHT,))
    assert isinstance(ahead.history, TokenPrefix)


def test_a_step_in_flight_sees_what_its_sequence_has_forgotten() -> None:
    params = SamplingParams(max_tokens=8, presence_penalty=0.5)
    table = BlockTable(8, (1, 2), (BlockGeneration(1), BlockGeneration(1)), num_shared=0)
    sequence = Sequence(SequenceSpec("a", (5, 6, 7), 3, params), 0, (table,), 0)
    sequence.schedule(3)
    sequence.schedule(1)
    sequence.append((9,))
    ahead = sequence.schedule(1)
    sequence.truncate(0)
    assert sequence.tokens == [5, 6, 7]
    sequence.append((1,))
    assert ahead.history == (5, 6, 7, 9)
    assert sequence.tokens == [5, 6, 7, 1]
