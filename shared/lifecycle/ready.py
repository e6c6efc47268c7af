"""How a process tells whoever started it that it is ready, or why it can't be: a file that appears all at once.

Failures have a file of their own beside it: in a rolling restart the ready file still speaks of the predecessor, which
goes on when its successor fails.
"""

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
        _write(Path(path), facts)


def report_failed(message: str, env: Mapping[str, str] | None = None) -> None:
    """Tell in a file beside it that this process can't start, in one sentence for people."""
    path = (os.environ if env is None else env).get(READY_VARIABLE)
    if path:
        with suppress(OSError):  # the failure goes on being the news
            _write(failure_path(Path(path)), {"error": message})


def failure_path(ready: Path) -> Path:
    """Where a process with this ready file tells why it can't start."""
    return ready.with_name(f"{ready.name}.failed")


def read_ready(path: Path) -> dict[str, Any] | None:
    """What a process reported in its ready file or in its `failure_path`; None while there is no such file."""
    try:
        found: dict[str, Any] = json.loads(path.read_bytes())
        return found
    except FileNotFoundError:
        return None


def _write(path: Path, facts: Mapping[str, Any]) -> None:
    write_atomic(path, json.dumps({"pid": os.getpid(), **facts}).encode())
