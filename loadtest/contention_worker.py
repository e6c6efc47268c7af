"""A worker of `loadtest.contention`: runs decode steps, prefill steps, or both by turns, for as long as it is told.

Reads `[seconds, shared]` a line and answers with the steps of that time; says `[]` once it is loaded.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import NamedTuple

KINDS = ("decode", "prefill")
SEQUENCES, CONTEXT, CHUNK, BLOCK = 8, 128, 256, 32


class Step(NamedTuple):
    """When a step began and ended, on the clock that all processes share."""

    kind: str
    begin: float
    end: float


def main(work: str, model_dir: Path, dtype: str, quant: str, folder: Path) -> None:
    from loadtest.contention_steps import open_steps

    kinds = KINDS if work == "both" else (work,)
    with open_steps(work, kinds, model_dir, dtype, quant, folder) as run:
        print("[]", flush=True)
        for line in sys.stdin:
            seconds, shared = json.loads(line)
            steps = list[Step]()
            spent = dict.fromkeys(kinds, 0.0)
            start = time.monotonic()
            while time.monotonic() < start + seconds or min(spent.values()) == 0:
                kind = min(kinds, key=lambda each: spent[each])  # whichever has had less time
                begin = time.monotonic()
                run(kind, shared)
                steps.append(Step(kind, begin, time.monotonic()))
                spent[kind] += steps[-1].end - begin
            print(json.dumps(steps), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3], sys.argv[4], Path(sys.argv[5]))
