"""Which device computes, and why not the GPU; how much of it a pool may take; what a device pool's file must say."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

import pytest
import torch

import kernels.testing  # noqa: F401 - decides how Triton's kernels are made, before they are imported

# isort: split
from triton.runtime.errors import OutOfResources

from kernels.arguments import KernelArgumentError
from kernels.dispatch import UnknownKernels, choose, choose_device, triton_digest
from shared.contracts.attempt import Attempt
from shared.contracts.errors import Internal, SettingsError, Unavailable
from shared.contracts.ids import Dispatch, Epoch, RequestId, WorkerId
from shared.engine.device_runner import DeviceLost, failures
from shared.engine.device_sizing import MARGIN_BYTES, pool_budget
from shared.engine.device_stream import DeviceStream
from shared.engine.device_worker import DeviceSteps
from shared.engine.step_plan import StepPlan
from shared.engine.worker_engine import WorkerOptions, open_worker_engine
from shared.kv import device_memory
from shared.kv.device_memory import OutOfDeviceMemory
from shared.kv.device_pool import PoolHandle, read_handle
from shared.kv.device_spans import span_of, zero_rest_on_device
from shared.kv.digest import DIGEST_BYTES
from shared.kv.layout import LayerGroup, PoolLayout, pool_layout

GIB = 1 << 30


class Card:
    """What torch says of a GPU."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int] = (9, 0)) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "Some Card")


def test_a_supported_card_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    Card(monkeypatch)
    assert choose_device("auto") == choose_device("cuda") == ("cuda", "")
    assert choose_device("cpu") == ("cpu", "")


def test_why_not_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", None)
    assert choose_device("cuda") == ("cpu", "this build of torch has no CUDA")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert choose_device("auto") == ("cpu", "torch sees no CUDA card")
    Card(monkeypatch, (7, 5))
    assert choose_device("cuda") == ("cpu", "Some Card is sm_75, kernels need sm_80 or newer")
    Card(monkeypatch)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert choose_device("cuda") == ("cpu", "the package triton is not installed")
    with pytest.raises(UnknownKernels, match="triton is not installed"):
        choose("triton")
    with pytest.raises(ValueError, match="no device named 'tpu'"):
        choose_device("tpu")


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"kernels": "native", "device": "cuda"}, "kernels 'native' does not run on a GPU"),
        ({"kernels": "triton", "device": "cpu"}, "kernels 'triton' need a GPU: device is cpu"),
        ({"kernels": "triton", "device": "cuda"}, "kernels 'triton' need a GPU: torch sees no CUDA card"),
    ],
)
def test_what_does_not_go_together_is_refused(
    changes: dict[str, Any], what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    with pytest.raises(SettingsError, match=what):
        open_worker_engine(WorkerOptions(tmp_path, tmp_path, **changes), "decode-1")  # type: ignore[arg-type]


def test_a_pool_takes_what_is_left_of_a_workers_share() -> None:
    left = pool_budget(100 * GIB, 0.5, weights=20 * GIB, steps=2 * GIB, free=70 * GIB, wanted=0)
    assert left == 28 * GIB - MARGIN_BYTES
    # others have the rest
    assert pool_budget(100 * GIB, 0.5, 20 * GIB, 2 * GIB, free=10 * GIB, wanted=0) == 8 * GIB - MARGIN_BYTES
    assert pool_budget(100 * GIB, 0.5, 20 * GIB, 2 * GIB, free=70 * GIB, wanted=GIB) == GIB
    with pytest.raises(SettingsError, match=r"has 27\.75 GiB left for KV .* but kv\.pool_bytes asks for 40\.00 GiB"):
        pool_budget(100 * GIB, 0.5, 20 * GIB, 2 * GIB, free=70 * GIB, wanted=40 * GIB)
    with pytest.raises(SettingsError, match=r"has 0\.00 GiB left"):
        pool_budget(100 * GIB, 0.5, 60 * GIB, 2 * GIB, free=30 * GIB, wanted=0)


def test_a_file_that_is_no_device_pools_is_told(tmp_path: Path) -> None:
    import msgspec

    path = tmp_path / "x.kvpool"
    handle = PoolHandle(b"h" * 64, 8, "GPU-1", (2,))
    wrong = (PoolHandle(b"h" * 63, 8, "GPU-1", (2,)), PoolHandle(b"h" * 64, 8, "GPU-1", (0,)))
    bad = [b"", b"\x00" * 4096, *map(msgspec.msgpack.encode, wrong)]
    for data, good in ((msgspec.msgpack.encode(handle), True), *((data, False) for data in bad)):
        path.write_bytes(data)
        fd = os.open(path, os.O_RDONLY)
        try:
            if good:
                assert read_handle(fd, "x.kvpool") == handle
            else:
                with pytest.raises(Unavailable, match=r"x\.kvpool is not one in GPU memory"):
                    read_handle(fd, "x.kvpool")
        finally:
            os.close(fd)


def test_spans_and_tails_lie_where_the_layout_says() -> None:
    group = LayerGroup("full", (0, 1), num_kv_heads=2, head_dim=4, block_size=8, dtype="bfloat16")
    layout = PoolLayout((group, group), (3, 2))
    data = torch.arange(layout.total_bytes, dtype=torch.int64).to(torch.uint8)
    span = span_of(data, layout, 1, 1)
    assert span.data_ptr() - data.data_ptr() == layout.block_offset(1, 1)
    assert span.shape == (group.span_bytes,)
    with pytest.raises(IndexError):
        span_of(data, layout, 1, 2)
    data.fill_(7)
    zero_rest_on_device(span, group, 5)
    rows = span.view(torch.bfloat16).view(2, 2, 2, 8, 4)
    assert bool((rows[..., 5:, :] == 0).all())
    assert not bool((rows[..., :5, :] == 0).any())


class Lost:
    """Steps whose device fails, at the launch or later."""

    def __init__(self, later: bool) -> None:
        self.runner = self
        self.later = later

    def run(self, plan: StepPlan) -> Any:
        if self.later:
            return self.fail
        return self.fail()

    zero_blocks = run

    def fail(self) -> Any:
        raise DeviceLost("gone")


@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize("what", ["step", "zeroing"])
def test_a_worker_ends_with_its_device(what: str, later: bool, caplog: pytest.LogCaptureFixture) -> None:
    ended: list[int] = []
    steps = DeviceSteps(Lost(later), ended.append)  # type: ignore[arg-type]
    with pytest.raises(DeviceLost):
        steps.run(StepPlan(1, ()))() if what == "step" else steps.zero_blocks([(0, 1)])()  # type: ignore[operator]
    assert ended == [1]
    assert "gone; the worker ends" in caplog.text


class Stream:
    """One whose device has failed, or not."""

    def __init__(self, answers: bool) -> None:
        self._answers = answers

    def answers(self) -> bool:
        return self._answers


@pytest.mark.parametrize(
    ("error", "answers", "mapped"),
    [
        (torch.AcceleratorError("CUDA error: an illegal memory access was encountered"), True, DeviceLost),
        (RuntimeError("Triton Error [CUDA]: unspecified launch failure"), False, DeviceLost),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED"), True, Internal),
        (torch.OutOfMemoryError("CUDA out of memory"), True, OutOfDeviceMemory),
        (OutOfResources(300000, 232448, "shared memory"), True, Internal),
        (KernelArgumentError("x has shape [1]"), True, Internal),
    ],
)
def test_a_device_that_answers_is_not_lost(error: Exception, answers: bool, mapped: type[Internal]) -> None:
    with pytest.raises(Internal) as found, failures(Stream(answers), "in step 7"):  # type: ignore[arg-type]
        raise error
    assert type(found.value) is mapped
    assert "in step 7" in found.value.message
    assert str(error) in found.value.message


def test_a_pool_without_room_for_two_blocks_is_told_with_its_numbers() -> None:
    group = LayerGroup("full", (0,), num_kv_heads=2, head_dim=4, block_size=8, dtype="float32")
    assert pool_layout((group, group), 5 * 2 * group.span_bytes).num_blocks == (5, 5)
    words = (
        rf"kv\.pool_bytes: a pool of 1000 bytes holds no two blocks of kv\.block_size 8, {2 * group.span_bytes} bytes"
    )
    with pytest.raises(SettingsError, match=words) as error:
        pool_layout((group, group), 1000)
    assert error.value.param == "kv.pool_bytes"


def test_a_pools_memory_shares_no_page_with_other_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: DeviceStream(torch.device("cpu")))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    monkeypatch.setattr(device_memory.DeviceMemory, "tensor", lambda self: torch.empty(self.size, dtype=torch.uint8))
    monkeypatch.setattr(device_memory, "_call", lambda name, pointer, size: asked.append(size.value))
    for size, pages in ((1, 1), (2 << 20, 1), ((2 << 20) + 1, 2)):
        assert device_memory.allocate(size, torch.device("cuda", 0)).size == size
        assert asked.pop() == pages * (2 << 20)


