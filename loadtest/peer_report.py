"""Figures of `./baton bench peers`: medians of undisturbed samples, ratios within rounds, and the table. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from loadtest.machine import IDLE_CORES
from loadtest.peer_plan import BATON
from loadtest.report import percentile

MIN_CLEAN = 2
"""A figure of fewer undisturbed samples is marked."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One contestant's run of a cell in a round.

    Attributes:
        result: a `LoopResult`'s fields.
        foreign_cores: kept busy meanwhile by anything but the contestant and the client.
        cpu_s: processor seconds of the contestant; None where its start is among them.
    """

    cell: str
    contestant: str
    number: int
    build: str
    result: dict[str, Any]
    foreign_cores: float
    cpu_s: float | None

    @property
    def clean(self) -> bool:
        return self.foreign_cores <= IDLE_CORES


def rate(sample: Sample) -> float:
    """Output tokens a second: of the whole loop, or of a batch while all of it was at its outputs."""
    result = sample.result
    if is_batch(sample.cell):
        return float(result["full_tokens"] / result["full_s"]) if result["full_s"] else 0.0
    return float(result["output_tokens"] / result["seconds"])


def is_batch(cell: str) -> bool:
    """Whether a cell of that name is a static batch."""
    return cell.split("/")[2] == "batch"


def figures(samples: Sequence[Sample]) -> list[dict[str, Any]]:
    """A row a cell and contestant: medians over the clean samples, or over all where there is none."""
    rows = []
    cells = list(dict.fromkeys(one.cell for one in samples))
    pairs = dict.fromkeys((one.cell, one.contestant) for one in samples)
    for cell, name in sorted(pairs, key=lambda pair: cells.index(pair[0])):
        every = [one for one in samples if (one.cell, one.contestant) == (cell, name)]
        clean = [one for one in every if one.clean]
        used = clean or every
        rows.append(
            {
                "cell": cell,
                "contestant": name,
                "build": used[0].build,
                "tokens_per_s": _median(map(rate, used)),
                "prefill_tokens_per_s": _median(map(_prefill_rate, used)) if is_batch(cell) else None,
                "ttft_p50_s": _median(percentile(one.result["first_s"], 50) for one in used),
                "itl_p50_s": _median(percentile(one.result["gaps_s"], 50) for one in used),
                "itl_p95_s": _median(percentile(one.result["gaps_s"], 95) for one in used),
                "cpu_s_per_token": _median(
                    None if one.cpu_s is None else one.cpu_s / one.result["output_tokens"] for one in used
                ),
                "spread": _spread([rate(one) for one in used]),
                "clean": len(clean),
                "dropped": len(every) - len(clean),
            }
        )
    return rows


def ratios(samples: Sequence[Sample]) -> list[dict[str, Any]]:
    """Baton over each peer, cell by cell: the median over the rounds in which both were undisturbed.

    `clean` is the number of those rounds; where there are none, all rounds count.
    """
    rows = []
    peers = dict.fromkeys((one.cell, one.contestant) for one in samples if one.contestant != BATON)
    for cell, peer in peers:
        ours, theirs = _by_round(samples, cell, BATON), _by_round(samples, cell, peer)
        both = [number for number in ours if number in theirs]
        clean = [number for number in both if ours[number].clean and theirs[number].clean]
        used = clean or both
        if not used:
            continue

        pairs = [(ours[number], theirs[number]) for number in used]
        rows.append(
            {
                "cell": cell,
                "peer": peer,
                "throughput": _ratio(pairs, rate),
                "prefill": _ratio(pairs, _prefill_rate) if is_batch(cell) else None,
                "ttft_p50": _ratio(pairs, lambda one: percentile(one.result["first_s"], 50)),
                "itl_p95": _ratio(pairs, lambda one: percentile(one.result["gaps_s"], 95)),
                "clean": len(clean),
            }
        )
    return rows


def text_of(report: dict[str, Any]) -> str:
    """The tables."""
    machine = report["machine"]
    lines = [f"{machine['cpu']}, {machine['cores']} cores, {machine['date']}; {report['threads']} threads"]
    ratio = {(row["cell"], row["peer"]): row for row in report["ratios"]}
    cell = ""
    for row in report["figures"]:
        if row["cell"] != cell:
            cell = row["cell"]
            lines += ["", f"{cell:36}{'tokens/s':>9}{'prefill/s':>10}{'TTFT p50':>10}{'ITL p50':>9}{'p95 ms':>8}"]
            lines[-1] += f"{'CPU ms':>8}{'ratio':>7}  samples"
        lines.append(_line(row, ratio.get((cell, row["contestant"]))))
    lines += ["", *floor_lines(report.get("floors", []))]
    lines += [f"build of {name}: {build}" for name, build in _builds(report["figures"]).items()]
    lines += [f"not measured: {name}" for name in report["missing"]]
    lines += [f"failed: {name}: {said.splitlines()[-1] if said else ''}" for name, said in report["failed"].items()]
    lines.append("ratio: Baton's tokens a second over this peer's, within rounds; CPU ms: of its processes, a token")
    if any(row["clean"] < MIN_CLEAN for row in report["figures"]):
        lines.append(f"BUSY: fewer than {MIN_CLEAN} samples with others below {IDLE_CORES:g} cores: no measure")
    return "\n".join(lines)


def floor_lines(floors: Iterable[dict[str, Any]]) -> list[str]:
    """Shares of what the machine gave in the same run."""
    lines = []
    for one in floors:
        lines.append(f"{one['model']}, {one['quant']}: copy {one['copy_gb_s']:.1f} GB/s")
        if one["sweep_gb_s"]:
            lines[-1] += f", weights of {one['weight_bytes'] / 1e6:.0f} MB swept at {one['sweep_gb_s']:.1f} GB/s"
        for row in one["figures"]:
            if row["native"]:
                share = "" if row["share"] is None else f", {row['share']:.2f} of the sweep's speed"
                busy = "" if row["idle"] else "  BUSY"
                lines.append(f"  {row['cell']:16}{row['native']:>9.1f} tokens/s{share}{busy}")
    return [*lines, ""] if lines else []


def _line(row: dict[str, Any], ratio: dict[str, Any] | None) -> str:
    def cell(value: float | None, form: str, width: int) -> str:
        return f"{'' if value is None else format(value, form):>{width}}"

    def milli(value: float | None) -> float | None:
        return None if value is None else value * 1e3

    values = [
        cell(row["tokens_per_s"], ".1f", 9),
        cell(row["prefill_tokens_per_s"], ".0f", 10),
        cell(row["ttft_p50_s"], ".2f", 10),
        cell(milli(row["itl_p50_s"]), ".1f", 9),
        cell(milli(row["itl_p95_s"]), ".1f", 8),
        cell(milli(row["cpu_s_per_token"]), ".2f", 8),
        cell(ratio["throughput"] if ratio else None, ".2f", 7),
    ]
    busy = "  BUSY" if row["clean"] < MIN_CLEAN else ""
    return f"  {row['contestant']:34}{''.join(values)}  {row['clean']} clean, {row['dropped']} dropped{busy}"


def _builds(rows: Iterable[dict[str, Any]]) -> dict[str, str]:
    found: dict[str, dict[str, None]] = {}
    for row in rows:
        found.setdefault(row["contestant"], {})[row["build"]] = None
    return {name: "; ".join(builds) for name, builds in found.items()}


def _by_round(samples: Iterable[Sample], cell: str, name: str) -> dict[int, Sample]:
    """The last sample of each round, a clean one where there is one."""
    found: dict[int, Sample] = {}
    for one in samples:
        if (one.cell, one.contestant) == (cell, name) and (one.clean or not _is_clean(found.get(one.number))):
            found[one.number] = one
    return found


def _is_clean(sample: Sample | None) -> bool:
    return sample is not None and sample.clean


def _prefill_rate(sample: Sample) -> float | None:
    result = sample.result
    return result["prompt_tokens"] / result["prefill_s"] if result["prefill_s"] else None


def _ratio(pairs: Iterable[tuple[Sample, Sample]], of: Callable[[Sample], float | None]) -> float | None:
    """Median over pairs of the first's figure over the second's; a pair without one of them is left out."""
    known = [(of(ours), of(theirs)) for ours, theirs in pairs]
    return _median(ours / theirs for ours, theirs in known if ours and theirs)


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None


def _spread(values: Sequence[float]) -> float | None:
    """Largest less smallest, as a share of the median."""
    return (max(values) - min(values)) / median(values) if len(values) > 1 and median(values) else None
