"""What a decode worker tells of its requests' tokens: those that run, and for some seconds those that ended."""

from __future__ import annotations

from services.decode.outputs import TOLD_S, EndedOutputs
from shared.contracts.attempt import Attempt
from shared.contracts.ids import Epoch, RequestId
from shared.contracts.parts import AttemptOutput

A, B = (Attempt(RequestId(name), Epoch(1)) for name in "ab")


def test_the_first_word_of_an_end_counts_and_is_told_for_a_while() -> None:
    ended = EndedOutputs()
    assert ended.told([(A, 3), (B, 0)], 0.0) == (AttemptOutput(A, 3), AttemptOutput(B, 0))
    ended.add(A, 5, 1.0)
    ended.add(A, 4, 1.1)
    assert ended.told([(A, 4), (B, 1)], 1.2) == (AttemptOutput(B, 1), AttemptOutput(A, 5, ended=True))
    assert ended.told([(B, 2)], 0.9 + TOLD_S) == (AttemptOutput(B, 2), AttemptOutput(A, 5, ended=True))
    assert ended.told([(B, 3)], 1.0 + TOLD_S) == (AttemptOutput(B, 3),)
