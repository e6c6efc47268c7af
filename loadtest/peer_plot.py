"""Draws a report of `./baton bench peers`, from standard input to the PNG named. Run as a file, beside matplotlib."""

from __future__ import annotations

import importlib
import json
import sys
from typing import Any

COLOURS = {"baton": "#d1495b", "vllm": "#30638e", "llama.cpp": "#8d96a3", "transformers": "#edae49"}
WIDTH, LEAST, HEIGHT, BAR = 4.2, 7.0, 3.0, 0.8


def panels(report: dict[str, Any]) -> dict[str, dict[str, dict[str, float]]]:
    """`model/quant/way` → contestant → width such as "c8" → tokens a second. Pure."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    for row in report["figures"]:
        panel, _, width = row["cell"].rpartition("/")
        found.setdefault(panel, {}).setdefault(row["contestant"], {})[width] = row["tokens_per_s"]
    return found


def main() -> int:
    """Draw; exit code 0."""
    report = json.load(sys.stdin)
    importlib.import_module("matplotlib").use("Agg")
    plt = importlib.import_module("matplotlib.pyplot")
    found = panels(report)
    columns = min(3, max(1, len(found)))
    rows = -(-len(found) // columns) or 1
    figure, axes = plt.subplots(rows, columns, figsize=(max(LEAST, WIDTH * columns), HEIGHT * rows), squeeze=False)
    for axis in axes.flat[len(found) :]:
        axis.set_axis_off()
    for axis, (title, contestants) in zip(axes.flat, found.items(), strict=False):
        _panel(axis, title, contestants)
    machine = report["machine"]
    figure.suptitle(f"Output tokens a second. {machine['cpu']}, {machine['cores']} cores, {machine['date']}", size=10)
    figure.tight_layout()
    figure.savefig(sys.argv[1], dpi=110)
    return 0


def _panel(axis: Any, title: str, contestants: dict[str, dict[str, float]]) -> None:
    widths = sorted({width for row in contestants.values() for width in row}, key=lambda text: int(text[1:]))
    each = BAR / len(contestants)
    for place, (name, row) in enumerate(contestants.items()):
        at = [widths.index(width) - BAR / 2 + each * (place + 0.5) for width in row]
        bars = axis.bar(at, list(row.values()), each, label=name, color=COLOURS.get(name))
        axis.bar_label(bars, fmt="%.0f", fontsize=7)
    axis.set_xticks(range(len(widths)), widths)
    axis.set_title(title, size=9)
    axis.margins(y=0.45)
    axis.legend(fontsize=7, loc="upper center", ncols=len(contestants))
    axis.spines[["top", "right"]].set_visible(False)


if __name__ == "__main__":
    sys.exit(main())
