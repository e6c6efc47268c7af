"""A GPU's model that reads windows of text, for `loadtest.quality`; in Triton's interpreter too, for tests."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from kernels.attention.triton_attention import plan_attention
from kernels.chip import FP8_CAPABILITY, capability
from shared.kv.device_spans import device_views
from shared.kv.layout import KV_SETTINGS, SCALED, PoolLayout
from shared.model.config import layer_groups
from shared.model.device_decoder import DeviceDecoder, DeviceStep, load_device_decoder
from shared.model.kv_dtype import AUTO, kv_dtype_on_gpu
from shared.model.quality_gate import SAME, Configuration


def load_on_device(folder: Path, wanted: Configuration) -> DeviceDecoder:
    """Raises SettingsError: there is no GPU, or the model cannot be computed so."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return load_device_decoder(folder, wanted.dtype, device, quant=wanted.quant)


def has_float8() -> bool:
    """Whether the card multiplies float8."""
    return capability(torch.device("cuda" if torch.cuda.is_available() else "cpu")) >= FP8_CAPABILITY


class DeviceReader:
    """As `loadtest.quality.Reader`, with a pool in the GPU's memory.

    Args:
        block: tokens of a block.

    Raises:
        SettingsError: the card cannot keep KV so.
    """

    def __init__(self, model: DeviceDecoder, longest: int, kv: str, block: int) -> None:
        setting = next((name for name, dtype in KV_SETTINGS.items() if dtype == kv), AUTO if kv == SAME else kv)
        computed = str(model.dtype).removeprefix("torch.")
        self.kv_dtype = kv_dtype_on_gpu(setting, computed, capability(model.device))
        self._model = model
        self._groups = layer_groups(model.config, block, self.kv_dtype)
        self._table = tuple(range(-(-longest // block)))
        layout = PoolLayout(self._groups, (len(self._table),) * len(self._groups))
        data = torch.zeros(layout.total_bytes, dtype=torch.uint8, device=model.device)
        self._pools = device_views(data, layout)

    @torch.inference_mode()
    def read(self, start: int, token_ids: Sequence[int]) -> Tensor:
        """As `Reader.read`, on the host: [tokens, vocab] float32."""
        model, count, end = self._model, len(token_ids), start + len(token_ids)

        def words(values: Sequence[int]) -> Tensor:
            return torch.tensor(values, dtype=torch.int32, device=model.device)

        rows = words(range(count))
        # blocks are taken in order: a position is its own slot
        positions = words(range(start, end))
        step = DeviceStep(words(token_ids), words([-1] * count), positions, rows, (positions,) * len(self._groups))
        windows = set(model.config.family.windows) or {0}
        plans = {
            (g, window): plan_attention(
                [0, count],
                [end],
                [self._table],
                group.block_size,
                model.config.num_q_heads,
                group.num_kv_heads,
                model.config.head_dim,
                model.device,
                window,
                group.dtype in SCALED,
            )
            for g, group in enumerate(self._groups)
            for window in windows
        }
        return model.forward(step, rows, self._groups, self._pools, plans).float().cpu()

    def close(self) -> None:
        """Let go of the pool's memory."""
        self._pools = ()
