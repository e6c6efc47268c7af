"""What `up` says: progress lines with times, and the one screen at the end. Pure but for the clock and the stream."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import TextIO

from services.cli.state import StackRecord
from shared.settings.models import served_models
from shared.settings.sections import Settings


class Progress:
    """Progress lines on stderr; each phase with the seconds it took."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        self._started = self._phase = time.monotonic()
        self.dated = False
        """Lines go into a log: each gets its time, as the services' lines have it."""

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._started

    def say(self, line: str) -> None:
        head = f"{_now()} INFO    up baton.up: " if self.dated else "  "
        print(head + line, file=self._stream, flush=True)

    def done(self, what: str) -> None:
        """End a phase: its name and how long it took."""
        now = time.monotonic()
        self.say(f"{now - self._phase:6.2f} s  {what}")
        self._phase = now


def _now() -> str:
    """Wall time as in the services' logs."""
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def ready_screen(
    settings: Settings,
    record: StackRecord,
    logs: Path,
    elapsed_s: float,
    token_s: float,
    computes: Mapping[str, str] | None = None,
) -> str:
    """The screen of a ready stack.

    Args:
        computes: pool to what its workers say they compute; settings are shown of one that is not there.
    """
    url, api_key = record.url, record.api_key
    models = served_models(settings)
    body = json.dumps({"model": models[0].name, "messages": [{"role": "user", "content": "Hello"}]})
    asked = [m.dtype if m.quant == "none" else f"{m.quant} over {m.dtype}" for m in models]
    kinds = [(computes or {}).get(m.pool) or kind for m, kind in zip(models, asked, strict=True)]
    rows = [f"{m.name}, {m.prefill} prefill + {m.decode} decode, {k}" for m, k in zip(models, kinds, strict=True)]
    if settings.workers.fake:
        rows = [f"FAKE WORKERS: tokens are made up; {m.name}, {m.prefill} prefill + {m.decode} decode" for m in models]
    what = "\n  ".join(rows)
    return f"""
  Baton is ready at {url}
  {what}
  started in {elapsed_s:.1f} s; the first token took {token_s:.2f} s through the whole stack

  key      {api_key}
  admin    {record.admin_key}
  console  {url}/console
  chat     ./baton chat "Why is the sky blue?"
  trace    ./baton trace
  logs     ./baton logs, of the files in {logs}
  stop     ./baton down, or Ctrl-C here

  curl {url}/v1/chat/completions -H "Authorization: Bearer {api_key}" \\
    -H "Content-Type: application/json" -d '{body}'
"""
