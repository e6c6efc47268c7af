"""Times on a GPU: medians over replays of a graph, so that launches from Python do not count."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch

_SAMPLES = 15
_SAMPLE_SECONDS = 0.01


def seconds(call: Callable[[], object], samples: int = _SAMPLES) -> float:
    """Median time of one `call`, captured once and replayed. It must move more than the cache holds."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        for _ in range(2):
            call()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    repeats = max(1, int(_SAMPLE_SECONDS / max(_replayed(graph, 1), 1e-6)))
    return statistics.median(_replayed(graph, repeats) for _ in range(samples))


def seconds_launched(call: Callable[[], object], repeats: int = 20) -> float:
    """Median time of one `call`, launched from here: for calls so long that a launch is nothing beside them."""
    call()
    return statistics.median(_timed(call, repeats) for _ in range(5))


def _replayed(graph: torch.cuda.CUDAGraph, repeats: int) -> float:
    return _timed(graph.replay, repeats)


def _timed(call: Callable[[], object], repeats: int) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    begin.record()
    for _ in range(repeats):
        call()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3 / repeats
