"""How a process tells whoever started it that it is ready, or why it can't be: a file that appears all at once."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from shared.store.secrets import write_atomic

READY_VARIABLE = "BATON_READY_FILE"


def report_ready(env: Mapping[str, str] | None = None, **facts: Any) -> None:
    """Create the file named in `BATON_READY_FILE`, holding `facts` and the process id as JSON; nothing without it.

    The gateway tells its bound port by `report_ready(port=8080)`.
    """
    path = (os.environ if env is None else env).get(READY_VARIABLE)
    if path:
        write_atomic(Path(path), json.dumps({"pid": os.getpid(), **facts}).encode())


def report_failed(message: str, env: Mapping[str, str] | None = None) -> None:
    """Tell in the same file that this process can't start, in one sentence for people."""
    with suppress(OSError):  # the failure goes on being the news
        report_ready(env, error=message)


def read_ready(path: Path) -> dict[str, Any] | None:
    """What a process reported, or None while it has not; with `error` when it can't start."""
    try:
        found: dict[str, Any] = json.loads(path.read_bytes())
        return found
    except FileNotFoundError:
        return None
