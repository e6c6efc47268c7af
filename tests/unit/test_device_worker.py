"""A GPU worker's engine as it is opened, in Triton's interpreter: everything of it but the card."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.testing import INTERPRETED

# isort: split
from shared.contracts.errors import SettingsError
from shared.contracts.ids import WorkerId
from shared.engine import device_sizing, device_worker
from shared.engine.worker_engine import WorkerEngine, WorkerOptions, open_worker_engine
from shared.kv import device_pool
from shared.model.device_decoder import DeviceDecoder
from tests.gpu.test_gpu_worker import WAIT_S, complete
from tests.tiny_models import make_tiny_model

pytestmark = [
    pytest.mark.filterwarnings("ignore:overflow encountered"),  # numpy's, in the interpreter
    pytest.mark.skipif(not INTERPRETED, reason="there is a GPU: tests/gpu"),
]

GIB = 1 << 30


class Memory:
    """A device's memory, on the host."""

    def __init__(self, size: int, device: torch.device) -> None:
        self._bytes = torch.zeros(size, dtype=torch.uint8)

    def tensor(self) -> Tensor:
        return self._bytes

    def handle(self) -> bytes:
        return b"h" * 64

    def close(self) -> None: ...


class TorchWithACard:
    """torch, in whose words the CPU is a GPU of compute capability 8.0."""

    cuda = SimpleNamespace(
        current_device=lambda: 0,
        get_device_capability=lambda device=None: (8, 0),
        get_device_properties=lambda device: SimpleNamespace(total_memory=8 * GIB),
        get_device_name=lambda device: "Some Card",
        empty_cache=lambda: None,
        synchronize=lambda device=None: None,
    )

    def device(self, *_: object) -> torch.device:
        return torch.device("cpu")

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kernels.dispatch.choose_device", lambda setting: ("cuda", ""))
    monkeypatch.setattr(device_worker, "torch", TorchWithACard())
    for module in (device_worker, device_sizing):
        monkeypatch.setattr(module, "free_bytes", lambda device: 8 * GIB)
    monkeypatch.setattr(device_worker, "measure_steps", lambda *_: 0)
    monkeypatch.setattr(device_sizing, "BURST_STEPS", 1)
    monkeypatch.setattr(device_pool, "allocate", Memory)
    monkeypatch.setattr(device_pool, "device_uuid", lambda device: "GPU-1")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(
        tmp_path_factory.mktemp("tiny"), head_dim=64, num_hidden_layers=1, max_position_embeddings=64
    )


def opened(folder: Path, kv_dir: Path, **changes: Any) -> WorkerEngine:
    wanted: dict[str, Any] = {
        "dtype": "float32",
        "device": "cuda",
        "block_size": 16,
        "token_budget": 8,
        "max_num_seqs": 2,
        "pool_bytes": 1 << 20,
        "calibrate": False,
    }
    return open_worker_engine(WorkerOptions(folder, kv_dir, **wanted | changes), WorkerId("decode-gpu"))


def model_of(core: WorkerEngine) -> DeviceDecoder:
    steps: Any = core.runner
    model: DeviceDecoder = steps._steps.runner._compute.model
    return model


@pytest.mark.usefixtures("card")
def test_an_engine_is_of_the_formats_that_settings_name(folder: Path, tmp_path: Path) -> None:
    core = opened(folder, tmp_path, quant="int8", kv_dtype="int8", exact=True)
    model, facts = model_of(core), core.facts
    assert (model.quant.name, model.exact) == ("int8", True)
    assert facts.layout.groups[0].dtype == core.options.kv_dtype == "int8"
    assert facts.layout.num_blocks == ((1 << 20) // facts.layout.groups[0].span_bytes,)
    assert "-exact-" in facts.numerics
    assert "float32-int8.1-kv.int8" in facts.numerics
    assert facts.computes.startswith("int8 over float32 on triton kernels, KV in int8: quality never measured")
    core.start()
    try:
        (drawn,) = complete(core, [[5, 9, 200]], 2)
        assert len(drawn) == 2
    finally:
        core.stop(WAIT_S)
    assert {path.name for path in tmp_path.iterdir()} == {"gpu.lock"}


@pytest.mark.usefixtures("card")
@pytest.mark.parametrize(
    ("changes", "words", "param"),
    [
        ({"kv_dtype": "fp8"}, "needs sm_89 or newer, this GPU is sm_80", "kv.dtype"),
        ({"kv_dtype": "bfloat16"}, "one of float32, int8, fp8", "kv.dtype"),
        ({"quant": "int4-g128"}, "q_proj.weight: weight has 64 input features", "quant"),
        ({"block_size": 4}, "block_size 4 has no GPU kernels", "kv.block_size"),
        ({"pool_bytes": 9 * GIB}, "kv.pool_bytes asks for 9.00 GiB", "kv.pool_bytes"),
    ],
    ids=str,
)
def test_what_a_card_cannot_do_is_told(
    folder: Path, tmp_path: Path, changes: dict[str, Any], words: str, param: str
) -> None:
    with pytest.raises(SettingsError, match=words) as error:
        opened(folder, tmp_path, **changes)
    assert error.value.param == param
    assert not list(tmp_path.glob("*.kvpool"))
