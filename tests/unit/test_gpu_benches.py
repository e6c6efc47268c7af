"""What only a card times, run without one: every case's tensors, checks and launches, and a model's steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from kernels.testing import DEVICE, INTERPRETED

# isort: split
from triton.runtime.interpreter import GridExecutor

from kernels import moe
from kernels.bench import peers
from kernels.bench.__main__ import SUITES, cases, line, main, missing, run
from kernels.bench.limits import Limits
from kernels.bench.row import Case
from kernels.chip import pretend
from kernels.rotary import frequencies, rotary_table
from kernels.rotary.triton_kernel import rotary_store_kv
from kernels.sampling.adjustment import Adjustment, adjust
from kernels.sampling.triton_rows import Bias, Mask, Penalties
from kernels.store_kv.triton_kernel import store_kv
from loadtest import device_model
from shared.contracts.sampling import SamplingParams
from shared.engine.decode_graphs import DecodeGraphs
from tests.device_models import SIZES

pytestmark = [
    pytest.mark.filterwarnings("ignore:overflow encountered"),  # numpy's, in the interpreter
    pytest.mark.skipif(not INTERPRETED, reason="there is a GPU: python -m kernels.bench"),
]

NO_MEMORY = torch.device("meta")


class NoCard(TorchFunctionMode):
    """Tensors of a card have a shape and no memory."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if torch.device(kwargs.get("device") or "cpu").type == "cuda":
            kwargs["device"] = NO_MEMORY
        args = tuple(NO_MEMORY if isinstance(arg, torch.device) and arg.type == "cuda" else arg for arg in args)
        return function(*args, **kwargs)


