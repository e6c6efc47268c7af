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

from kernels.linear.quantize import Int4Weight, Matrix, Unquantizable, floats_of
from shared.contracts.errors import SettingsError
from shared.model.checkpoint import (
    EMBEDDING,
    GROUP,
    HEAD,
    INTEGERS,
    MINIMA,
    SCALES,
    broken,
    check_checkpoint,
    expected_shapes,
    is_dead_bias,
    is_matrix,
)
from shared.model.config import ModelConfig
from shared.model.packing import Packing
from shared.model.unpack import outline, unpacked


class Weights:
    """The open files of a checkpoint; tensors are read one by one. Use as a context manager.

    Raises:
        SettingsError: as `check_checkpoint`; and for a head that is not the embedding it should be tied to, or a bias
            that the model does not have and that is not zero.
    """

    def __init__(self, folder: Path, config: ModelConfig) -> None:
        self._where = check_checkpoint(folder, config)
        self._packing, self._shapes = config.packing, expected_shapes(config)
        self._stack = ExitStack()
        self._files: dict[Path, Any] = {}
        try:
            for path in dict.fromkeys(self._where.values()):
                self._files[path] = self._stack.enter_context(safe_open(str(path), framework="pt"))
            if config.tied_embeddings:
                self._check_tied()
            self._check_dead_biases(config)
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
        return floats_of(self.kept(name))

    def _read(self, name: str) -> Tensor:
        path = self._where[name]
        try:
            tensor: Tensor = self._files[path].get_tensor(name)
        except (SafetensorError, OSError) as exc:
            raise broken(path, exc) from exc
        return tensor

    def kept(self, name: str) -> Matrix:
        """A tensor as the checkpoint keeps it, integers as integers.

        Raises:
            SettingsError: they are none that can be held; names file and tensor.
        """
        if name + INTEGERS in self._where:
            packed = self._read(name + INTEGERS)
            integers = torch.stack((packed & 15, packed >> 4), dim=2).view(len(packed), -1)
            return Int4Weight(integers, self._read(name + SCALES), self._read(name + MINIMA), GROUP)
        parts = self._parts(name)
        if self._packing is None or not parts:
            # a tied checkpoint may hold the one matrix under the head's name alone
            return self._read(HEAD if name == EMBEDDING and name not in self._where else name)
        try:
            return unpacked(self._packing, {end: self._read(part) for end, part in parts.items()}, self._shapes[name])
        except Unquantizable as exc:
            raise self._strange(parts, exc) from exc

    def outline(self, name: str) -> Matrix:
        """The same without values: its tensors are of the meta device. Only an order of inputs is read."""
        parts = self._parts(name)
        if self._packing is None or not parts:
            return torch.empty(self._shapes[name], device="meta")
        orders = {end: self._read(part) for end, part in parts.items() if end.endswith("g_idx")}
        try:
            return outline(self._packing, orders, self._shapes[name])
        except Unquantizable as exc:
            raise self._strange(parts, exc) from exc

    def _parts(self, name: str) -> dict[str, str]:
        """The tensors that a matrix of integers is kept as, by what their names end in; {} for one of floats."""
        packing: Packing | None = self._packing
        if packing is None or name in self._where or not is_matrix(name):
            return {}
        stem = name.removesuffix(".weight")
        return {end: stem + end for end in packing.parts(self._shapes[name]) if stem + end in self._where}

    def _strange(self, parts: dict[str, str], exc: Unquantizable) -> SettingsError:
        end, _, told = str(exc).partition(": ")
        return SettingsError(f"{self._where[parts[end]]}: {parts[end]}: {told}", param=parts[end])

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

    def _check_dead_biases(self, config: ModelConfig) -> None:
        for name in self._where:
            if is_dead_bias(name, config) and bool(self._read(name).count_nonzero()):
                field = "attention_bias" if ".self_attn." in name else "mlp_bias"
                told = f"is not zero, though config.json says {field} is false"
                raise SettingsError(f"{self._where[name]}: {name}: {told}", param=name)

    def _check_tied(self) -> None:
        if HEAD in self._where and not torch.equal(self[HEAD], self[EMBEDDING]):
            raise SettingsError(
                f"{self._where[HEAD]}: {HEAD}: differs from {EMBEDDING}, though config.json says tie_word_embeddings",
                param=HEAD,
            )
