"""`python -m loadtest.eviction TRACE`: how much of a trace's prompts a pool finds again, by size and eviction policy.

The pool is the real one (`shared/kv/group_pool.py`), one block a hash of the trace; requests come one after the other
and their outputs are left out. `belady` knows the future and gives up what is needed last: nobody finds more.

A trace is lines of JSON with `hash_ids`, the prefix blocks of a prompt, as Mooncake publishes them.
"""

from __future__ import annotations

import argparse
import heapq
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import get_args

from shared.contracts.ids import BlockTag
from shared.kv.eviction import Eviction
from shared.kv.group_pool import KEPT, GroupPool

BELADY = "belady"
POLICIES: tuple[Eviction, ...] = get_args(Eviction)
DEFAULT_BLOCKS = (1000, 2000, 5000, 10_000)
_NEVER = sys.maxsize

Prompts = Sequence[Sequence[int]]


def read_prompts(lines: Iterable[str]) -> list[tuple[int, ...]]:
    """The blocks of every prompt of a trace. Raises ValueError naming the line that holds none."""
    prompts: list[tuple[int, ...]] = []
    for number, line in enumerate(lines, start=1):
        try:
            prompts.append(tuple(int(block) for block in json.loads(line)["hash_ids"]))
        except (ValueError, TypeError, KeyError) as exc:
            raise ValueError(f"line {number}: no JSON with hash_ids") from exc
    return prompts


def hit_rate(prompts: Prompts, num_blocks: int, eviction: Eviction) -> float:
    """The share of all prompts' blocks that the pool had."""
    pool = GroupPool(num_blocks, 1, eviction)
    found = 0
    for prompt in prompts:
        tags = [BlockTag(block.to_bytes(8, "little")) for block in prompt[:num_blocks]]
        hits = pool.match(tags, prompt)
        pool.share(hits, KEPT)
        new = pool.allocate(len(tags) - len(hits))
        for block_id, tag, block in zip(new, tags[len(hits) :], prompt[len(hits) :], strict=False):
            pool.tag(block_id, pool.generation(block_id), tag, (block,))
        pool.free([*hits, *new])
        found += len(hits)
    return found / sum(map(len, prompts))


def belady(prompts: Prompts, num_blocks: int) -> float:
    """The share of blocks found by who knows when each is needed next."""
    uses: dict[int, list[int]] = {}
    for number, prompt in enumerate(prompts):
        for block in prompt:
            uses.setdefault(block, []).append(number)
    for times in uses.values():
        times.reverse()
    needed: dict[int, int] = {}  # block held → request that needs it next
    queue: list[tuple[int, int, int]] = []  # the block needed last in front, the deepest of those alike
    found = 0
    for number, prompt in enumerate(prompts):
        found += next((i for i, block in enumerate(prompt) if block not in needed), len(prompt))
        for depth, block in enumerate(prompt):
            times = uses[block]
            while times and times[-1] <= number:
                times.pop()
            needed[block] = times[-1] if times else _NEVER
            heapq.heappush(queue, (-needed[block], -depth, block))
        while len(needed) > num_blocks:
            until, _, block = heapq.heappop(queue)
            if needed.get(block) == -until:
                del needed[block]
    return found / sum(map(len, prompts))


def compare(prompts: Prompts, sizes: Sequence[int]) -> list[tuple[int, Mapping[str, float]]]:
    """(blocks of the pool, hit rate by policy and of `belady`) of every size."""
    return [
        (size, {policy: hit_rate(prompts, size, policy) for policy in POLICIES} | {BELADY: belady(prompts, size)})
        for size in sizes
    ]


def table(found: Sequence[tuple[int, Mapping[str, float]]]) -> str:
    """The comparison as lines of text."""
    names = (*POLICIES, BELADY)
    lines = ["  blocks" + "".join(f"{name:>10}" for name in names)]
    lines += [f"{size:>8}" + "".join(f"{rates[name]:>10.3f}" for name in names) for size, rates in found]
    return "\n".join(lines)


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m loadtest.eviction", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("trace", type=Path, help="lines of JSON with hash_ids")
    parser.add_argument(
        "--blocks", type=int, nargs="+", default=DEFAULT_BLOCKS, help="sizes of the pool (default: %(default)s)"
    )
    options = parser.parse_args(argv)
    if min(options.blocks) < 1:
        parser.error("--blocks: a pool has at least one block")
    try:
        with options.trace.open() as lines:
            prompts = read_prompts(lines)
    except (OSError, ValueError) as exc:
        parser.error(f"{options.trace}: {exc}")
    if not any(prompts):
        parser.error(f"{options.trace}: no prompt has a block")
    total = sum(map(len, prompts))
    print(f"{len(prompts)} prompts, {total} blocks, {len({b for p in prompts for b in p})} of them different")
    print(table(compare(prompts, options.blocks)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
