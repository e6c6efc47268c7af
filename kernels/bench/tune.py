"""`python -m kernels.bench tune`: launch shapes of attention, measured; none of them can change a bit.

Every shape that `triton_tuning.candidates` allows is timed at the goals' shapes. What was tried goes into tried.jsonl
and is not tried again on the same card with the same versions. The best by kind of pool go into tuning_smXY.json,
which is used once it lies in kernels/attention (its entries are checked there, and it is part of the `numerics` id).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from kernels.attention.triton_tuning import Shape, candidates, decoded, forced, prefilled
from kernels.bench.journal import Journal, unwritable
from kernels.bench.machine import machine
from kernels.bench.row import Case
from kernels.bench.timing import seconds
from kernels.chip import capability

HEAD_DIM = 128  # of the bench's cases
Trial = tuple[bool, bool, Shape]
"""Whether the pool is of 8 bits, whether the case is prefill, and what is tried."""


def trials(device: torch.device) -> Iterator[Trial]:
    """Each shape once for decode and once for prefill, less those that differ only in what the case does not use."""
    for quantized in (False, True):
        for prefill in (False, True):
            seen: set[tuple[int, ...]] = set()
            for shape in candidates(HEAD_DIM, quantized, device):
                used = prefilled(shape) if prefill else decoded(shape)
                if used not in seen and not (prefill and not shape.wide_rows):
                    seen.add(used)
                    yield quantized, prefill, shape


def cases_of(quantized: bool, prefill: bool) -> list[Case]:
    """What a shape is timed at; int8 stands for both kinds of 8 bits, which a card may not have."""
    from kernels.bench import attention

    if prefill:
        return [attention.prefill(1, 4096, 4096), attention.prefill(1, 4096, 4096, block_size=64)]
    kv_dtype = torch.int8 if quantized else torch.bfloat16
    return [attention.decode(32, 4096, 1, kv_dtype), attention.decode(1, 131072, 1, kv_dtype)]


def try_all(journal: Journal, device: torch.device, timed: Callable[[Case], float]) -> None:
    """Time what the journal does not hold yet. A shape that does not run is noted, and never chosen."""
    known = {_key(entry) for entry in journal.read()}
    for quantized, prefill, shape in trials(device):
        entry: dict[str, Any] = {"quantized": quantized, "prefill": prefill, "tried": asdict(shape)}
        if _key(entry) in known:
            continue
        with forced(shape):
            try:
                taken = [timed(case) for case in cases_of(quantized, prefill)]
            except Exception as exc:  # whatever a compiler or a card says to a shape, the next is tried
                journal.append(**entry, failed=f"{type(exc).__name__}: {str(exc)[:200]}")
                continue
        journal.append(**entry, seconds=taken)
        print(f"{'int8' if quantized else 'bf16'} {'prefill' if prefill else 'decode'} {shape} {taken}", flush=True)


def best(entries: Sequence[Mapping[str, Any]], device: torch.device) -> list[dict[str, Any]]:
    """Entries of a table: what decodes fastest with what prefills fastest, by the product of each one's times."""
    table = []
    for quantized in (False, True):
        usual = asdict(next(candidates(HEAD_DIM, quantized, device)))
        decode, wide = (_fastest(entries, quantized, prefill) or usual for prefill in (False, True))
        chosen = usual | {"split_stages": decode["split_stages"]}
        chosen |= {name: wide[name] for name in ("wide_rows", "wide_warps", "wide_stages")}
        if chosen != usual:
            table.append({"head_dim": HEAD_DIM, "quantized": quantized, **chosen})
    return table


def _fastest(entries: Sequence[Mapping[str, Any]], quantized: bool, prefill: bool) -> dict[str, Any] | None:
    timed = [e for e in entries if (e.get("quantized"), e.get("prefill")) == (quantized, prefill) and "seconds" in e]
    if not timed:
        return None
    fastest = min(timed, key=lambda entry: _product(entry["seconds"]))
    tried: dict[str, Any] = fastest["tried"]
    return tried


def _product(times: Sequence[float]) -> float:
    result = 1.0
    for time in times:
        result *= time
    return result


def _key(entry: Mapping[str, Any]) -> str:
    return json.dumps([entry.get("quantized"), entry.get("prefill"), entry.get("tried")], sort_keys=True)


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m kernels.bench tune", description=__doc__)
    parser.add_argument(
        "--folder", type=Path, required=True, help="of tried.jsonl and the table, made where there is none"
    )
    options = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("no GPU here: nothing to measure", file=sys.stderr)
        return 1
    device = torch.device("cuda", 0)
    journal = Journal(options.folder / "tried.jsonl", machine())
    if why := unwritable(journal.file):
        print(why, file=sys.stderr)
        return 1

    def timed(case: Case) -> float:
        took = seconds(case.make()[0])
        torch.cuda.empty_cache()
        return took

    try:
        try_all(journal, device, timed)
    finally:
        write(journal, options.folder, device)
    return 0


def write(journal: Journal, folder: Path, device: torch.device) -> Path:
    """The table of what is best so far, for this card's chip."""
    major, minor = capability(device)
    file = folder / f"tuning_sm{major}{minor}.json"
    lines = ",\n".join(json.dumps(entry) for entry in best(journal.read(), device))
    file.write_text(f"[\n{lines}\n]\n" if lines else "[]\n")
    return file
