"""Logs of a stack in bounded room: the last run's are kept, and one that grows too long is begun anew."""

from __future__ import annotations

import asyncio
import os
import shutil
from contextlib import suppress
from pathlib import Path

MAX_LOG_BYTES = 64 * 1024 * 1024
CHECK_S = 30.0


def fresh_logs(folder: Path) -> None:
    """Keep the last run's logs as .old, so that a log holds one run."""
    for log in folder.glob("*.log"):
        if log.name != "up.log":
            log.replace(log.with_suffix(".old"))


async def keep_logs_bounded(folder: Path) -> None:
    """Look after the logs until cancelled."""
    while True:
        await asyncio.sleep(CHECK_S)
        with suppress(OSError):
            await asyncio.to_thread(cut_long_logs, folder, MAX_LOG_BYTES)


def cut_long_logs(folder: Path, limit: int) -> None:
    """Move what a log over `limit` bytes holds to its .old and empty it. Its writer appends, so it goes on at 0; lines
    written in between are lost."""
    for log in folder.glob("*.log"):
        if log.stat().st_size > limit:
            shutil.copyfile(log, log.with_suffix(".old"))
            os.truncate(log, 0)
