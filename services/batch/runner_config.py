"""What drives batches needs to know, in one frozen object."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RunnerConfig:
    """Times in seconds, sizes in bytes."""

    max_lines: int = 50_000
    max_file_bytes: int = 200 * 1024 * 1024
    max_line_bytes: int = 4 * 1024 * 1024
    """As long as the body of a request may be."""
    window_s: float = 86400.0
    lease_s: float = 10.0
    poll_s: float = 0.5
    scan_s: float = 2.0
    """Between two looks for batches nobody drives; a new one is taken at once."""
    sweep_s: float = 30.0
    pause_s: float = 1.0
    """After a failure; each further one doubles it."""
    window_items: int = 1000
    """Most items of one batch on the queue at once, so that no batch fills the stream."""
    look_s: float = 5.0
    """Between two looks at the queue of a batch in which nothing moves: the queue may have lost its items."""
    stall_s: float = 600.0
    """Items of a batch in which nothing moved for so long are put on the queue again whatever it says. Each time
    without a move doubles it."""
    queue_keep_s: int = 7 * 86400
    """Results of lines that came over NATS are kept so long."""
