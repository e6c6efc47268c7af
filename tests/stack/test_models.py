"""Two models served at once by a real stack: each with its own tokenizer, pool, workers and permissions.

Both are small random checkpoints. Their vocabularies give the same text other ids, so a mix-up shows; transformers says
which tokens are right.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch
from safetensors.torch import load_file, save_file

from shared.model.folder import SINGLE
from shared.text.tokenizer import load_tokenizer
from tests.stack.running import Baton, until
from tests.stack.streams import Stream, kill, pid_of
from tests.tiny_models import make_tiny_model, random_tokens
from tests.tiny_tokenizer import CHATML, tokenizer_json

pytestmark = pytest.mark.timeout(150)

ALPHA, BETA = "alpha", "Beta/1"
BETA_KEY = "sk-may-use-beta-alone"
TEXT = "hi <x3> user"
SHARED = random_tokens(100, 256, seed=9)
"""Ids that both models know, more than the original context of either."""
ALPHA_ROPE = {"rope_type": "dynamic", "factor": 16.0}
BETA_ROPE = {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 64}


def make_model(folder: Path, plain_added: tuple[str, ...] = (), *, template: str | None = None, **changes: Any) -> Path:
    """A checkpoint with a tokenizer, whose texts never end by themselves."""
    make_tiny_model(folder, max_position_embeddings=64, num_hidden_layers=2, eos_token_id=None, **changes)
    (folder / "tokenizer.json").write_bytes(tokenizer_json(plain_added=plain_added))
    settings = {"chat_template": template, "bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("models")
    return {
        ALPHA: make_model(base / "alpha", seed=1, rope_parameters=ALPHA_ROPE),
        BETA: make_model(
            base / "beta",
            tuple(f"<x{i}>" for i in range(40)),
            template=CHATML,
            seed=2,
            vocab_size=400,
            tie_word_embeddings=False,
            shards="100KB",
            rope_parameters=BETA_ROPE,
        ),
    }


@pytest.fixture(scope="module")
def two(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Baton]:
    """Both models; a tenant that may use only the second."""
    base = tmp_path_factory.mktemp("two")
    key = {"id": "first", "hash": hashlib.sha256(BETA_KEY.encode()).hexdigest()}
    tenants = base / "tenants.json"
    tenants.write_text(json.dumps({"tenants": [{"id": "beta-only", "keys": [key], "models": [BETA]}]}))
    tenants.chmod(0o600)
    config = base / "baton.toml"
    config.write_text(
        f"""schema = 1
[policy]
tenants = "{tenants}"
[engine]
publish_interval_ms = 0
[kv]
pool_bytes = {64 << 20}
[[models]]
name = "{ALPHA}"
path = "{folders[ALPHA]}"
prefill = 0
[[models]]
name = "{BETA}"
path = "{folders[BETA]}"
aliases = ["beta"]
"""
    )
    baton = Baton(base / "state", {"BATON_CONFIG": str(config)})
    try:
        baton.up()
        yield baton
        traces = baton.traces_outside()
        assert len([path for path in traces.shared if path.endswith(".kvpool")]) == 3
        baton.down()
        baton.nothing_left(traces)
    finally:
        baton.kill_all()


def greedy(folder: Path, prompt: list[int], count: int) -> str:
    """transformers' text, token by token from the first, as the dynamic kind is defined."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids, cache = list(prompt), None
    with torch.no_grad():
        for position in range(len(prompt) + count - 1):
            output = model(torch.tensor([[ids[position]]]), past_key_values=cache, use_cache=True)
            cache = output.past_key_values
            if position == len(ids) - 1:
                ids.append(int(output.logits[0, -1].argmax()))
    return load_tokenizer(folder).decode(ids[len(prompt) :])


def complete(client: openai.OpenAI, model: str, prompt: Any, max_tokens: int = 24) -> Any:
    return client.completions.create(model=model, prompt=prompt, max_tokens=max_tokens, temperature=0)


@pytest.mark.parametrize("model", [ALPHA, BETA])
def test_each_model_has_its_own_tokenizer_and_weights(two: Baton, folders: dict[str, Path], model: str) -> None:
    ids = load_tokenizer(folders[model]).encode_prompt(TEXT)
    answer = complete(two.openai(), model, TEXT)
    assert answer.model == model
    assert answer.usage.prompt_tokens == len(ids)
    assert answer.choices[0].text == greedy(folders[model], ids, 24)
    long = complete(two.openai(), model, SHARED)
    assert long.choices[0].text == greedy(folders[model], SHARED, 24)
    (served,) = [
        span for span in two.trace(answer.id, "gateway.request", "decode.run") if span["name"] == "gateway.request"
    ]
    assert served["attributes"]["baton.model"] == model


def test_the_texts_ids_differ_between_the_models(folders: dict[str, Path]) -> None:
    alpha, beta = (load_tokenizer(folders[model]).encode(TEXT) for model in (ALPHA, BETA))
    assert len(alpha) > len(beta)


