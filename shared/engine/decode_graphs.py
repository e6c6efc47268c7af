"""Decode steps captured once as CUDA graphs, one a batch size, and replayed: a launch instead of hundreds."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from shared.engine.device_stream import DeviceStream


class DecodeGraphs:
    """Graphs by number of sequences, a pair each: up to the logits, and the draws from them. They share one pool of
    memory: only one runs at a time, in the stream's order, and a pair's second right behind its first.

    Args:
        compute: launches a decode step of that many sequences over fixed buffers, up to its logits.
        draw: launches the draws from those.
    """

    def __init__(
        self, stream: DeviceStream, compute: Callable[[int], Tensor], draw: Callable[[Tensor], object]
    ) -> None:
        self._stream = stream
        self._compute = compute
        self._draw = draw
        self._graphs: dict[int, tuple[Any, Any]] = {}
        self._memory: Any = None

    def capture(self, sizes: Sequence[int]) -> None:
        """Capture those sizes, the largest first: it makes the room that the others then share."""
        self._memory = torch.cuda.graph_pool_handle()
        with self._stream.use(), torch.inference_mode():
            for size in sorted(sizes, reverse=True):
                # kernels are compiled and libraries set up outside a capture
                self._draw(self._compute(size))
                self._stream.synchronize()
                first, second = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
                with torch.cuda.graph(first, pool=self._memory, stream=torch.cuda.current_stream()):
                    logits = self._compute(size)
                # held until here, so that draws do not write where they lie
                with torch.cuda.graph(second, pool=self._memory, stream=torch.cuda.current_stream()):
                    self._draw(logits)
                self._graphs[size] = (first, second)
                del logits
        self._stream.synchronize()

    def compute(self, size: int) -> None:
        """Launch a step of that size on the current stream, up to its logits. `draw` comes next on the stream."""
        self._graphs[size][0].replay()

    def draw(self, size: int) -> None:
        """Launch the draws of the step just computed."""
        self._graphs[size][1].replay()

    def replay(self, size: int) -> None:
        """Launch both."""
        self.compute(size)
        self.draw(size)

    def drop(self) -> None:
        """Give the graphs and their memory back."""
        self._stream.synchronize()
        self._graphs.clear()
        self._memory = None
        gc.collect()
        # workspaces of matrix products may lie in the graphs' memory
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()
