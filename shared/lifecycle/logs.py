"""Logs of a process: plain lines for people, or one JSON object a line. Never prompt text."""

from __future__ import annotations

import json
import logging
import sys
import time


class PlainFormatter(logging.Formatter):
    """`12:03:04.123 INFO  policy baton.bus: message`, UTC."""

    converter = staticmethod(time.gmtime)

    def __init__(self, service: str) -> None:
        super().__init__(f"%(asctime)s.%(msecs)03d %(levelname)-7s {service} %(name)s: %(message)s", "%H:%M:%S")


class JsonFormatter(logging.Formatter):
    """One object a line: time (unix seconds), level, service, logger, message, error."""

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
        }
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


def set_up_logs(service: str, log_format: str, level: str) -> None:
    """Send all logs of this process to stderr. `log_format` is plain or json, `level` debug to error."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter(service) if log_format == "json" else PlainFormatter(service))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    # httpx and friends tell every request at INFO.
    for name in ("httpx", "httpcore", "asyncio", "uvicorn.access"):
        logging.getLogger(name).setLevel(max(logging.WARNING, logging.getLogger().level))