def test_a_model_without_a_chat_template_starts_and_serves_completions(two: Baton) -> None:
    messages: Any = [{"role": "user", "content": "hi"}]
    with pytest.raises(openai.BadRequestError, match="no chat template"):
        two.openai().chat.completions.create(model=ALPHA, messages=messages, max_tokens=2)
    assert two.openai().chat.completions.create(model=BETA, messages=messages, max_tokens=2).model == BETA


def test_an_alias_is_another_name_of_the_same_model(two: Baton) -> None:
    answer = complete(two.openai(), "beta", TEXT)
    assert answer.model == BETA
    assert answer.choices[0].text == complete(two.openai(), BETA, TEXT).choices[0].text


def test_a_pool_never_takes_anothers_blocks(two: Baton) -> None:
    prompt = random_tokens(160, 256, seed=10)

    def cached(model: str) -> int:
        found: int = complete(two.openai(), model, prompt, 1).usage.prompt_tokens_details.cached_tokens
        return found

    assert cached(ALPHA) == 0
    assert until(lambda: cached(ALPHA), 30) >= 128
    assert cached(BETA) == 0
    assert until(lambda: cached(BETA), 30) >= 128


def test_a_key_sees_and_uses_only_its_models(two: Baton) -> None:
    everyone, narrow = two.openai(), two.openai(BETA_KEY)
    assert [model.id for model in everyone.models.list()] == [ALPHA, BETA]
    assert [model.id for model in narrow.models.list()] == [BETA]
    assert complete(narrow, BETA, TEXT).model == BETA
    for ask in (lambda: complete(narrow, ALPHA, TEXT), lambda: narrow.models.retrieve(ALPHA)):
        with pytest.raises(openai.NotFoundError, match=f"models here: {BETA}") as caught:
            ask()
        assert ALPHA not in str(caught.value)
    with pytest.raises(openai.NotFoundError, match=f"models here: {ALPHA}, {BETA}"):
        complete(everyone, "gamma", TEXT)


def test_status_and_metrics_tell_the_models_apart(two: Baton) -> None:
    complete(two.openai(), BETA, TEXT)
    done = two.run("status", "--json")
    found = json.loads(done.stdout)
    assert {pool["pool"]: pool["models"] for pool in found["pools"]} == {"alpha": [ALPHA], "beta-1": [BETA]}
    assert {(w["pool"], w["role"]) for w in found["workers"]} == {
        ("alpha", "decode"),
        ("beta-1", "decode"),
        ("beta-1", "prefill"),
    }
    metrics = httpx.get(found["metrics"]["gateway"], timeout=10).text
    assert f'model_name="{BETA}"' in metrics


def test_a_killed_worker_of_one_pool_does_not_disturb_the_other(two: Baton) -> None:
    # Given what both models say undisturbed, and a long stream of each that flows
    prompt, long = SHARED[:8], 1000
    alone = {model: Stream(two, prompt, long, model=model, temperature=0).end().text for model in (ALPHA, BETA)}
    workers = two.get("/baton/cluster")["workers"]
    (victim,) = [pid_of(two, worker["id"]) for worker in workers if worker["pool"] == "alpha"]
    streams = {model: Stream(two, prompt, long, model=model, temperature=0).flowing() for model in (BETA, ALPHA)}
    # When the only worker of the first pool is killed
    kill(two, victim)
    # Then the other's stream ends on its first attempt, and the killed one's is resumed by the next worker
    assert streams[BETA].end().text == alone[BETA]
    spans = {
        span["name"]: span["attributes"] for span in two.trace(streams[BETA].id, "gateway.request", "gateway.stream")
    }
    assert spans["gateway.request"]["baton.epoch"] == 1
    assert spans["gateway.stream"].get("baton.lost_workers", 0) == 0
    assert streams[ALPHA].end().text == alone[ALPHA]
    spans = {span["name"]: span["attributes"] for span in two.trace(streams[ALPHA].id, "gateway.request")}
    assert spans["gateway.request"]["baton.epoch"] == 2
    two.wait_idle(30)


def test_weights_found_wrong_late_are_told_by_file_and_tensor(tmp_path: Path) -> None:
    """The head is there and of the right shape; only its values contradict the configuration."""
    folder = make_model(tmp_path / "model")
    tensors = load_file(folder / SINGLE)
    save_file(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"] + 1}, folder / SINGLE)
    baton = Baton(tmp_path / "state")
    try:
        done = baton.run("up", "--port", "0", "--model", str(folder), "--prefill", "0")
    finally:
        baton.kill_all()
    assert done.returncode != 0
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("baton:")]
    assert line.startswith(f"baton: decode-1 cannot start: {folder / SINGLE}: lm_head.weight: differs from")
    assert "Traceback" not in done.stderr
    assert done.stderr.rstrip().endswith(line)
