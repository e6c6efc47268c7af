"""Traces as text: a list of requests, and one trace as a waterfall. Pure."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from shared.contracts.parts import SpanRecord
from shared.telemetry import attributes as a
from shared.telemetry.trace_buffer import TraceSummary, root_of
from shared.telemetry.trace_rows import TraceRow, length_s, trace_rows
from shared.telemetry.units import seconds

WIDTH = 100
_NAME, _SERVICE, _TIME = 26, 10, 8
_MAX_DEPTH = 5
_SERVICES = {"prefix-cache-index": "index"}
_COLUMNS = {
    "REQUEST": "<13",
    "AGE": ">6",
    "MODEL": "<15",
    "TENANT": "<9",
    "PATH": "<11",
    "PROMPT": ">6",
    "CACHED": ">7",
    "OUT": ">6",
    "TTFT": ">8",
    "TOTAL": ">8",
}
"""Columns of the list and how each is filled; the status comes last and takes what is left."""
_SPARED = ("CACHED", "MODEL", "TENANT", "PROMPT")
"""What a narrow terminal goes without, in this order."""
_STATUS = 10


def list_table(traces: Sequence[TraceSummary], now: float, width: int = WIDTH) -> str:
    """One line a request, newest first. `now`: unix seconds."""
    if not traces:
        return "no requests yet"
    columns = dict(_COLUMNS)
    for name in _SPARED:
        if sum(map(len, (f"{'':{form}}" for form in columns.values()))) + _STATUS > width:
            del columns[name]
    rows = [{name: name for name in columns} | {"AGE": "AGE  ", "STATUS": "STATUS"}]
    rows += [_cells(trace, now) for trace in traces]
    lines = ("".join(f"{row[name]:{form}}" for name, form in columns.items()) + f" {row['STATUS']}" for row in rows)
    return "\n".join(cut(line, width) for line in lines)


def _cells(t: TraceSummary, now: float) -> dict[str, str]:
    return {
        "REQUEST": t.request_id.removeprefix("req-")[:12] or t.trace_id[:12],
        "AGE": f"{_age(now - t.start_s)}  ",
        "MODEL": cut(t.model, 14),
        "TENANT": cut(t.tenant, 8),
        "PATH": t.path or "-",
        "PROMPT": str(t.prompt_tokens),
        "CACHED": str(t.cached_tokens),
        "OUT": str(t.completion_tokens),
        "TTFT": "-" if t.ttft_s is None else seconds(t.ttft_s),
        "TOTAL": seconds(t.total_s),
        "STATUS": t.status,
    }


def waterfall(spans: Sequence[SpanRecord], width: int = WIDTH) -> str:
    """The spans of one trace as a tree with bars on a common time axis, each with its reasons and facts below."""
    root = root_of(spans) or spans[0]
    rows = trace_rows(spans)
    length = length_s(rows)
    bar = max(10, width - _NAME - _SERVICE - _TIME - 3)
    lines = [
        cut(f"trace {root.trace_id}  request {root.attributes.get(a.REQUEST_ID, '-')}", width),
        cut(
            f"{root.attributes.get(a.MODEL, '-')}  tenant {root.attributes.get(a.TENANT, '-')}  "
            f"{len(rows)} spans  {seconds(length)}  {root.attributes.get(a.STATUS, root.status or 'ok')}",
            width,
        ),
        "",
    ]
    for row in rows:
        indent = "  " * min(row.depth, _MAX_DEPTH)
        name = cut(indent + row.name, _NAME - 1)
        service = cut(_SERVICES.get(row.service, row.service), _SERVICE - 1)
        drawn = draw_bar(row.start_s, row.start_s + row.duration_s, length, bar)
        mark = "!" if row.failed else " "
        lines.append(f"{name:<{_NAME}}{service:<{_SERVICE}}{seconds(row.duration_s):>{_TIME}}{mark} {drawn}".rstrip())
        for sentence in row.why:
            lines += _wrapped(sentence, f"{indent}  → ", width)
        lines += _fact_lines(row, f"{indent}    ", width)
    return "\n".join(lines)


def draw_bar(start: float, end: float, total: float, width: int) -> str:
    """A bar from `start` to `end` of `total` on `width` columns; at least one mark."""
    scale = width / total if total > 0 else 0.0
    first = min(width - 1, int(start * scale))
    last = max(first + 1, min(width, round(end * scale)))
    return "·" * first + "█" * (last - first) + "·" * (width - last)


def cut(text: str, width: int) -> str:
    """At most `width` characters, none of which a terminal would obey."""
    shown = "".join(char if char.isprintable() else "�" for char in text)
    return shown if len(shown) <= width else shown[: max(0, width - 1)] + "…"


def _wrapped(text: str, first: str, width: int) -> list[str]:
    lines = textwrap.wrap(text, max(20, width - len(first)), break_on_hyphens=False)
    return [cut((first if i == 0 else " " * len(first)) + line, width) for i, line in enumerate(lines)]


def _fact_lines(row: TraceRow, indent: str, width: int) -> list[str]:
    lines: list[str] = []
    line = ""
    for item in (f"{fact.name}={fact.text}" for fact in row.facts):
        if line and len(indent) + len(line) + 2 + len(item) > width:
            lines.append(indent + line)
            line = ""
        line = f"{line}  {item}" if line else item
    return [cut(text, width) for text in ([*lines, indent + line] if line else lines)]


def _age(value: float) -> str:
    value = max(0.0, value)
    return f"{value:.0f}s" if value < 100 else f"{value / 60:.0f}m" if value < 6000 else f"{value / 3600:.0f}h"
