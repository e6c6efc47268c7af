"""`python -m shared.telemetry.metric_docs` writes the table of `docs/metrics.md` anew; a test holds it to the code."""

from __future__ import annotations

import sys
from pathlib import Path

from shared.telemetry.metric import ALL, Metric
from shared.telemetry.metric_names import TABLE

PAGE = Path(__file__).resolve().parents[2] / "docs" / "metrics.md"
BEGIN, END = "<!-- table: begin -->", "<!-- table: end -->"


def table() -> str:
    """Markdown of all metrics: a row each, and below it the values of labels that have closed sets."""
    rows = ["| metric | type | labels | served by | meaning |", "|---|---|---|---|---|", *(_row(m) for m in TABLE)]
    labels = [line for metric in TABLE for line in _values(metric)]
    return "\n".join((*rows, "", "Values of labels, besides `other`:", "", *labels))


def with_table(page: str) -> str:
    """The page with the table in its place. Raises ValueError when the page has none."""
    head, begin, rest = page.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"{PAGE}: {BEGIN} and {END} must stand around the table")
    return f"{head}{BEGIN}\n\n{table()}\n\n{END}{tail}"


def _row(metric: Metric) -> str:
    services = "all" if metric.services == ALL else ", ".join(metric.services)
    labels = ", ".join(f"`{label}`" for label in metric.labels)
    unit = f", {metric.unit}" if metric.unit else ""
    return f"| `{metric.exposed}` | {metric.kind}{unit} | {labels} | {services} | {metric.meaning} |"


def _values(metric: Metric) -> list[str]:
    closed = {label: values for label, values in metric.labels.items() if values}
    return [
        f"- `{metric.exposed}` `{label}`: {', '.join(f'`{value}`' for value in values)}"
        for label, values in closed.items()
    ]


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text()))
    sys.exit(0)
