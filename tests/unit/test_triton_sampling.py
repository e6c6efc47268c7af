"""The sampling kernels give the tokens that `kernels.sampling` gives, in Triton's interpreter or on a GPU."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from kernels.testing import DEVICE, INTERPRETED, assert_close

# isort: split
import triton
import triton.language as tl

from kernels.arguments import KernelArgumentError
from kernels.sampling import RowSampling
from kernels.sampling import sample as sample_reference
from kernels.sampling.adjustment import Adjustment
from kernels.sampling.logprobs import row_logprobs
from kernels.sampling.triton_filter import CANDIDATES
from kernels.sampling.triton_kernel import sample
from kernels.sampling.triton_logprobs import NO_ID, Top, top_logprobs
from kernels.sampling.triton_noise import gumbel_noise, noise_words, rough_noise
from kernels.sampling.triton_rows import NO_BIAS, Bias, Mask, Penalties, SamplingRows
from kernels.sampling.triton_verify import accept, verify

pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # numpy's, in the interpreter
    *([] if INTERPRETED else [pytest.mark.gpu]),
]

GOLDEN = Path(__file__).parents[1] / "golden" / "sampling_noise.json"
TOP_P, SEED = 0.9, 5


def row(
    temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0, position: int = 9
) -> RowSampling:
    return RowSampling(temperature, top_k, top_p, SEED, position, min_p)


def tensors(rows: Sequence[RowSampling]) -> SamplingRows:
    def column(name: str, dtype: torch.dtype) -> Tensor:
        return torch.tensor([getattr(item, name) for item in rows], dtype=dtype, device=DEVICE)

    seeds = np.array([item.seed for item in rows], dtype=np.uint64).view(np.int64)
    return SamplingRows(
        column("temperature", torch.float32),
        column("top_k", torch.int32),
        column("top_p", torch.float64),
        column("min_p", torch.float64),
        torch.from_numpy(seeds).to(DEVICE),
        column("position", torch.int64),
    )


def logits_of(num_rows: int, vocab_size: int, spread: float, seed: int = 0) -> Tensor:
    return torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * spread


def draw(logits: Tensor, rows: Sequence[RowSampling]) -> list[int]:
    tokens: list[int] = sample(logits.to(DEVICE), tensors(rows)).tokens.tolist()
    return tokens


@triton.jit
def _noise_kernel(out_ptr, seed_ptr, first_id, BLOCK: tl.constexpr):
    seed, position = tl.load(seed_ptr), tl.load(seed_ptr + 1)
    tl.store(out_ptr + tl.arange(0, BLOCK), gumbel_noise(noise_words(seed, position, first_id, BLOCK)))


def test_noise_equals_the_golden_vectors() -> None:
    for case in json.loads(GOLDEN.read_text()):
        numbers = np.array([int(case["seed"]), int(case["position"])], dtype=np.uint64).view(np.int64)
        for token_id, expected in zip(case["token_ids"], case["gumbel"], strict=True):
            out = torch.empty(16, device=DEVICE)
            first = token_id // 16 * 16
            _noise_kernel[(1,)](out, torch.from_numpy(numbers).to(DEVICE), first, BLOCK=16)
            np.testing.assert_allclose(out[token_id - first].item(), np.float32(expected), rtol=1.2e-7, atol=0)


@triton.jit
def _both_noises_kernel(word_ptr, exact_ptr, rough_ptr, BLOCK: tl.constexpr):
    o_w = tl.arange(0, BLOCK)
    words = tl.load(word_ptr + o_w).to(tl.uint32)
    tl.store(exact_ptr + o_w, gumbel_noise(words))
    tl.store(rough_ptr + o_w, rough_noise(words))


def test_rough_noise_is_near_enough_to_the_exact_one() -> None:
    ends = torch.tensor([0, 1, 2, 2**31, 2**32 - 1, 2**32 - 2, 2**32 - 1000, 2**32 - 2**28, 2**32 - 2**28 + 300])
    spread = torch.linspace(0, 2**32 - 1, 4096 - len(ends), dtype=torch.float64).long()
    words = torch.cat((ends, spread)).to(DEVICE)
    exact, rough = torch.empty(2, 4096, device=DEVICE)
    _both_noises_kernel[(1,)](words, exact, rough, BLOCK=4096)
    # a token's rank by rough noise may be off by twice this; the kernel takes 1e-3 for safe
    assert (exact - rough).abs().max() < 1e-4
    assert exact.isfinite().all()


ROWS = [
    row(temperature=0.0),
    row(temperature=1e-7),
    row(),
    row(temperature=0.7),
    row(temperature=0.0001),
    row(temperature=30.0),
    row(top_k=1),
    row(top_k=7),
    row(top_k=40, temperature=2.0),
    row(top_k=10**6),
    row(top_p=1e-9),
    row(top_p=0.5),
    row(top_p=TOP_P),
    row(top_p=0.9999, temperature=3.0),
    row(top_p=TOP_P, top_k=12),
    row(top_p=0.3, top_k=500, temperature=1.7),
    row(min_p=0.1),
    row(min_p=1.0),
    row(min_p=0.02, top_k=20, top_p=0.95, temperature=1.2),
]


@pytest.mark.parametrize(("vocab_size", "spread"), [(300, 3.0), (5003, 2.0), (8192, 0.1)])
def test_tokens_equal_the_reference(vocab_size: int, spread: float) -> None:
    logits = logits_of(len(ROWS), vocab_size, spread)
    assert draw(logits, ROWS) == sample_reference(logits, ROWS)


@pytest.mark.parametrize("item", [row(), row(top_k=9), row(top_p=0.8), row(min_p=0.05)], ids=str)
def test_many_draws_equal_the_reference(item: RowSampling) -> None:
    rows = [replace(item, position=i + (i % 3 << 40), seed=2**64 - 1 - i) for i in range(16)]
    logits = logits_of(1, 701, 1.5, seed=4).expand(16, 701).contiguous()
    assert draw(logits, rows) == sample_reference(logits, rows)


def test_ties_go_to_the_lowest_ids() -> None:
    logits = torch.zeros(6, 4100)
    logits[:, [3, 77, 4099]] = 5.0
    rows = [row(0.0), row(top_k=1), row(top_k=2), row(top_p=0.001), row(top_k=50), row(top_p=0.2)]
    for position in range(2):
        moved = [replace(item, position=position) for item in rows]
        assert draw(logits, moved) == sample_reference(logits, moved)
    assert draw(logits, rows)[0] == 3


@pytest.mark.parametrize("item", [row(top_p=0.75), row(top_k=19_000)], ids=str)
def test_more_survivors_than_candidates_have_room(item: RowSampling) -> None:
    vocab_size = CANDIDATES + 4000
    logits = logits_of(1, vocab_size, 0.01, seed=2)
    assert draw(logits, [item]) == sample_reference(logits, [item])


def test_rows_do_not_depend_on_their_batch() -> None:
    logits = logits_of(len(ROWS), 997, 2.0, seed=6)
    together = draw(logits, ROWS)
    assert [draw(logits[i : i + 1], ROWS[i : i + 1])[0] for i in range(0, len(ROWS), 3)] == together[::3]


def bits(num_rows: int, vocab_size: int, ids: Sequence[frozenset[int]]) -> Tensor:
    words = np.zeros((num_rows, -(-vocab_size // 32) * 32), dtype=np.uint8)
    for i, row_ids in enumerate(ids):
        words[i, list(row_ids)] = 1
    packed = np.packbits(words, axis=1, bitorder="little").view(np.int32)
    return torch.from_numpy(packed.copy()).to(DEVICE)


def integers(values: Sequence[int] | Sequence[Sequence[int]]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def adjusted_rows(given: SamplingRows, adjustments: Sequence[Adjustment], vocab_size: int) -> SamplingRows:
    """Every row with a line of its own of everything, in reverse."""
    count = len(adjustments)
    lines = list(reversed(range(count)))
    ordered = list(reversed(adjustments))
    said = np.stack([np.bincount(item.output_ids or [vocab_size], minlength=vocab_size + 1) for item in ordered])
    biases = [[*sorted(item.bias.items()), *[(NO_BIAS, 0.0)] * 3][:3] for item in ordered]
    everything = frozenset(range(vocab_size))

    def column(name: str) -> Tensor:
        return torch.tensor([getattr(item, name) for item in adjustments], dtype=torch.float32, device=DEVICE)

    def lines_of(wants: Callable[[Adjustment], object]) -> Tensor:
        return integers([line if wants(item) else -1 for line, item in zip(lines, adjustments, strict=True)])

    penalties = Penalties(
        column("repetition"),
        column("presence"),
        column("frequency"),
        lines_of(lambda item: item.output_ids or item.prompt_ids),
        torch.from_numpy(said[:, :vocab_size].astype(np.int32)).to(DEVICE),
        bits(count, vocab_size, [frozenset(item.prompt_ids) for item in ordered]),
    )
    values = torch.tensor([[value for _, value in line] for line in biases], dtype=torch.float32, device=DEVICE)
    bias = Bias(lines_of(lambda item: item.bias), integers([[i for i, _ in line] for line in biases]), values)
    allowed = bits(count, vocab_size, [everything if i.allowed is None else i.allowed for i in ordered])
    mask = Mask(lines_of(lambda item: item.allowed is not None), allowed)
    return replace(given, penalties=penalties, bias=bias, mask=mask)


def test_penalties_bias_and_mask_equal_the_reference() -> None:
    vocab_size = 4130
    everything = frozenset(range(vocab_size))
    adjustments = [
        Adjustment(),
        Adjustment(repetition=1.3, prompt_ids=(1, 2, 330), output_ids=(5, 5, 7)),
        Adjustment(presence=0.7, frequency=0.3, prompt_ids=(9,), output_ids=(0, 0, 0, 64, 4129)),
        Adjustment(bias={4: 30.0, 4095: -2.5, 4129: 31.0}),
        Adjustment(allowed=frozenset({17, 31, 32, 4129})),
        Adjustment(2.0, 0.1, -0.4, (3, 4), (3, 3, 6), {6: 1.5, 8: 3.0}, everything - {0, 8}),
    ]
    logits = logits_of(len(adjustments), vocab_size, 2.0, seed=8)
    for item in [row(0.0), row(), row(top_k=5), row(top_p=0.9)]:
        plain = [item] * len(adjustments)
        given = adjusted_rows(tensors(plain), adjustments, vocab_size)
        expected = sample_reference(logits, [replace(item, adjustment=a) for a in adjustments])
        before = given.penalties.counts.clone()  # type: ignore[union-attr]
        drawn = sample(logits.to(DEVICE), given)
        assert drawn.tokens.tolist() == expected
        assert drawn.finite.tolist() == [1] * len(adjustments)
        # what was drawn is counted in lines of rows with penalties, and nothing else
        for line, found in zip(given.penalties.lines.tolist(), expected, strict=True):  # type: ignore[union-attr]
            if line >= 0:
                before[line, found] += 1
        assert torch.equal(given.penalties.counts, before)  # type: ignore[union-attr]


def made_up(rng: random.Random, vocab_size: int) -> RowSampling:
    """A row with some of everything."""

    def ids(most: int) -> tuple[int, ...]:
        return tuple(rng.choices(range(vocab_size), k=rng.randint(0, most)))

    adjustment = Adjustment(
        rng.choice([1.0, 1.3, 0.7, 2.0]),
        rng.choice([0.0, 1.5, -2.0]),
        rng.choice([0.0, 0.6, -0.3]),
        ids(20),
        ids(30),
        {i: rng.choice([3.0, -5.0, -np.inf, 100.0]) for i in ids(3)},
        frozenset(ids(40)) if rng.random() < 0.4 else None,
    )
    return RowSampling(
        rng.choice([0.0, 0.3, 1.0, 4.0]),
        rng.choice([0, 1, 5, 50]),
        rng.choice([1.0, 0.95, 0.4]),
        rng.getrandbits(64),
        rng.getrandbits(33),
        rng.choice([0.0, 0.05, 0.6]),
        adjustment,
    )


@pytest.mark.long
@pytest.mark.parametrize("seed", range(12))
def test_whatever_is_asked_the_tokens_are_the_references(seed: int) -> None:
    rng = random.Random(seed)
    vocab_size = rng.choice([33, 300, 4130])
    rows = [made_up(rng, vocab_size) for _ in range(24)]
    logits = logits_of(len(rows), vocab_size, rng.choice([0.5, 3.0]), seed)
    adjustments = [row.adjustment for row in rows if row.adjustment is not None]
    drawn = sample(logits.to(DEVICE), adjusted_rows(tensors(rows), adjustments, vocab_size))
    expected = sample_reference(logits, rows)
    assert drawn.finite.tolist() == [int(token >= 0) for token in expected]
    assert [token for token, row in zip(drawn.tokens.tolist(), expected, strict=True) if row >= 0] == [
        token for token in expected if token >= 0
    ]


def test_rows_that_give_no_token_are_told_as_the_reference_tells_them() -> None:
    logits = logits_of(6, 70, 1.0)
    logits[0, 3], logits[1, 3], logits[2, 3], logits[3] = torch.nan, torch.inf, -torch.inf, -torch.inf
    nothing = Adjustment(allowed=frozenset())
    ended = Adjustment(bias={3: -np.inf, 9: -np.inf}, allowed=frozenset({3, 9}))
    for item in (row(0.0), row(), row(top_p=0.5)):
        adjustments = [Adjustment()] * 4 + [nothing, ended]
        expected = sample_reference(logits, [replace(item, adjustment=a) for a in adjustments])
        drawn = sample(logits.to(DEVICE), adjusted_rows(tensors([item] * 6), adjustments, 70))
        assert drawn.finite.tolist() == [0, 0, 1, 0, 0, 0] == [int(token >= 0) for token in expected]
        assert drawn.tokens.tolist()[2] == expected[2]
        assert all(0 <= token < 70 for token in drawn.tokens.tolist())


def test_logprobs_are_of_the_logits_as_given() -> None:
    logits = logits_of(3, 5001, 3.0, seed=11)
    rows = adjusted_rows(
        tensors([row(0.0), row(temperature=2.0), row(top_k=3)]), [Adjustment(bias={7: 5.0}), *[Adjustment()] * 2], 5001
    )
    drawn = sample(logits.to(DEVICE), replace(rows, scored=integers([-1, -1, 4321])))
    every = logits.double().log_softmax(-1)
    told = [*drawn.tokens.tolist()[:2], 4321]
    assert [row_logprobs(line.numpy(), token, 0)[0] for line, token in zip(logits, told, strict=True)] == pytest.approx(
        drawn.logprobs.tolist(), abs=2e-5
    )
    assert_close(drawn.log_sums, logits.double().logsumexp(-1), torch.float32)
    top = top_logprobs(logits.to(DEVICE), drawn.log_sums, 5)
    values, indices = every.topk(5)
    assert top.ids.tolist() == indices.tolist()
    assert (top.logprobs.cpu().double() - values).abs().max() < 2e-5
    assert drawn.logprobs.max() <= 0
    assert top.logprobs.max() <= 0


def test_rows_get_as_many_of_the_most_likely_as_they_want() -> None:
    logits = logits_of(4, 4200, 2.0, seed=3)
    sums = logits.logsumexp(-1).to(DEVICE)
    out = Top(integers([[-7] * 6] * 4), torch.full((4, 6), 9.0, device=DEVICE))
    top_logprobs(logits.to(DEVICE), sums, 6, wanted=integers([0, 6, 1, 2]), out=out)
    for line, ids, values, count in zip(logits, out.ids.tolist(), out.logprobs.tolist(), (0, 6, 1, 2), strict=True):
        _, expected = row_logprobs(line.numpy(), 0, count)
        assert ids == [i for i, _ in expected] + [-7] * (6 - count)
        assert values == pytest.approx([value for _, value in expected] + [9.0] * (6 - count), abs=2e-5)


def test_top_logprobs_of_equal_logits_are_the_lowest_ids() -> None:
    logits = torch.zeros(1, 4200, device=DEVICE)
    logits[0, 4150] = 1.0
    assert top_logprobs(logits, logits.logsumexp(-1), 4).ids.tolist() == [[4150, 0, 1, 2]]
    few = top_logprobs(torch.tensor([[1.0, -torch.inf, 2.0]], device=DEVICE), torch.zeros(1, device=DEVICE), 5)
    assert few.ids.tolist() == [[2, 0, 1, NO_ID, NO_ID]]


@pytest.mark.parametrize("bad", [torch.nan, -torch.inf])
def test_a_row_of_nothing_gives_a_token_of_the_vocabulary(bad: float) -> None:
    rows = [row(0.0), row(), row(top_k=3), row(top_p=0.5), row(min_p=0.1)]
    tokens = draw(torch.full((len(rows), 70), bad), rows)
    assert all(0 <= token < 70 for token in tokens)


def test_not_a_number_and_masked_tokens_are_never_drawn() -> None:
    logits = torch.full((4, 64), -torch.inf)
    logits[:, 10], logits[:, 20] = torch.nan, 1.0
    assert draw(logits, [row(0.0), row(), row(top_k=5), row(top_p=0.99)]) == [20] * 4


def wide_bias(width: int) -> Bias:
    return Bias(integers([0]), integers([[0] * width]), torch.zeros(1, width, device=DEVICE))


def test_drafts_count_up_to_the_first_wrong_one() -> None:
    tokens, drafts = integers([1, 2, 3, 7, 8, 9, 4]), integers([1, 2, -1, 7, 0, 9, -1])
    # all right and one more; no rows; right, then wrong; no drafts
    assert accept(tokens, drafts, integers([0, 3, 3, 6, 7])).tolist() == [3, 0, 2, 1]


@pytest.mark.parametrize("item", [row(0.0), row(temperature=1.3, top_p=0.95)], ids=str)
def test_verified_drafts_put_out_what_single_steps_would(item: RowSampling) -> None:
    """A sequence whose drafts are right but for the last, one whose first is wrong, and one without any."""
    vocab_size, prompts = 90, [(1, 2), (60,), (4, 5)]
    lengths = [4, 3, 1]
    logits = logits_of(sum(lengths), vocab_size, 0.5, seed=21)
    penalized = [Adjustment(1.4, 0.5, 0.8, prompt) for prompt in prompts]
    truth: list[list[int]] = []
    first = 0
    for length, adjustment in zip(lengths, penalized, strict=True):
        output: list[int] = []
        for i in range(length):
            one = replace(item, position=i, adjustment=replace(adjustment, output_ids=tuple(output)))
            output += sample_reference(logits[first + i : first + i + 1], [one])
        truth.append(output)
        first += length
    # drafts that went wrong once: what follows is sampled, and does not count
    drafts = [[*truth[0][:2], (truth[0][2] + 1) % vocab_size, 0], [(truth[1][0] + 1) % vocab_size, 7, 0], [0]]
    flat = [item for line in drafts for item in line]
    rows = tensors([replace(item, position=i) for length in lengths for i in range(length)])
    lines = [line for line, length in enumerate(lengths) for _ in range(length)]

    def column(name: str) -> Tensor:
        return torch.tensor([getattr(penalized[line], name) for line in lines], dtype=torch.float32, device=DEVICE)

    penalties = Penalties(
        column("repetition"),
        column("presence"),
        column("frequency"),
        integers(lines),
        torch.zeros(3, vocab_size, dtype=torch.int32, device=DEVICE),
        bits(3, vocab_size, [frozenset(prompt) for prompt in prompts]),
    )
    cu_rows = integers([0, 4, 7, 8])
    found = verify(logits.to(DEVICE), replace(rows, penalties=penalties), integers(flat), cu_rows)
    assert found.accepted.tolist() == [3, 1, 1]
    drawn = found.drawn.tokens.tolist()
    kept = [drawn[:3], drawn[4:5], drawn[7:]]
    assert kept == [truth[0][:3], truth[1][:1], truth[2]]
    expected = torch.stack([torch.bincount(torch.tensor(tokens), minlength=vocab_size) for tokens in kept])
    assert torch.equal(penalties.counts.cpu().long(), expected)


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda: sample(torch.zeros(2, 9, device=DEVICE), tensors([row()])), r"temperature.*\[1\], expected \[2\]"),
        (lambda: sample(torch.zeros(9, 1, device=DEVICE).T.expand(2, 9), tensors([row()] * 2)), r"logits.*strides"),
        (lambda: sample(torch.zeros(1, 9).long(), tensors([row()])), r"logits is torch.int64"),
        (
            lambda: sample(
                torch.zeros(1, 40, device=DEVICE),
                replace(tensors([row()]), mask=Mask(integers([0]), integers([[0]]))),
            ),
            r"mask bits has shape \[1, 1\], expected \[any, 2\]",
        ),
        (
            lambda: sample(
                torch.zeros(1, 9, device=DEVICE),
                replace(tensors([row()]), bias=wide_bias(2049)),
            ),
            r"bias ids have 2049 a line, expected at most 2048",
        ),
        (lambda: top_logprobs(torch.zeros(1, 4), torch.zeros(1), 33), r"top is 33, expected 1 to 32"),
        (
            lambda: top_logprobs(torch.zeros(1, 4), torch.zeros(1), 2, torch.zeros(2, dtype=torch.int32)),
            r"wanted has shape \[2\], expected \[1\]",
        ),
        (
            lambda: verify(torch.zeros(2, 4), tensors([row()] * 2), torch.zeros(3).int(), torch.zeros(2).int()),
            r"drafts has shape \[3\], expected \[2\]",
        ),
    ],
)
def test_wrong_arguments_are_named(call: Callable[[], object], told: str) -> None:
    with pytest.raises(KernelArgumentError, match=told):
        call()
