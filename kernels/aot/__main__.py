"""`python -m kernels.aot`: compile what differs from the committed table, and check every row. See --help."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from fnmatch import fnmatchcase

from kernels.aot import table
from kernels.aot.compiler import compile_launch, content_id
from kernels.aot.launches import record
from kernels.aot.table import Row
from kernels.aot.variants import Variant, variants
from kernels.chip import pretend


def rows_of(variant: Variant, known: dict[tuple[str, str, str, str], Row]) -> Iterator[tuple[Row, bool]]:
    """A variant's rows, and whether each was compiled now."""
    for chip in variant.chips:
        with pretend(chip):
            launches = record(variant.call)
        name = f"sm_{chip[0]}{chip[1]}"
        for launch in launches:
            content = content_id(launch, chip)
            kernel = launch.kernel.fn.__name__
            row = known.get((variant.name, kernel, name, content))
            if row is not None:
                yield row, False
                continue
            took = compile_launch(launch, chip)
            sizes = took.registers, took.spilled, took.shared, took.loop.instructions, took.loop.in_turn
            yield Row(variant.name, kernel, name, content, *sizes), True


def count(chosen: list[Variant]) -> None:
    """Compile, and print each loop of matrix products: instructions a warp issues in one turn, by kind."""
    for variant in chosen:
        for chip in variant.chips:
            with pretend(chip):
                launches = record(variant.call)
            for launch in launches:
                loop = compile_launch(launch, chip).loop
                if loop.instructions:
                    kinds = " ".join(f"{kind} {number}" for kind, number in loop.kinds)
                    name = f"{variant.name:48} {launch.kernel.fn.__name__:20} sm_{chip[0]}{chip[1]}"
                    print(f"{name} {loop.instructions:5}: {kinds}", flush=True)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m kernels.aot", description=__doc__)
    parser.add_argument("--write", action="store_true", help="bring the table up to date")
    parser.add_argument("--only", default="*", metavar="PATTERN", help="variants whose name matches this shell pattern")
    parser.add_argument("--count", action="store_true", help="only count instructions in the loops of products")
    options = parser.parse_args(argv)
    committed = table.load()
    known = {row.key: row for row in committed}
    chosen = [variant for variant in variants() if fnmatchcase(variant.name, options.only)]
    if options.count:
        count(chosen)
        return 0
    rows: list[Row] = []
    wrong: list[str] = []
    compiled = 0
    for variant in chosen:
        for row, is_new in rows_of(variant, known):
            rows.append(row)
            compiled += is_new
            wrong += table.faults(row, variant.may_spill)
            if is_new:
                sizes = f"{row.registers:4} {row.spilled:5} {row.shared:7} {row.loop:5}"
                print(f"{row.variant:48} {row.kernel:20} {row.chip} {sizes}", flush=True)
    if options.write:
        names = {variant.name for variant in chosen}
        every = {variant.name for variant in variants()}
        table.save([*rows, *(row for row in committed if row.variant in every - names)])
    elif compiled:
        wrong.append(f"{compiled} rows are not those of {table.FILE.name}: run `python -m kernels.aot --write`")
    print(f"{len(rows)} rows, {compiled} compiled")
    for line in wrong:
        print(line, file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
