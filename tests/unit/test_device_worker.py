"""A GPU worker's engine as it is opened, and a pull, in Triton's interpreter: everything of them but the card."""

from __future__ import annotations

import contextlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from kernels.testing import INTERPRETED

# isort: split
from shared.contracts.attempt import Attempt
from shared.contracts.errors import SettingsError
from shared.contracts.ids import BlockGeneration, Dispatch, Epoch, Incarnation, RequestId, WorkerId
from shared.contracts.parts import BlockRef
from shared.engine import device_sizing, device_worker
from shared.engine.device_batch import StepShape
from shared.engine.device_compute import DeviceCompute, StepLimits
from shared.engine.step_plan import StepPlan
from shared.engine.worker_engine import WorkerEngine, WorkerOptions, open_worker_engine
from shared.kv import device_pool, device_transfer
from shared.kv.device_spans import device_views
from shared.kv.handoff_sink import Pull, PullItem
from shared.kv.layout import LayerGroup, PoolLayout
from shared.model.config import layer_groups
from shared.model.device_decoder import DeviceDecoder, load_device_decoder
from tests.gpu.test_gpu_worker import WAIT_S, complete
from tests.tiny_models import make_tiny_model

pytestmark = [
    pytest.mark.filterwarnings("ignore:overflow encountered"),  # numpy's, in the interpreter
    pytest.mark.skipif(not INTERPRETED, reason="there is a GPU: tests/gpu"),
]

GIB = 1 << 30


class Memory:
    """A device's memory, on the host."""

    made: ClassVar[dict[bytes, Memory]] = {}

    def __init__(self, size: int, device: torch.device) -> None:
        self._bytes = torch.zeros(size, dtype=torch.uint8)
        self._handle = len(self.made).to_bytes(64, "big")
        self.made[self._handle] = self

    def tensor(self) -> Tensor:
        return self._bytes

    def handle(self) -> bytes:
        return self._handle

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
        Stream=lambda device: None,
        stream=lambda stream: contextlib.nullcontext(),
    )

    def device(self, *_: object) -> torch.device:
        return torch.device("cpu")

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kernels.dispatch.choose_device", lambda setting: ("cuda", ""))
    monkeypatch.setattr(device_worker, "torch", TorchWithACard())
    monkeypatch.setattr(device_transfer, "torch", TorchWithACard())
    monkeypatch.setattr(device_transfer, "map_peer", lambda handle, size, device: Memory.made[handle])
    monkeypatch.setattr(device_transfer, "device_uuid", lambda device: "GPU-1")
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


@pytest.mark.usefixtures("card")
def test_a_pool_that_leaves_no_room_for_steps_is_made_smaller(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The largest steps run out of memory beside the first pool, not beside the second."""
    launch, sizes = DeviceCompute.mixed, list[int]()

    def mixed(self: DeviceCompute, plan: StepPlan, shape: StepShape) -> Tensor:
        sizes.append(self.pools[0].values.shape[0])
        if len(set(sizes)) == 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return launch(self, plan, shape)

    monkeypatch.setattr(DeviceCompute, "mixed", mixed)
    core = opened(folder, tmp_path)
    wanted = (1 << 20) // core.facts.layout.groups[0].span_bytes
    assert sizes[0] == wanted
    assert core.facts.layout.num_blocks == (
        int((1 << 20) * device_sizing.SHRINK) // core.facts.layout.groups[0].span_bytes,
    )
    core.stop(WAIT_S)


@pytest.mark.usefixtures("card")
def test_steps_without_room_beside_any_pool_are_told(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def mixed(*_: object) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(DeviceCompute, "mixed", mixed)
    with pytest.raises(SettingsError, match="no room for a KV pool beside this model's steps"):
        opened(folder, tmp_path)
    assert not list(tmp_path.glob("*.kvpool"))


@pytest.mark.parametrize("quant", ["none", "int4"])
def test_every_class_of_rows_is_run_before_ready(folder: Path, quant: str) -> None:
    """Where products are compiled for it: cuBLAS has them all."""
    model = load_device_decoder(folder, "float32", "cpu", quant=quant)
    groups = layer_groups(model.config, 16, "float32")
    layout = PoolLayout(groups, (4,))
    pools = device_views(torch.zeros(layout.total_bytes, dtype=torch.uint8), layout)
    steps = device_sizing.Steps(model, groups, pools, StepLimits(48, 2, model.config.max_positions))
    ran: list[int] = []

    class Recorder:
        def run(self, plan: StepPlan) -> Any:
            ran.append(plan.num_tokens)
            return lambda: None

    steps.runner = Recorder()  # type: ignore[assignment]
    steps.burst()
    assert ran.count(48) >= device_sizing.BURST_STEPS
    assert [ran.count(rows) for rows in (16, 32)] == ([1, 1] if quant != "none" else [0, 0])


@pytest.mark.usefixtures("card")
def test_a_pull_is_digested_where_it_arrives(tmp_path: Path) -> None:
    """8-bit values and their scales, a tail, a wrong digest, a block that is not there, a pool that is gone."""
    group = LayerGroup("full", (0, 1), num_kv_heads=2, head_dim=64, block_size=16, dtype="int8")
    attempt, cpu = Attempt(RequestId("r-1"), Epoch(1), Dispatch(1)), torch.device("cpu")
    peer = device_pool.create_device_pool(tmp_path, WorkerId("prefill-1"), PoolLayout((group,), (6,)), cpu)
    own = device_pool.create_device_pool(tmp_path, WorkerId("decode-1"), PoolLayout((group,), (4,)), cpu)
    transport = device_transfer.DeviceTransport(tmp_path, (group,), own, cpu)
    peer.bytes.random_(1, 256, generator=torch.Generator().manual_seed(0))
    view = peer.views()[0]
    assert view.scales is not None
    view.values[4, ..., 5:, :] = 0
    view.scales[4, ..., 5:] = 0
    whole, tail = peer.digests(attempt, [(0, 3, 7, 0), (0, 4, 7, 1)])
    view.scales[4, ..., 5:] = 1.0  # nobody's

    def pull(*blocks: tuple[int, bytes, int]) -> device_transfer.PullResult:
        items = tuple(
            PullItem(0, position, BlockRef(block, BlockGeneration(7), digest), valid)
            for position, (block, digest, valid) in enumerate(blocks)
        )
        wanted = Pull(1, attempt, WorkerId("prefill-1"), Incarnation(1), "prefill-1.kvpool", items)
        return transport.pull(wanted, [[2, 1]], ())

    result = pull((3, whole, 16), (4, tail, 5))
    assert (result.error, result.bad, result.num_bytes) == ("", (), 2 * group.span_bytes)
    assert bytes(own.span(0, 2)) == bytes(peer.span(0, 3))
    assert pull((3, whole, 16), (4, whole, 5)).bad == ((0, 1),)
    assert pull((6, whole, 16), (4, tail, 5)).bad == ((0, 0),)
    view.scales[3, 0, 0, 0, 0] = -1.0
    assert pull((3, whole, 16)).bad == ((0, 0),)
    peer.close()
    transport.drop_dead()
    assert "cannot be opened" in pull((3, whole, 16)).error
    transport.close()
    own.close()
