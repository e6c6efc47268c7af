"""What `./baton batch` shows of batches. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any

from shared.lifecycle.plain_text import one_line

ENDED = ("completed", "failed", "expired", "cancelled")
BAR_CHARS = 24
SHOWN_LETTERS = 10


def progress_line(batch: dict[str, Any]) -> str:
    """One line for a batch under way: bar, counts, tokens."""
    counts, status = batch["request_counts"], batch["status"]
    total, done = counts["total"], counts["completed"] + counts["failed"]
    if not total:
        return f"{status:<11} {batch['id']}"
    bar = "#" * (BAR_CHARS * done // total)
    failed = f", {counts['failed']} failed" if counts["failed"] else ""
    tokens = batch["usage"]["total_tokens"]
    return f"{status:<11} [{bar:<{BAR_CHARS}}] {done} of {total} lines{failed}, {tokens} tokens"


def table(batches: Sequence[dict[str, Any]]) -> str:
    """One line a batch."""
    rows = [("BATCH", "STATUS", "DONE", "FAILED", "TOKENS", "CREATED")]
    for batch in batches:
        counts = batch["request_counts"]
        done = f"{counts['completed'] + counts['failed']}/{counts['total']}"
        tokens = str(batch["usage"]["total_tokens"])
        rows.append((batch["id"], batch["status"], done, str(counts["failed"]), tokens, _time(batch["created_at"])))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def details(batch: dict[str, Any], file: str = "") -> str:
    """Everything worth knowing of one batch; `file` names its input where the user has it."""
    counts, usage = batch["request_counts"], batch["usage"]
    rows = [("batch", batch["id"]), ("status", batch["status"]), ("endpoint", batch["endpoint"])]
    if batch["model"]:
        rows.append(("model", batch["model"]))
    if counts["total"]:
        done = counts["completed"] + counts["failed"]
        rows.append(("lines", f"{done} of {counts['total']} done, {counts['failed']} of them failed"))
        rows.append(("tokens", f"{usage['input_tokens']} in, {usage['output_tokens']} out"))
    rows.append(("created", _time(batch["created_at"])))
    ended_at = batch.get(f"{batch['status']}_at")
    if batch["status"] in ENDED and ended_at:
        rows.append(("ended", _time(ended_at)))
    elif batch["expires_at"]:
        rows.append(("expires", _time(batch["expires_at"])))
    rows += [(f"  {name}", text) for name, text in (batch["metadata"] or {}).items()]
    for name, key in (("output", "output_file_id"), ("errors", "error_file_id")):
        if batch[key]:
            rows.append((name, batch[key]))
    lines = [one_line(f"{name:<9} {text}") for name, text in rows]
    letters = batch.get("dead_letters", [])
    lines += [
        one_line(f"given up  line {letter['line']} ({letter['custom_id']}): {letter['code']}, {letter['message']}")
        for letter in letters[:SHOWN_LETTERS]
    ]
    if len(letters) > SHOWN_LETTERS:
        lines.append(f"given up  and {len(letters) - SHOWN_LETTERS} more")
    return "\n".join(lines + error_lines(batch, file))


def error_lines(batch: dict[str, Any], file: str = "") -> list[str]:
    """Why a batch failed, as `FILE:LINE: message (field)`."""
    found = []
    for error in (batch["errors"] or {"data": []})["data"]:
        where = file or batch["input_file_id"]
        place = f"{where}:{error['line']}" if error["line"] else where
        field = f" ({error['param']})" if error["param"] else ""
        found.append(one_line(f"{place}: {error['message']}{field}"))
    return found


def _time(seconds: int) -> str:
    return datetime.fromtimestamp(seconds).strftime("%Y-%m-%d %H:%M:%S")