def test_a_block_size_without_kernels_is_refused_before_anything_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Card(monkeypatch)
    with pytest.raises(SettingsError, match="block_size 48 has no GPU kernels, only 8, 16, 32, 64, 128") as caught:
        open_worker_engine(WorkerOptions(tmp_path, tmp_path, device="cuda", block_size=48), WorkerId("decode-1"))
    assert caught.value.param == "kv.block_size"


def test_a_changed_triton_kernel_is_another_build(tmp_path: Path) -> None:
    (tmp_path / "norm").mkdir()
    kernel = tmp_path / "norm" / "triton_kernel.py"
    found = []
    for text in ("a = 1", "a = 2", "a = 1"):
        kernel.write_text(text)
        found.append(triton_digest(tmp_path))
    (tmp_path / "norm" / "cpu_kernel.h").write_text("another file")
    assert found[0] == found[2] == triton_digest(tmp_path) != found[1]
    kernel.rename(tmp_path / "norm" / "triton_other.py")
    assert triton_digest(tmp_path) != found[0]
    assert choose("triton").build.endswith(f"-{triton_digest()}-reference")


def test_a_fake_worker_computes_on_no_gpu_even_where_one_is_asked_for(tmp_path: Path) -> None:
    core = open_worker_engine(WorkerOptions(tmp_path, tmp_path, device="cuda", fake=True), WorkerId("decode-1"))
    try:
        assert core.open_transport().path == "shared_memory"
        (digest,) = core.digest_blocks(Attempt(RequestId("r-1"), Epoch(1), Dispatch(1)), [(0, 0, 1, 0)])
        assert len(digest) == DIGEST_BYTES
    finally:
        core.stop(1.0)
