"""What is asked of an engine for one sequence."""

from __future__ import annotations

from dataclasses import dataclass

from shared.contracts.grants import CLASSES, class_rank
from shared.contracts.ids import BlockTag, ScopeGeneration, TenantId
from shared.contracts.sampling import SamplingParams
from shared.kv.group_pool import Keeping
from shared.kv.retention import lasts_s

_NO_TENANT = TenantId("")
_NO_GENERATION = ScopeGeneration(0)


@dataclass(frozen=True, slots=True)
class SequenceSpec:
    """What is asked of an engine.

    `token_ids` is the prompt, or prompt + committed tokens on resume; `num_prompt_tokens` is the length of the original
    prompt, so that output counts, sequence numbers and `max_tokens` go on where the last attempt ended.

    Raises:
        ValueError: no tokens, a weight that is not positive, or nothing left to sample.
    """

    seq_id: str  # never used again while its last steps may be in flight
    token_ids: tuple[int, ...]
    num_prompt_tokens: int
    sampling: SamplingParams
    eos_token_ids: frozenset[int] = frozenset()
    tags: tuple[tuple[BlockTag, ...], ...] = ()  # per layer group, of the leading full blocks
    tenant: TenantId = _NO_TENANT
    weight: float = 1.0  # the tenant's share of prompt tokens
    klass: str = CLASSES[0]  # whose blocks are taken last: interactive | analysis | batch
    compute_only: bool = False  # store KV of all token_ids and end; never sample
    await_kv: bool = False  # a hand-off is to come: not runnable until released
    scope_generation: ScopeGeneration = _NO_GENERATION  # of the grant: purges take what was made below theirs
    retention_s: int = -1  # of the grant: how long its blocks are kept when it has ended; -1: no limit
    follows: str = ""  # another sequence with the same prompt: it computes the prompt's full blocks for both

    def __post_init__(self) -> None:
        if not self.token_ids:
            raise ValueError("a sequence needs at least one token")
        if self.weight <= 0:
            raise ValueError(f"the weight of a tenant must be positive, not {self.weight}")
        if self.compute_only:
            if self.await_kv:
                raise ValueError("a sequence that only computes cannot wait for KV")
        elif not 0 <= len(self.token_ids) - self.num_prompt_tokens < self.sampling.max_tokens:
            raise ValueError(
                f"{len(self.token_ids)} tokens after a prompt of {self.num_prompt_tokens} "
                f"leave nothing to sample of {self.sampling.max_tokens}"
            )

    @property
    def owner(self) -> tuple[TenantId, ScopeGeneration]:
        """Whose its blocks are."""
        return self.tenant, self.scope_generation

    @property
    def keeping(self) -> Keeping:
        """How its blocks are kept when it has ended."""
        return Keeping(self.rank, lasts_s(self.retention_s))

    @property
    def num_slots(self) -> int:
        """Most token slots it can come to need. The last sampled token is never computed, so it needs none."""
        if self.compute_only:
            return len(self.token_ids)
        return self.num_prompt_tokens + self.sampling.max_tokens - 1

    @property
    def ending_ids(self) -> frozenset[int]:
        """Tokens that end the output with `stop`."""
        return frozenset(self.sampling.stop_token_ids).union(() if self.sampling.ignore_eos else self.eos_token_ids)

    @property
    def max_match(self) -> int:
        """Most tokens a prefix match may cover: the last token must be computed, if it is to be sampled from."""
        if self.num_scored:  # every row is computed here
            return 0
        return len(self.token_ids) - (0 if self.compute_only else 1)

    @property
    def num_scored(self) -> int:
        """Leading rows of the prompt whose logits tell the next token's log-probability; 0 where none are wanted.

        A request that comes with output tokens told them before.
        """
        fresh = len(self.token_ids) == self.num_prompt_tokens and not self.compute_only
        return self.num_prompt_tokens - 1 if fresh and self.sampling.prompt_logprobs >= 0 else 0

    @property
    def rank(self) -> int:
        """Of its class; 0 is the highest."""
        return class_rank(self.klass)


def larger_than_pool(num_slots: int, num_prompt_tokens: int, max_tokens: int) -> str:
    """Why no waiting helps a request, in a client's words. The last token of an output is never computed.

    Args:
        num_slots: token slots of a worker's whole pool.
    """
    limit = f"this model's workers hold {num_slots + 1} tokens of prompt and output together"
    return f"{limit}; the prompt has {num_prompt_tokens} and {max_tokens} are asked for"