@pytest.mark.parametrize("suite", SUITES)
def test_every_case_of_the_bench_is_one_its_wrappers_take(suite: str, monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[object] = []
    monkeypatch.setattr(GridExecutor, "__call__", lambda self, *_, **__: launched.append(self))
    monkeypatch.setattr("kernels.bench.attention._CUDA", NO_MEMORY)  # plans ask what card it is
    monkeypatch.setattr("kernels.bench.linear._COLD_BYTES", 1)  # one weight a call
    monkeypatch.setattr("kernels.bench.attention._flex", lambda *_: lambda: None)  # compiles
    found = list(cases([suite]))
    names = [(case.operation, case.shape) for case in found]
    assert len(set(names)) == len(names)
    for case in found:
        assert case.bytes > 0
        before = len(launched)
        with NoCard():
            call, others = case.make()
            call()
            assert others, case.shape
            for peer in others.values():
                peer()
        assert len(launched) > before, case.shape


def test_peers_do_the_work_that_they_are_measured_for() -> None:
    """A ratio to something else would say nothing."""
    torch.manual_seed(0)
    rows, heads, kv_heads = 6, 4, 2
    qkv, table = torch.randn(rows, heads + 2 * kv_heads, 64), rotary_table(frequencies.plain(64, 1e4), 9, torch.float32)
    pools = torch.zeros(2, 3, 2, kv_heads, 16, 64)
    positions, slots = torch.arange(rows) + 3, torch.tensor([5, 47, 0, 17, 16, 30])
    ours, theirs = qkv.clone(), qkv.clone()
    rotary_store_kv(ours, table, positions, pools[0], slots, heads)
    peers.rotary_store(theirs, table, positions, pools[1], slots, heads)
    assert torch.allclose(ours[:, :heads], theirs[:, :heads], atol=1e-5)
    assert torch.allclose(pools[0], pools[1], atol=1e-5)

    for dtype, step in ((torch.int8, 1.0), (torch.float8_e4m3fn, 32.0)):  # of e4m3, between its largest numbers
        kept, scales = (
            torch.zeros(2, *pools.shape[1:], dtype=dtype, device=DEVICE),
            torch.zeros(2, *pools.shape[1:-1], device=DEVICE),
        )
        kv = torch.randn(rows, 2, kv_heads, 64, dtype=torch.bfloat16, device=DEVICE)
        store_kv(kv, kept[0], slots, scales[0])
        peers.store_quantized(kv, kept[1], scales[1], slots)
        assert torch.allclose(*scales, rtol=1e-6)
        assert scales.count_nonzero() == 2 * rows * 2 * kv_heads
        assert (kept[0].float() - kept[1].float()).abs().max() <= step
        assert (kept[0].view(torch.uint8) == kept[1].view(torch.uint8)).float().mean() > 0.999

    x, router = torch.randn(5, 32), torch.randn(5, 4)
    up, down = torch.randn(4, 48, 32), torch.randn(4, 32, 24)
    ids, shares = moe.route(router, 2)
    wanted = moe.experts(x, up, down, ids, shares)
    assert torch.allclose(peers.experts(x, up, down, router, 2), wanted, rtol=1e-4, atol=1e-4)
    assert torch.allclose(peers.grouped_experts(x, up, down, router, 2), wanted, rtol=1e-4, atol=1e-4)

    logits = torch.log(torch.tensor([[0.5, 0.3, 0.15, 0.05]])).repeat(4000, 1)
    for asked, left in (
        ((0.0, 0, 1.0, 0.0), 1),
        ((1.0, 2, 1.0, 0.0), 2),
        ((1.0, 0, 0.7, 0.0), 2),
        ((1.0, 0, 1.0, 0.2), 3),
    ):
        found = peers.sample(logits, *asked).bincount(minlength=4) / 4000
        shares = torch.tensor([0.5, 0.3, 0.15, 0.05])[:left]
        assert torch.allclose(found[:left], shares / shares.sum(), atol=0.05)
        assert int((found[left:] > 0).sum()) == 0


def test_the_peer_of_adjusted_sampling_adjusts_as_we_do() -> None:
    torch.manual_seed(0)
    vocab, asked, said, prompt, biases = 70, 2, (3, 3, 40), (5, 40, 69), {0: 2.0, 33: -1.5, 68: 0.5}
    logits, lines = torch.randn(3, vocab) * 3, torch.tensor([0, 1, -1], dtype=torch.int32)
    words = (vocab + 31) // 32
    allowed = torch.randint(-(1 << 31), (1 << 31) - 1, (asked, words)).int()
    counts = torch.tensor(said).bincount(minlength=vocab).int().repeat(asked, 1)
    prompts = np.packbits(np.isin(np.arange(32 * words), prompt), bitorder="little").view(np.int32)
    each = torch.ones(3)
    found = peers.adjusted(
        logits,
        asked,
        Penalties(each * 1.3, each * 0.5, each * 0.25, lines, counts, torch.from_numpy(prompts).repeat(asked, 1)),
        Bias(lines, torch.tensor([[*biases]] * asked).int(), torch.tensor([[*biases.values()]] * asked)),
        Mask(lines, allowed),
    )
    for row in range(asked):
        how = Adjustment(1.3, 0.5, 0.25, prompt, said, biases, mask=allowed[row].numpy().view(np.uint32))
        assert np.allclose(found[row].numpy(), adjust(logits[row].numpy(), how), atol=1e-5)
    assert torch.equal(found[asked:], logits[asked:])


def test_cases_of_float8_are_left_out_where_a_card_has_none() -> None:
    found = [case for suite in SUITES for case in cases([suite])]
    float8 = [case.shape for case in found if "fp8" in case.shape or "float8" in case.shape]
    assert len(float8) > 1
    with pretend((8, 0)):
        assert [case.shape for case in found if missing(case) == "float8"] == float8
    with pretend((8, 9)):
        assert not any(missing(case) for case in found)


@pytest.mark.parametrize(("option", "told"), [("--quant", "quant 'fp8'"), ("--kv", "kv.dtype 'fp8'")])
def test_a_model_of_float8_is_refused_where_a_card_has_none(
    option: str, told: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(device_model, "choose_device", lambda _: ("cuda", ""))
    with pretend((8, 0)):
        assert device_model.main([option, "fp8"]) == 1
    assert f"{told} needs sm_89 or newer, this GPU is sm_80" in capsys.readouterr().err


def test_a_case_is_told_beside_its_limits_and_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter((2e-3, 1e-3))

    def seconds(call: Callable[[], object]) -> float:
        call()
        return next(times)

    def broken() -> None:
        raise RuntimeError("not here")

    monkeypatch.setattr("kernels.bench.__main__.seconds", seconds)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    case = Case("linear", "M=1", 1e9, 1e9, lambda: (lambda: None, {"torch": lambda: None, "other": broken}))
    found = run(case, Limits(bytes_per_s=1e12, flops=1e13))
    assert (found.share, found.bound, found.peers) == (pytest.approx(0.5), "copy", {"torch": 1e-3})
    assert (
        line(found)
        == f"{'linear':20} {'M=1':38} {2000:9.1f} us  50.0% of copy   torch 0.50x (other: RuntimeError: not here)"
    )
    with pytest.raises(SystemExit):
        main(["liner"])
    assert main(["linear"]) == 1


def test_a_random_model_s_steps_run_and_their_bytes_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """All but graphs and a card's clock."""
    shape = {name: value for name, value in SIZES.items() if name not in ("initializer_range", "dtype", "eos_token_id")}
    tiny = shape | {
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": 1,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e4,
    }
    monkeypatch.setitem(device_model.SHAPES, "tiny", tiny)
    monkeypatch.setattr(device_model, "DecodeGraphs", lambda *_: None)
    model = device_model.make_model("tiny", DEVICE, quant="int4")
    case = device_model.Case(model, sequences=2, context=20, steps=8, kv_dtype="int8")
    times = case._run_steps(4, SamplingParams(max_tokens=1, temperature=0.0))
    assert times
    assert all(time > 0 for time in times)
    hidden, inner, vocab = 64, 96, 320
    matrices = hidden * (2 + 2) * 64 + 2 * 64 * hidden + 3 * hidden * inner
    kept = matrices // 2 + vocab * hidden
    assert kept < model.weights.step_bytes < 1.8 * kept
    assert case.step_bytes - model.weights.step_bytes == 2 * 20 * case.layout.groups[0].token_bytes


def test_graphs_are_of_the_largest_size_first_and_replay_in_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The order of calls; what a graph does needs a card."""
    told: list[Any] = []

    class Graph:
        def __init__(self) -> None:
            self.size: list[Any] = []

        def replay(self) -> None:
            told.append(("replay", *self.size))

    class Capture:
        def __init__(self, graph: Graph, pool: object, stream: object) -> None:
            self.graph, self.mark = graph, len(told)

        def __enter__(self) -> None: ...

        def __exit__(self, *_: object) -> None:
            self.graph.size = told[self.mark :]

    monkeypatch.setattr(torch.cuda, "graph_pool_handle", object)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", Capture)
    monkeypatch.setattr(torch.cuda, "current_stream", object)

    def compute(size: int) -> Tensor:
        told.append(("compute", size))
        return torch.zeros(size)

    graphs = DecodeGraphs(device_model.DeviceStream(DEVICE), compute, lambda logits: told.append(("draw", len(logits))))
    graphs.capture([1, 4, 2])
    once = [[(what, size) for what in ("compute", "draw")] * 2 for size in (4, 2, 1)]
    assert told == [call for calls in once for call in calls]
    told.clear()
    graphs.replay(2)
    assert told == [("replay", ("compute", 2)), ("replay", ("draw", 2))]
