"""How a batcher forms its steps."""

from __future__ import annotations

from dataclasses import dataclass

from shared.contracts.parts import ItlTarget
from shared.engine.batching_policy import Batching
from shared.engine.prompt_budget import NO_TARGET
from shared.kv.eviction import Eviction


@dataclass(frozen=True, slots=True)
class BatcherConfig:
    """Raises ValueError when a full set of decodes could leave no room for a prompt."""

    token_budget: int = 512  # most tokens in a step
    lone_token_budget: int = 0  # most tokens in a step in which nothing decodes, if larger
    itl_target: ItlTarget = NO_TARGET  # how long a step may take while sequences decode; see `prompt_budget`
    max_num_seqs: int = 32  # most live sequences, waiting for KV included
    chunk_size: int = 0  # most tokens of one sequence in a step; 0 = the token budget
    depth: int = 1  # steps that may be planned while one is in flight
    quantum: int = 64  # prompt tokens a tenant of weight 1 gets in a turn
    stretch_s: float = 0.0  # how long plain decodes may go on with nobody planning; see `StepComposer.stretch`
    most_drafted: int = 0  # most tokens drafted for a sequence in a step; 0: nothing speculates
    batching: Batching = "continuous"  # see `batching_policy`
    batch_size: int = 8  # most sequences of a static or dynamic batch
    batch_window_s: float = 0.05  # how long a dynamic batch waits to become full

    eviction: Eviction = "reuse"  # which cached blocks are given up first; see `shared/kv/eviction.py`

    def __post_init__(self) -> None:
        if self.token_budget <= self.max_num_seqs:
            raise ValueError(f"a budget of {self.token_budget} tokens must exceed {self.max_num_seqs} sequences")
        target = self.itl_target
        if min(target.least_s, target.times, target.times_each, self.lone_token_budget) < 0:
            raise ValueError("the target of a token's latency and the lone token budget must not be negative")
        if min(self.max_num_seqs, self.quantum) < 1 or min(self.depth, self.chunk_size, self.most_drafted) < 0:
            raise ValueError("sequences and quantum must be positive; depth, chunk size and drafts not negative")
