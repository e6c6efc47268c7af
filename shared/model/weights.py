"""Read a model folder's safetensors files, checked by name and shape against the configuration.

Knows names, shapes and files; knows nothing about how a weight is used.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import xxhash
from safetensors import SafetensorError, safe_open
from torch import Tensor

from shared.contracts.errors import SettingsError
from shared.model.config import ModelConfig
from shared.model.folder import weight_files

_CHUNK_BYTES = 1 << 24
_IGNORED_SUFFIX = "rotary_emb.inv_freq"
"""Old checkpoints carry this table; it follows from the configuration."""


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor a checkpoint of this model must hold."""
    hidden, width = config.hidden_size, config.intermediate_size
    q, kv = config.num_q_heads * config.head_dim, config.num_kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    if not config.tied_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    for i in range(config.num_layers):
        layer = f"model.layers.{i}"
        shapes |= {
            f"{layer}.input_layernorm.weight": (hidden,),
            f"{layer}.self_attn.q_proj.weight": (q, hidden),
            f"{layer}.self_attn.k_proj.weight": (kv, hidden),
            f"{layer}.self_attn.v_proj.weight": (kv, hidden),
            f"{layer}.self_attn.o_proj.weight": (hidden, q),
            f"{layer}.post_attention_layernorm.weight": (hidden,),
            f"{layer}.mlp.gate_proj.weight": (width, hidden),
            f"{layer}.mlp.up_proj.weight": (width, hidden),
            f"{layer}.mlp.down_proj.weight": (hidden, width),
        }
    return shapes


class Weights:
    """The open files of a checkpoint; tensors are read one by one. Use as a context manager.

    Raises:
        SettingsError: a file is missing or broken; a tensor is missing, unexpected or of another shape. Names both.
    """

    def __init__(self, folder: Path, config: ModelConfig) -> None:
        self._stack = ExitStack()
        self._where: dict[str, tuple[Path, Any]] = {}
        try:
            for path in weight_files(folder):
                self._open(path)
            self._check(folder, config)
        except BaseException:
            self._stack.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._where.clear()
        self._stack.close()

    def __getitem__(self, name: str) -> Tensor:
        path, file = self._where[name]
        try:
            tensor: Tensor = file.get_tensor(name)
        except (SafetensorError, OSError) as exc:
            raise _broken(path, exc) from exc
        if not tensor.is_floating_point():
            raise SettingsError(f"{path}: {name}: dtype {tensor.dtype} is not supported", param=name)
        return tensor

    def _open(self, path: Path) -> None:
        try:
            file = self._stack.enter_context(safe_open(str(path), framework="pt"))
        except (SafetensorError, OSError) as exc:
            raise _broken(path, exc) from exc
        for name in file.keys():  # noqa: SIM118 - the file is not a mapping
            if name in self._where:
                raise SettingsError(f"{path}: {name}: is also in {self._where[name][0].name}", param=name)
            self._where[name] = (path, file)

    def _check(self, folder: Path, config: ModelConfig) -> None:
        expected = expected_shapes(config)
        for name, shape in expected.items():
            if name not in self._where:
                raise SettingsError(f"{folder}: tensor {name} is missing", param=name)
            path, file = self._where[name]
            found = tuple(file.get_slice(name).get_shape())
            if found != shape:
                raise SettingsError(f"{path}: {name}: shape {found} should be {shape}", param=name)
        for name, (path, _) in self._where.items():
            # a tied checkpoint may still carry its head; it is the embedding
            tied_head = config.tied_embeddings and name == "lm_head.weight"
            if name not in expected and not tied_head and not name.endswith(_IGNORED_SUFFIX):
                raise SettingsError(f"{path}: tensor {name} is not part of this architecture", param=name)


def model_digest(folder: Path) -> str:
    """XXH3-128 (32 hex digits) over the configuration and all weight bytes: what makes two models the same model."""
    digest = xxhash.xxh3_128()
    for path in [folder / "config.json", *weight_files(folder)]:
        try:
            digest.update(f"{path.name}\x00{path.stat().st_size}\x00".encode())
            for chunk in _chunks(path):
                digest.update(chunk)
        except OSError as exc:
            raise _broken(path, exc) from exc
    return str(digest.hexdigest())


def _chunks(path: Path) -> Iterator[memoryview]:
    buffer = bytearray(_CHUNK_BYTES)
    view = memoryview(buffer)
    with path.open("rb", buffering=0) as file:
        while size := file.readinto(buffer):
            yield view[:size]


def _broken(path: Path, exc: Exception) -> SettingsError:
    return SettingsError(f"cannot read weights from {path}: {exc}", param=path.name)
