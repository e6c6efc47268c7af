"""Traces as text: a list of requests, and one trace as a waterfall. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shared.contracts.parts import SpanRecord
from shared.telemetry import attributes as a
from shared.telemetry.trace_buffer import TraceSummary

WIDTH = 100
_NAME, _SERVICE, _TIME = 26, 10, 8
_HIDDEN = {a.REQUEST_ID, a.TENANT, a.MODEL, a.STATUS, a.KIND, a.STREAM}
_SERVICES = {"prefix-cache-index": "index"}


def list_table(traces: Sequence[TraceSummary], now: float) -> str:
    """One line a request, newest first. `now`: unix seconds."""
    if not traces:
        return "no requests yet"
    head = f"{'REQUEST':<13}{'AGE':>4}  {'MODEL':<15}{'TENANT':<9}{'PATH':<11}{'PROMPT':>6}{'CACHED':>7}{'OUT':>6}"
    lines = [f"{head}{'TTFT':>8}{'TOTAL':>8} STATUS"]
    for t in traces:
        request = t.request_id.removeprefix("req-")[:12] or t.trace_id[:12]
        line = (
            f"{request:<13}{_age(now - t.start_s):>4}  {_cut(t.model, 14):<15}{_cut(t.tenant, 8):<9}"
            f"{t.path or '-':<11}{t.prompt_tokens:>6}{t.cached_tokens:>7}{t.completion_tokens:>6}"
            f"{'-' if t.ttft_s is None else seconds(t.ttft_s):>8}{seconds(t.total_s):>8} {t.status}"
        )
        lines.append(_cut(line, WIDTH))
    return "\n".join(lines)


def waterfall(spans: Sequence[SpanRecord], width: int = WIDTH) -> str:
    """The spans of one trace as a tree with bars on a common time axis, each with its attributes below."""
    start, end = min(s.start_ns for s in spans), max(s.end_ns for s in spans)
    bar = max(10, width - _NAME - _SERVICE - _TIME - 3)
    root = next((s for s in spans if s.name == "gateway.request"), spans[0])
    lines = [
        _cut(f"trace {root.trace_id}  request {root.attributes.get(a.REQUEST_ID, '-')}", width),
        _cut(
            f"{root.attributes.get(a.MODEL, '-')}  tenant {root.attributes.get(a.TENANT, '-')}  "
            f"{len(spans)} spans  {seconds((end - start) / 1e9)}  {root.attributes.get(a.STATUS, root.status or 'ok')}",
            width,
        ),
        "",
    ]
    for span, depth in in_tree_order(spans):
        name = _cut("  " * min(depth, 5) + span.name, _NAME - 1)
        service = _cut(_SERVICES.get(span.service, span.service), _SERVICE - 1)
        took = seconds((span.end_ns - span.start_ns) / 1e9)
        mark = "!" if span.status == "error" else " "
        drawn = draw_bar(span.start_ns - start, span.end_ns - start, end - start, bar)
        lines.append(f"{name:<{_NAME}}{service:<{_SERVICE}}{took:>{_TIME}}{mark} {drawn}".rstrip())
        lines += _attribute_lines(span, "  " * min(depth, 5) + "    ", width)
    return "\n".join(lines)


def in_tree_order(spans: Sequence[SpanRecord]) -> list[tuple[SpanRecord, int]]:
    """Spans with their depths: children after their parent in order of start; one whose parent is lost is a root."""
    known = {span.span_id for span in spans}
    children: dict[str, list[SpanRecord]] = {}
    for span in sorted(spans, key=lambda s: (s.start_ns, -s.end_ns, s.span_id)):
        children.setdefault(span.parent_id if span.parent_id in known else "", []).append(span)
    ordered: list[tuple[SpanRecord, int]] = []
    stack = [(span, 0) for span in reversed(children.get("", []))]
    while stack:
        span, depth = stack.pop()
        ordered.append((span, depth))
        stack += [(child, depth + 1) for child in reversed(children.get(span.span_id, []))]
    return ordered


def draw_bar(start: int, end: int, total: int, width: int) -> str:
    """A bar from `start` to `end` of `total` on `width` columns; at least one mark."""
    scale = width / max(1, total)
    first = min(width - 1, int(start * scale))
    last = max(first + 1, min(width, round(end * scale)))
    return "·" * first + "█" * (last - first) + "·" * (width - last)


def seconds(value: float) -> str:
    """A duration in at most 7 characters."""
    if value < 0.0995:
        return f"{value * 1000:.1f}ms"
    return f"{value * 1000:.0f}ms" if value < 0.9995 else f"{value:.2f}s" if value < 100 else f"{value:.0f}s"


def _attribute_lines(span: SpanRecord, indent: str, width: int) -> list[str]:
    items = [_attribute(n, v) for n, v in span.attributes.items() if n not in _HIDDEN and v not in ("", False)]
    lines: list[str] = []
    line = ""
    for item in items:
        if line and len(indent) + len(line) + 2 + len(item) > width:
            lines.append(indent + line)
            line = ""
        line = f"{line}  {item}" if line else item
    return [_cut(text, width) for text in ([*lines, indent + line] if line else lines)]


def _attribute(name: str, value: Any) -> str:
    short = name.removeprefix("baton.").removeprefix("estimate.")
    if isinstance(value, float) and short.endswith("_s"):
        return f"{short.removesuffix('_s')}={seconds(value)}"
    if short == "bytes" and isinstance(value, int):
        return f"bytes={_size(value)}"
    return f"{short}={value:.3g}" if isinstance(value, float) else f"{short}={value}"


def _size(count: int) -> str:
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= scale:
            return f"{count / scale:.1f}{unit}"
    return f"{count}B"


def _age(value: float) -> str:
    value = max(0.0, value)
    return f"{value:.0f}s" if value < 100 else f"{value / 60:.0f}m" if value < 6000 else f"{value / 3600:.0f}h"


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"
