"""What one tenant may keep in the store."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StoreLimits:
    """Of each tenant; 0 = any number, where it says so."""

    max_stored_bytes: int = 0
    """Files, lines of batches that have not ended, queued lines and their results; 0 = any. What was begun is always
    written to its end."""
    max_files: int = 20_000
    """Files and uploads: each takes room beside its bytes; 0 = any."""
    max_unfinished: int = 200
    """Batches that have not ended; 0 = any."""
    max_jobs: int = 2000
    """Records of batches; past that the oldest ended ones go."""
    max_queue_results: int = 200_000
    """Results of queued lines; past that the oldest go, fetched or not."""
