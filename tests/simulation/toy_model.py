"""A model small enough to simulate: one 64-bit number of KV a token and layer group; outputs depend on all of them.

A wrong byte anywhere in a sequence's KV changes every token after it, as in a real model; the truth of a request is
what the same arithmetic gives on a plain list.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shared.contracts.ids import BlockTag
from shared.contracts.parts import GroupTags

BLOCKS = (16, 32)  # tokens in a block of each layer group
SLOT_BYTES = 8
VOCAB = 50_000
TOO_LONG = 2_000  # tokens: no pool of the simulator holds it
_MASK = (1 << 64) - 1


def kv_of(before: int, token: int, position: int) -> int:
    """The KV of a token, from the sum of all KV before it."""
    x = (before ^ (token * 0x9E3779B97F4A7C15) ^ (position * 0xC2B2AE3D27D4EB4F)) & _MASK
    x ^= x >> 29
    return (x * 0xBF58476D1CE4E5B9) & _MASK


def kv_sum(value: int) -> int:
    """What a token adds to the sum: its KV in both groups."""
    return (value + second(value)) & _MASK


def second(value: int) -> int:
    """The KV of the second group, from that of the first."""
    return (value * 0x9E3779B97F4A7C15 + 1) & _MASK


def next_token(total: int, choice: int) -> int:
    """The output token of a choice, from the sum of all KV up to the last token."""
    total = (total + choice * 0xD1B54A32D192ED03) & _MASK
    return (total ^ (total >> 31)) % VOCAB


def tags_of(tokens: Sequence[int]) -> tuple[GroupTags, ...]:
    """What the index answers: tags of the leading full blocks, capped at floor((n - 1) / size)."""
    groups = []
    for group, size in enumerate(BLOCKS):
        digest, tags = hashlib.blake2b(bytes([group]), digest_size=16), []
        for end in range(size, len(tokens), size):
            digest.update(repr(tokens[end - size : end]).encode())
            tags.append(BlockTag(digest.digest()))
        groups.append(GroupTags(group, tuple(tags)))
    return tuple(groups)


@dataclass(frozen=True)
class Job:
    """One client's request and what must come of it."""

    name: str
    prompt: tuple[int, ...]
    truths: tuple[tuple[int, ...], ...]  # per choice, all max_tokens outputs
    klass: str
    arrival_s: float
    budget_s: float
    stop_at: int = 0  # a stop string is complete at this many tokens; 0: never
    cancel_s: float = 0.0  # the client leaves so long after its arrival; 0: never

    @property
    def max_tokens(self) -> int:
        return len(self.truths[0])


def truth_of(prompt: Sequence[int], max_tokens: int, choice: int = 0) -> tuple[int, ...]:
    total, position, output = 0, 0, []
    for token in prompt:
        total = (total + kv_sum(kv_of(total, token, position))) & _MASK
        position += 1
    for _ in range(max_tokens):
        token = next_token(total, choice)
        output.append(token)
        total = (total + kv_sum(kv_of(total, token, position))) & _MASK
        position += 1
    return tuple(output)


def make_jobs(rng: random.Random, count: int, over_s: float, budget_s: float) -> list[Job]:
    jobs = []
    shared = [[rng.randrange(VOCAB) for _ in range(rng.randint(32, 140))] for _ in range(4)]
    for i in range(count):
        length = rng.choice((1, 2, rng.randint(3, 20), rng.randint(20, 160), rng.randint(100, 260)))
        if i % 24 == 23:
            length = TOO_LONG
        begin = rng.choice(shared)[:length] if rng.random() < 0.5 else []
        prompt = (*begin, *(rng.randrange(VOCAB) for _ in range(length - len(begin))))
        long = i % 40 == 7  # runs for longer than any lease
        max_tokens = rng.randint(700, 1000) if long else rng.randint(1, 32)
        choices = 3 if rng.random() < 0.15 and not long else 1
        jobs.append(
            Job(
                name=f"r{i}",
                prompt=prompt,
                truths=tuple(truth_of(prompt, max_tokens, choice) for choice in range(choices)),
                klass=rng.choice(("interactive", "interactive", "analysis", "batch")),
                arrival_s=rng.random() * over_s,
                budget_s=budget_s,
                stop_at=rng.randint(1, max_tokens) if rng.random() < 0.2 else 0,
                cancel_s=rng.random() * 3.0 if rng.random() < 0.1 else 0.0,
            )
        )
    return jobs


class Memory:
    """A pool's bytes: per layer group, one span of slots a block. Peers read it; only its owner writes."""

    def __init__(self, num_blocks: Sequence[int]) -> None:
        self._words = [np.zeros((n, size), np.uint64) for n, size in zip(num_blocks, BLOCKS, strict=True)]
        self.spans = [[memoryview(row.data).cast("B") for row in words] for words in self._words]

    def total(self, tables: Sequence[Sequence[int]], num_tokens: int) -> int:
        """The sum of the KV of [0, num_tokens), read from the blocks of both groups."""
        total = 0
        for words, size, table in zip(self._words, BLOCKS, tables, strict=True):
            used = words[table[: -(-num_tokens // size)]].reshape(-1)[:num_tokens]
            total += int(used.sum(dtype=np.uint64))  # wraps, as it should
        return total & _MASK

    def compute(self, tables: Sequence[Sequence[int]], tokens: Sequence[int], start: int, end: int) -> int:
        """Store the KV of tokens [start, end), reading only what is stored. Returns the sum of KV of [0, end)."""
        total = self.total(tables, start)
        for position in range(start, end):
            value = kv_of(total, tokens[position], position)
            for group, kv in enumerate((value, second(value))):
                block, offset = divmod(position, BLOCKS[group])
                offset *= SLOT_BYTES
                span = self.spans[group][tables[group][block]]
                span[offset : offset + SLOT_BYTES] = kv.to_bytes(SLOT_BYTES, "little")
            total = (total + kv_sum(value)) & _MASK
        return total
