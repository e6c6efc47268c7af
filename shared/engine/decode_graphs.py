"""Decode steps captured once as CUDA graphs, one a batch size, and replayed: a launch instead of hundreds."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from typing import Any

import torch

from shared.engine.device_stream import DeviceStream


class DecodeGraphs:
    """Graphs by number of sequences. They share one pool of memory: only one runs at a time, in the stream's order.

    Args:
        compute: launches a decode step of that many sequences over fixed buffers.
    """

    def __init__(self, stream: DeviceStream, compute: Callable[[int], object]) -> None:
        self._stream = stream
        self._compute = compute
        self._graphs: dict[int, Any] = {}
        self._memory: Any = None

    def capture(self, sizes: Sequence[int]) -> None:
        """Capture those sizes, the largest first: it makes the room that the others then share."""
        self._memory = torch.cuda.graph_pool_handle()
        with self._stream.use(), torch.inference_mode():
            for size in sorted(sizes, reverse=True):
                # kernels are compiled and libraries set up outside a capture
                self._compute(size)
                self._stream.synchronize()
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, pool=self._memory, stream=torch.cuda.current_stream()):
                    self._compute(size)
                self._graphs[size] = graph
        self._stream.synchronize()

    def replay(self, size: int) -> None:
        """Launch the graph of that size on the current stream."""
        self._graphs[size].replay()

    def drop(self) -> None:
        """Give the graphs and their memory back."""
        self._stream.synchronize()
        self._graphs.clear()
        self._memory = None
        gc.collect()
        # workspaces of matrix products may lie in the graphs' memory
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()
