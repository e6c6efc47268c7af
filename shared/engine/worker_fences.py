"""What a worker remembers of attempts that are over, so that late messages are dropped."""

from __future__ import annotations

from collections import OrderedDict

from shared.contracts.attempt import Attempt
from shared.contracts.ids import RequestId, Term

Key = tuple[int, int]  # (epoch, dispatch)


class Fences:
    """The lowest attempt of each request that is still welcome, and the highest leader's term seen.

    Memory is bounded: the requests touched longest ago are forgotten beyond `capacity`, which is far more than can be
    in flight within any message's budget.
    """

    def __init__(self, capacity: int = 65_536) -> None:
        self._capacity = capacity
        self._floor: OrderedDict[RequestId, Key] = OrderedDict()
        self.term = Term(0)

    def admits(self, attempt: Attempt) -> bool:
        """True unless the attempt has ended or a newer one of its request was seen."""
        return (attempt.epoch, attempt.dispatch) >= self._floor.get(attempt.request_id, (0, 0))

    def admits_term(self, term: Term) -> bool:
        """True unless a later leader was seen."""
        return term >= self.term

    def see_term(self, term: Term) -> None:
        self.term = max(self.term, term)

    def open(self, attempt: Attempt) -> None:
        """`attempt` begins: everything older is over."""
        self._raise(attempt.request_id, (attempt.epoch, attempt.dispatch))

    def close(self, attempt: Attempt) -> None:
        """`attempt` and everything older is over."""
        self._raise(attempt.request_id, (attempt.epoch, attempt.dispatch + 1))

    def __len__(self) -> int:
        return len(self._floor)

    def _raise(self, request_id: RequestId, floor: Key) -> None:
        self._floor[request_id] = max(floor, self._floor.get(request_id, (0, 0)))
        self._floor.move_to_end(request_id)
        while len(self._floor) > self._capacity:
            self._floor.popitem(last=False)
