"""Logs of a process: plain lines for people, or one JSON object a line. Never prompt text.

A line written inside a span names its trace, and the request where the span does. Where a request's span is not the
current one, `log.info(..., extra={"span": span})` says whose line it is.
"""

from __future__ import annotations

import json
import logging
import re
import sys
import time
from typing import Any

from opentelemetry import trace

from shared.lifecycle.plain_text import json_text, lines, one_line
from shared.telemetry import attributes as a
from shared.telemetry.spans import OwnSpan

_HEAD = re.compile(r"^(?=[0-9\[{])", re.MULTILINE)
"""How the lines of logs begin, ours and the servers'."""


class PlainFormatter(logging.Formatter):
    """`2026-01-31T12:03:04.123Z INFO    policy baton.bus: message  request=req-… trace=…`, UTC."""

    converter = staticmethod(time.gmtime)

    def __init__(self, service: str) -> None:
        super().__init__(
            f"%(asctime)s.%(msecs)03dZ %(levelname)-7s {service} %(name)s: %(message)s", "%Y-%m-%dT%H:%M:%S"
        )

    def formatMessage(self, record: logging.LogRecord) -> str:
        ids = trace_ids(record)
        marks = [
            f"{short}={ids[name]}" for short, name in (("request", "request_id"), ("trace", "trace_id")) if name in ids
        ]
        return "  ".join((one_line(super().formatMessage(record)), *([" ".join(marks)] if marks else [])))

    def formatException(self, ei: Any) -> str:
        # what an exception says may look like a line of its own
        return _HEAD.sub("  ", lines(super().formatException(ei)))


class JsonFormatter(logging.Formatter):
    """One object a line: time (unix seconds), level, service, logger, message, trace_id, span_id, request_id, error."""

    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": round(record.created, 6),
            "level": record.levelname.lower(),
            "service": self._service,
            "logger": record.name,
            "message": record.getMessage(),
            **trace_ids(record),
        }
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json_text(json.dumps(line, ensure_ascii=False))


def trace_ids(record: logging.LogRecord) -> dict[str, str]:
    """`trace_id`, `span_id` and `request_id` of the span a line belongs to, as far as there are any."""
    span: trace.Span = getattr(record, "span", None) or trace.get_current_span()
    context = span.get_span_context()
    if not context.is_valid:
        return {}
    ids = {"trace_id": f"{context.trace_id:032x}", "span_id": f"{context.span_id:016x}"}
    if isinstance(span, OwnSpan) and isinstance(request := span.attributes.get(a.REQUEST_ID), str):
        ids["request_id"] = request
    return ids


def set_up_logs(service: str, log_format: str, level: str) -> None:
    """Send all logs of this process to stderr. `log_format` is plain or json, `level` debug to error."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter(service) if log_format == "json" else PlainFormatter(service))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    # httpx and friends tell every request at INFO.
    for name in ("httpx", "httpcore", "asyncio", "uvicorn.access"):
        logging.getLogger(name).setLevel(max(logging.WARNING, logging.getLogger().level))
