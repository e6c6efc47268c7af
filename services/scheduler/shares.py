"""What each tenant of a class has been served, in tokens over its weight, so that the one served least is next. Pure.

A request is charged when it is taken from the queue, by its predicted cost, and corrected when the true cost is known.
Counters only matter relative to each other, and are set right where a tenant begins to wait: never below the least of
those who wait (or, while nobody does, of those who run), so that idling saves nothing up; and never above it by more
than the tenant's largest request, so that who used idle capacity does not pay for it later, and who sends one giant at
a time does pay for each.
"""

from __future__ import annotations

from dataclasses import dataclass

from shared.contracts.ids import TenantId


@dataclass(slots=True)
class Account:
    """One tenant in one class: its requests that wait and run, and tokens over its weight."""

    served: float = 0.0
    weight: float = 1.0
    waiting: int = 0
    running: int = 0
    largest: float = 0.0  # charge so far

    @property
    def idle(self) -> bool:
        return not self.waiting and not self.running


@dataclass(slots=True)
class Charge:
    """What one request costs its tenant at present; `tokens` are divided by the weight they were charged at."""

    tenant: TenantId
    weight: float
    tokens: float


class Shares:
    """The accounts of one class. Idle ones are kept, as many as `keep`, those that went idle last."""

    def __init__(self, keep: int = 1024) -> None:
        self._keep = keep
        self._accounts: dict[TenantId, Account] = {}

    def account(self, tenant: TenantId) -> Account:
        """The tenant's account, to be read; an empty one when it has none."""
        return self._accounts.get(tenant) or Account()

    def waits(self, tenant: TenantId, weight: float, *, again: bool = False) -> None:
        """One more request of the tenant waits; its weight holds from here on. `again`: it is put back as it was."""
        account = self._accounts.setdefault(tenant, Account())
        account.weight = weight
        if not account.waiting and not again:
            account.served = self.level(tenant, account)
        account.waiting += 1

    def waits_no_more(self, tenant: TenantId) -> None:
        self._accounts[tenant].waiting -= 1
        self._rest(tenant)

    def level(self, tenant: TenantId, account: Account) -> float:
        """Where the tenant's counter stands if it begins to wait now."""
        least = self.least(without=tenant)
        if least is None:
            return account.served
        return min(max(account.served, least), least + account.largest)

    def least(self, without: TenantId | None = None) -> float | None:
        """The least served of those who wait, or run when none waits; None when there are neither."""
        others = [a for t, a in self._accounts.items() if t != without]
        active = [a.served for a in others if a.waiting] or [a.served for a in others if a.running]
        return min(active, default=None)

    def charge(self, tenant: TenantId, weight: float, tokens: float) -> Charge:
        """A request of the tenant begins."""
        account = self._accounts.setdefault(tenant, Account(weight=weight))
        account.running += 1
        charge = Charge(tenant, weight, 0.0)
        self.correct(charge, tokens)
        account.largest = max(account.largest, tokens / weight)
        return charge

    def correct(self, charge: Charge, tokens: float) -> None:
        """The request comes to `tokens` in all."""
        self._accounts[charge.tenant].served += (tokens - charge.tokens) / charge.weight
        charge.tokens = tokens

    def close(self, charge: Charge) -> None:
        """The request runs no more; what it is charged stays."""
        self._accounts[charge.tenant].running -= 1
        self._rest(charge.tenant)

    def _rest(self, tenant: TenantId) -> None:
        """Forget the accounts that have been idle for longest, where there are too many."""
        account = self._accounts[tenant]
        if not account.idle:
            return
        self._accounts[tenant] = self._accounts.pop(tenant)
        if len(self._accounts) > self._keep:
            idle = [one for one, its in self._accounts.items() if its.idle]
            for oldest in idle[: max(0, len(idle) - self._keep)]:
                del self._accounts[oldest]
