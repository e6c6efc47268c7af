"""A model small enough to simulate: one 64-bit number of KV a token, and outputs that depend on every one of them.

A wrong byte anywhere in a sequence's KV changes every token after it, as in a real model; the truth of a request is
what the same arithmetic gives on a plain list.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

BLOCK = 16
SLOT_BYTES = 8
VOCAB = 50_000
TOO_LONG = 2_000  # tokens: no pool of the simulator holds it
_MASK = (1 << 64) - 1


def kv_of(before: int, token: int, position: int) -> int:
    """The KV of a token, from the sum of all KV before it."""
    x = (before ^ (token * 0x9E3779B97F4A7C15) ^ (position * 0xC2B2AE3D27D4EB4F)) & _MASK
    x ^= x >> 29
    return (x * 0xBF58476D1CE4E5B9) & _MASK


def next_token(total: int) -> int:
    """The output token, from the sum of all KV up to the last token."""
    return (total ^ (total >> 31)) % VOCAB


@dataclass(frozen=True)
class Job:
    """One client's request and what must come of it."""

    name: str
    prompt: tuple[int, ...]
    truth: tuple[int, ...]  # all max_tokens outputs
    klass: str
    arrival_s: float
    budget_s: float
    stop_at: int = 0  # a stop string is complete at this many tokens; 0: never
    cancel_s: float = 0.0  # the client leaves so long after its arrival; 0: never

    @property
    def max_tokens(self) -> int:
        return len(self.truth)


def truth_of(prompt: Sequence[int], max_tokens: int) -> tuple[int, ...]:
    total, position, output = 0, 0, []
    for token in prompt:
        total = (total + kv_of(total, token, position)) & _MASK
        position += 1
    for _ in range(max_tokens):
        token = next_token(total)
        output.append(token)
        total = (total + kv_of(total, token, position)) & _MASK
        position += 1
    return tuple(output)


def make_jobs(rng: random.Random, count: int, over_s: float, budget_s: float) -> list[Job]:
    jobs = []
    for i in range(count):
        length = rng.choice((1, 2, rng.randint(3, 20), rng.randint(20, 160), rng.randint(100, 260)))
        if i % 24 == 23:
            length = TOO_LONG
        prompt = tuple(rng.randrange(VOCAB) for _ in range(length))
        max_tokens = rng.randint(1, 32)
        jobs.append(
            Job(
                name=f"r{i}",
                prompt=prompt,
                truth=truth_of(prompt, max_tokens),
                klass=rng.choice(("interactive", "interactive", "analysis", "batch")),
                arrival_s=rng.random() * over_s,
                budget_s=budget_s,
                stop_at=rng.randint(1, max_tokens) if rng.random() < 0.2 else 0,
                cancel_s=rng.random() * 3.0 if rng.random() < 0.1 else 0.0,
            )
        )
    return jobs


class Memory:
    """A pool's bytes: one span of BLOCK slots a block. Peers read it; only its owner writes."""

    def __init__(self, num_blocks: int) -> None:
        self.spans = [bytearray(BLOCK * SLOT_BYTES) for _ in range(num_blocks)]

    def write(self, block_ids: Sequence[int], position: int, value: int) -> None:
        offset = position % BLOCK * SLOT_BYTES
        self.spans[block_ids[position // BLOCK]][offset : offset + SLOT_BYTES] = value.to_bytes(SLOT_BYTES, "little")

    def total(self, block_ids: Sequence[int], num_tokens: int) -> int:
        """The sum of the KV of [0, num_tokens), read from the blocks."""
        full, rest = divmod(num_tokens, BLOCK)
        total = 0
        for block_id in block_ids[:full]:
            total += sum(memoryview(self.spans[block_id]).cast("Q"))
        if rest:
            total += sum(memoryview(self.spans[block_ids[full]]).cast("Q")[:rest])
        return total & _MASK

    def compute(self, block_ids: Sequence[int], tokens: Sequence[int], start: int, end: int) -> int:
        """Store the KV of tokens [start, end), reading only what is stored. Returns the sum of KV of [0, end)."""
        total = self.total(block_ids, start)
        for position in range(start, end):
            value = kv_of(total, tokens[position], position)
            self.write(block_ids, position, value)
            total = (total + value) & _MASK
        return total
