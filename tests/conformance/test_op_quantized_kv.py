"""OP-53: KV in few bits says nearly what full KV says, for prompts that stretch its scales too. The default model.

Bounds are the quality gate's, position by position over each prompt by itself: mean divergence in nats of what is
expected next, and how often the likeliest token is the same; and the mean loss of the prompt's own next tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from loadtest.quality import CHUNK, Reader, Sums
from shared.contracts.errors import SettingsError
from shared.model.decoder import Model, load_decoder
from shared.model.kv_dtype import kv_dtype_of
from shared.model.quality_gate import AUTO, LEAST_TOP1, MOST_KL, SAME
from shared.text.tokenizer import Tokenizer, load_tokenizer
from tests.native import require_native

pytestmark = [pytest.mark.model, pytest.mark.timeout(600)]

MOST_LOSS = 0.15
"""Nats a token: of the log-probability of what the prompt goes on with, which in such prompts is most unlikely."""
FORMATS = ("int8", "float16")
SHORT, BRIEF, LONG = 12, 128, 4096
"""Tokens. The case says 4k, which takes minutes here: the long run reads so many, every run the others."""
PROSE = "The harbour was quiet, and the boats lay close together. "
PROMPTS = {
    "prose": PROSE,
    "one character": "aaaaaaaaaaaaaaaa",
    "newlines": "\n\n\n\n\n\n\n\n",
    "spaces": "                                ",
    "symbols": "!!!!!!!!@@@@@@@@########",
    "mixed": PROSE + "\n" * 40 + "z" * 80 + " 0000000000000000 ",
}


@pytest.fixture(scope="module")
def model(default_model_dir: Path) -> Model:
    require_native()
    return load_decoder(default_model_dir, "bfloat16", "native", threads=2)


@pytest.fixture(scope="module")
def readers(model: Model, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Reader]]:
    """Full KV, then each format."""
    folder = tmp_path_factory.mktemp("kv")
    found = [Reader(model, folder, f"kv-{i}", LONG, kv) for i, kv in enumerate((SAME, *FORMATS))]
    assert [reader.kv_dtype for reader in found] == ["bfloat16", *FORMATS]
    yield found
    for reader in found:
        reader.close()


@pytest.fixture(scope="module")
def tokenizer(default_model_dir: Path) -> Tokenizer:
    return load_tokenizer(default_model_dir)


def tokens_of(tokenizer: Tokenizer, text: str, count: int) -> list[int]:
    """The text over and over, as so many tokens."""
    ids: list[int] = []
    copies = 1
    while len(ids) < count:
        ids = tokenizer.encode(text * copies, parse_special=False)
        copies *= 4
    return ids[:count]


def losses(full: Tensor, few: Tensor, following: list[int]) -> Tensor:
    """How much less likely each token that follows is with few bits, nats."""
    taken = torch.tensor(following)[:, None]
    rows = (logits[: len(following)].log_softmax(dim=1).gather(1, taken) for logits in (full, few))
    with_full, with_few = rows
    return (with_full - with_few).squeeze(1)


def compare(readers: list[Reader], token_ids: list[int]) -> list[tuple[Sums, float]]:
    """Per format its divergence and its mean loss."""
    sums = [Sums() for _ in FORMATS]
    lost = [0.0 for _ in FORMATS]
    for start in range(0, len(token_ids), CHUNK):
        part = token_ids[start : start + CHUNK]
        following = token_ids[start + 1 : start + 1 + len(part)]
        full = readers[0].read(start, part)
        for i, reader in enumerate(readers[1:]):
            few = reader.read(start, part)
            assert torch.isfinite(few).all()
            sums[i].add(full, few)
            lost[i] += float(losses(full, few, following).sum())
    return [(one, loss / max(1, len(token_ids) - 1)) for one, loss in zip(sums, lost, strict=True)]


CASES = [
    *(pytest.param(name, SHORT, id=f"{name}, short") for name in PROMPTS),
    *(pytest.param(name, BRIEF, id=f"{name}, {BRIEF}") for name in ("one character", "mixed")),
    *(pytest.param(name, LONG, id=f"{name}, {LONG}", marks=pytest.mark.long) for name in PROMPTS),
]


@pytest.mark.parametrize(("name", "count"), CASES)
def test_op53_few_bits_say_what_full_kv_says(
    readers: list[Reader], tokenizer: Tokenizer, name: str, count: int
) -> None:
    token_ids = tokens_of(tokenizer, PROMPTS[name], count)
    for kv, (sums, loss) in zip(FORMATS, compare(readers, token_ids), strict=True):
        figures = sums.figures()
        said = f"{name}, {count} tokens, KV in {kv}: {figures}, loss {loss:.4f} nat"
        assert figures.positions == count
        assert figures.kl <= MOST_KL, said
        assert loss <= MOST_LOSS, said
        # of a dozen positions one alone would be too many
        assert figures.top1 >= LEAST_TOP1 or count * (1 - figures.top1) <= 1.5, said


def test_op53_what_has_no_scale_or_did_not_pass_is_no_default(model: Model) -> None:
    """KV in few bits is asked for by name, and where nothing computes it start-up says so."""
    assert kv_dtype_of(AUTO, model) == "bfloat16"
    assert kv_dtype_of("int8", model) == "int8"
    with pytest.raises(SettingsError, match="fp8"):
        kv_dtype_of("fp8", model)
