"""Lines of the logs of a stack: ours, plain or JSON, and those of the two servers. Pure."""

from __future__ import annotations

import json
import re
import time
from calendar import timegm
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from shared.lifecycle.plain_text import json_text, lines

LEVELS = ("debug", "info", "warning", "error", "critical")

END_OF_TIME_S = 253_402_300_800
"""The year 10000: what is later is no time."""

_PLAIN = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)\.(\d{3})Z (\w+) +(\S+) (\S+): (.*)")
_MARKS = re.compile(r"  (?:request=(\S+) ?)?(?:trace=([0-9a-f]{32}))?$")
_NATS = re.compile(r"\[\d+\] (\d{4}/\d\d/\d\d \d\d:\d\d:\d\d)\.(\d{6}) \[(\w+)\] (.*)")
_REDIS = re.compile(r"\d+:[A-Z] (\d\d \w{3} \d{4} \d\d:\d\d:\d\d)\.(\d{3}) ([.*#-]) (.*)")
_NATS_LEVELS = {"DBG": "debug", "TRC": "debug", "INF": "info", "WRN": "warning", "ERR": "error", "FTL": "critical"}
_REDIS_LEVELS = {".": "debug", "-": "info", "*": "info", "#": "warning"}


@dataclass(frozen=True, slots=True)
class LogLine:
    """One line of one process. `time_s` is unix seconds; a line without a time has that of the line before it.

    `raw` is the line as it stands in the file; `parsed` is false for what goes on from the line before: a traceback.
    """

    name: str  # of the process: the file's
    raw: str
    time_s: float = 0.0
    level: str = ""
    logger: str = ""
    message: str = ""
    request_id: str = ""
    trace_id: str = ""
    parsed: bool = False

    def severe(self, level: str) -> bool:
        """At least as severe as `level`; a line without a level is shown with everything."""
        return self.level not in LEVELS or LEVELS.index(self.level) >= LEVELS.index(level)

    def about(self, wanted: str) -> bool:
        """Of the trace or request with this id, or whose id begins so; a request's may lack its prefix."""
        return bool(wanted) and (
            self.trace_id.startswith(wanted) or self.request_id.startswith((wanted, f"req-{wanted}"))
        )


def parse_line(name: str, raw: str, before: LogLine | None = None) -> LogLine:
    """A line of process `name`; `before` is the one before it in the same file."""
    for parse in (_json, _plain, _nats, _redis):
        with suppress(ValueError):  # looks like one of them, but the time is none
            if (found := parse(name, raw)) is not None and 0 < found.time_s < END_OF_TIME_S:
                return found
    if before is None:
        return LogLine(name, raw, message=raw)
    return LogLine(
        name, raw, before.time_s, before.level, before.logger, raw, before.request_id, before.trace_id, parsed=False
    )


def render(line: LogLine, width: int) -> str:
    """`01-31 12:03:04.123 INFO    decode-1   message`, local time; names padded to `width`."""
    if not line.parsed:
        raw = lines(line.raw)
        return f"{'':<26} {line.name:<{width}}  {raw}" if line.time_s else f"{line.name:<{width}}  {raw}"
    clock = time.strftime("%m-%d %H:%M:%S", time.localtime(line.time_s))
    shown = f"{clock}.{int(line.time_s % 1 * 1000):03d} {line.level.upper():<7} {line.name:<{width}}  {line.message}"
    marks = "".join(f"  {mark}" for mark in (line.request_id or line.trace_id,) if mark and mark not in line.message)
    return lines(shown + marks)


def as_json(line: LogLine) -> str:
    """One object, with the keys of our JSON logs and `process`."""
    fields = {"time": line.time_s, "level": line.level, "process": line.name, "logger": line.logger}
    fields |= {"message": line.message, "request_id": line.request_id, "trace_id": line.trace_id}
    return json_text(json.dumps({key: value for key, value in fields.items() if value != ""}, ensure_ascii=False))


def _json(name: str, raw: str) -> LogLine | None:
    if not raw.startswith("{"):
        return None
    try:
        found = json.loads(raw)
        time_s = float(found["time"])
    except (ValueError, KeyError, TypeError):
        return None

    def text(key: str) -> str:
        return str(found.get(key, ""))

    message = text("message") + (f"\n{text('error')}" if "error" in found else "")
    ids = text("request_id"), text("trace_id")
    return LogLine(name, raw, time_s, text("level"), text("logger"), message, *ids, parsed=True)


def _plain(name: str, raw: str) -> LogLine | None:
    if (found := _PLAIN.fullmatch(raw)) is None:
        return None
    day, millis, level, _, logger, message = found.groups()
    time_s = timegm(time.strptime(day, "%Y-%m-%dT%H:%M:%S")) + int(millis) / 1000
    marks = _MARKS.search(message)
    request_id, trace_id = (marks[1] or "", marks[2] or "") if marks else ("", "")
    if request_id or trace_id:
        message = message[: marks.start()] if marks else message
    return LogLine(name, raw, time_s, level.lower(), logger, message, request_id, trace_id, parsed=True)


def _nats(name: str, raw: str) -> LogLine | None:
    if (found := _NATS.fullmatch(raw)) is None:
        return None
    day, micros, level, message = found.groups()
    time_s = _local(day, "%Y/%m/%d %H:%M:%S", int(micros) / 1e6)
    return LogLine(name, raw, time_s, _NATS_LEVELS.get(level, "info"), "nats-server", message, parsed=True)


def _redis(name: str, raw: str) -> LogLine | None:
    if (found := _REDIS.fullmatch(raw)) is None:
        return None
    day, millis, level, message = found.groups()
    time_s = _local(day, "%d %b %Y %H:%M:%S", int(millis) / 1000)
    return LogLine(name, raw, time_s, _REDIS_LEVELS[level], "redis", message, parsed=True)


def _local(day: str, pattern: str, fraction_s: float) -> float:
    return time.mktime(time.strptime(day, pattern)) + fraction_s


Wanted = Callable[[LogLine], bool]
