"""How the prompt tokens of one step are shared out among tenants: deficit round robin, in each in the order given.

Pure. Knows tenants and token counts; neither blocks nor steps.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from shared.contracts.ids import TenantId


@dataclass(frozen=True, slots=True)
class PrefillWant:
    """One sequence's wish: at most `num_tokens` of its prompt in this step. The tenant's first want sets its weight."""

    seq_id: str
    tenant: TenantId
    weight: float
    num_tokens: int


@dataclass(slots=True)
class DeficitRoundRobin:
    """Over time a backlogged tenant gets prompt tokens in proportion to its weight, whatever the length of its prompts.

    A tenant's turn adds quantum * weight to its deficit and spends it; a turn cut short by the budget goes on in the
    next step. Who has nothing waiting saves nothing up.
    """

    quantum: int  # tokens a tenant of weight 1 gets in a turn
    _deficits: dict[TenantId, float] = field(default_factory=dict)
    _order: deque[TenantId] = field(default_factory=deque)  # whose turn it is, first
    _in_turn: bool = False  # the first tenant has had its quantum

    @property
    def saves(self) -> bool:
        """True when a tenant had something waiting in the last step, and may have a deficit."""
        return bool(self._order)

    def share(self, wants: Iterable[PrefillWant], budget: int) -> dict[str, int]:
        """Tokens per sequence, in the order of service; they add up to min(budget, all wants).

        Args:
            wants: at most one per sequence, those first that a tenant wants first.
            budget: tokens left in the step.
        """
        queues: dict[TenantId, deque[tuple[str, int]]] = {}
        weights: dict[TenantId, float] = {}
        for want in wants:
            queues.setdefault(want.tenant, deque()).append((want.seq_id, want.num_tokens))
            weights.setdefault(want.tenant, want.weight)
        self._forget_all_but(queues)
        granted: dict[str, int] = {}
        while budget > 0 and queues:
            tenant = self._order[0]
            if tenant not in queues:
                self._end_turn()
                continue
            if not self._in_turn:
                self._deficits[tenant] += self.quantum * weights[tenant]
                self._in_turn = True
            queue = queues[tenant]
            while queue and budget > 0 and self._deficits[tenant] >= 1:
                seq_id, wanted = queue.popleft()
                take = min(wanted, int(self._deficits[tenant]), budget)
                granted[seq_id] = granted.get(seq_id, 0) + take
                self._deficits[tenant] -= take
                budget -= take
                if take < wanted:
                    queue.appendleft((seq_id, wanted - take))
            if not queue:
                del queues[tenant]
                self._deficits[tenant] = 0.0
            if not queue or self._deficits[tenant] < 1:
                self._end_turn()
        return granted

    def _end_turn(self) -> None:
        self._order.rotate(-1)
        self._in_turn = False

    def _forget_all_but(self, backlogged: Iterable[TenantId]) -> None:
        keep = set(backlogged)
        if self._order and self._order[0] not in keep:
            self._in_turn = False
        self._order = deque(t for t in self._order if t in keep)
        self._deficits = {t: self._deficits[t] for t in self._order}
        for tenant in backlogged:
            if tenant not in self._deficits:
                self._deficits[tenant] = 0.0
                self._order.append(tenant)
