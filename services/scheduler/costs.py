"""What a request costs its tenant: tokens computed for it, and before it ends those that are expected. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from shared.contracts.ids import TenantId

CACHED_TOKEN = 0.1
"""A token found in the cache costs this much of one that is computed. An output token costs as much as a prompt's."""
FIRST_GUESS = 256.0
"""Output tokens of a choice while nothing is known."""


def request_cost(num_tokens: int, num_cached: int, num_output: float) -> float:
    """Weighted tokens. A request costs at least one, so that turns of nothing are counted too."""
    num_cached = min(num_cached, num_tokens)
    return max(1.0, num_tokens - num_cached + CACHED_TOKEN * num_cached + num_output)


@dataclass(slots=True)
class OutputGuess:
    """How long outputs are, by what ended lately: of the tenant in its class, or of all where it has had none.

    Running means; at most `keep` tenants are remembered, those that ended something last.
    """

    weight: float = 0.2
    keep: int = 4096
    _all: float = FIRST_GUESS
    _means: dict[tuple[TenantId, str], float] = field(default_factory=dict)

    def guess(self, tenant: TenantId, klass: str, max_tokens: int) -> float:
        """Tokens one choice will have, of at most `max_tokens`."""
        return min(float(max_tokens), self._means.get((tenant, klass), self._all))

    def learn(self, tenant: TenantId, klass: str, num_tokens: float) -> None:
        """A choice ended, after so many tokens."""
        key = tenant, klass
        mean = self._means.pop(key, num_tokens)
        self._means[key] = mean + self.weight * (num_tokens - mean)
        self._all += 0.1 * self.weight * (num_tokens - self._all)
        if len(self._means) > self.keep:
            del self._means[next(iter(self._means))]
