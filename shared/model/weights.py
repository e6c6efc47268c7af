"""Read the tensors of a model folder's safetensors files. Knows nothing about how a weight is used."""

from __future__ import annotations

import json
import mmap
import struct
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from kernels.linear.quantize import Int4Weight
from shared.contracts.errors import SettingsError
from shared.model.checkpoint import EMBEDDING, GROUP, HEAD, INTEGERS, MINIMA, SCALES, broken, check_checkpoint
from shared.model.config import ModelConfig


class Weights:
    """The open files of a checkpoint; tensors are read one by one. Use as a context manager.

    Raises:
        SettingsError: as `check_checkpoint`; and for a head that is not the embedding it should be tied to.
    """

    def __init__(self, folder: Path, config: ModelConfig) -> None:
        self._where = check_checkpoint(folder, config)
        self._stack = ExitStack()
        self._files: dict[Path, Any] = {}
        try:
            for path in dict.fromkeys(self._where.values()):
                self._files[path] = self._stack.enter_context(safe_open(str(path), framework="pt"))
            if config.tied_embeddings:
                self._check_tied()
        except (SafetensorError, OSError) as exc:
            self._stack.close()
            raise broken(path, exc) from exc
        except BaseException:
            self._stack.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._files.clear()
        self._stack.close()

    def __getitem__(self, name: str) -> Tensor:
        if name == EMBEDDING and name not in self._where:
            name = HEAD  # a tied checkpoint may hold the one matrix under this name alone
        if name + INTEGERS in self._where:
            kept = self.kept(name)
            assert isinstance(kept, Int4Weight)
            return kept.floats()
        path = self._where[name]
        try:
            tensor: Tensor = self._files[path].get_tensor(name)
        except (SafetensorError, OSError) as exc:
            raise broken(path, exc) from exc
        return tensor

    def kept(self, name: str) -> Tensor | Int4Weight:
        """A tensor as the checkpoint keeps it, integers as integers."""
        if name + INTEGERS not in self._where:
            return self[name]
        packed = self[name + INTEGERS]
        integers = torch.stack((packed & 15, packed >> 4), dim=2).view(len(packed), -1)
        return Int4Weight(integers, self[name + SCALES], self[name + MINIMA], GROUP)

    def mapped(self, name: str) -> Tensor:
        """A tensor in the checkpoint's own dtype, mapped from its file: only rows that are looked at take memory.

        Not to be written to. The mapping lives as long as the tensor.
        """
        stored = self[name]
        path = self._where[name if name in self._where else HEAD]
        try:
            with path.open("rb") as file:
                (size,) = struct.unpack("<Q", file.read(8))
                begin, _ = json.loads(file.read(size))[name if name in self._where else HEAD]["data_offsets"]
                # private: a writable buffer, as torch asks for, of which nothing reaches the file
                data = mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        except (OSError, ValueError, KeyError, struct.error) as exc:
            raise broken(path, exc) from exc
        tensor = torch.frombuffer(data, dtype=stored.dtype, count=stored.numel(), offset=8 + size + begin)
        return tensor.view(stored.shape)

    def _check_tied(self) -> None:
        if HEAD in self._where and not torch.equal(self[HEAD], self[EMBEDDING]):
            raise SettingsError(
                f"{self._where[HEAD]}: {HEAD}: differs from {EMBEDDING}, though config.json says tie_word_embeddings",
                param=HEAD,
            )
