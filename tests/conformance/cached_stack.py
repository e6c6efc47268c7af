"""A real stack whose prefix cache is watched from outside: a tiny model, two decode workers, some tenants."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from shared.telemetry import attributes as a
from shared.telemetry import metric_names as names
from shared.telemetry.metric import Metric
from tests.conformance.observed import sample
from tests.stack.running import OTHER_KEY, Baton, tenants_file, until
from tests.tiny_models import make_tiny_model
from tests.tiny_tokenizer import CHATML, tokenizer_json

MODEL, BLOCK, NUM_BLOCKS, VOCABULARY = "tiny", 16, 400, 320
BLOCK_BYTES = 4 * 2 * 2 * 16 * 4 * BLOCK  # layers, K and V, heads, width, float32, tokens
TOKENS = 8
BRIEF_KEY, BRIEF_S = "sk-kept-for-seconds-key", 2


@dataclass(frozen=True)
class Answer:
    """What a client was told of one choice."""

    id: str
    text: str
    logprobs: Any
    prompt_tokens: int
    cached: int

    @property
    def said(self) -> tuple[str, Any]:
        """What must not depend on a cache, to the last bit."""
        return self.text, self.logprobs


class CachedStack:
    """The stack of a folder; `up`, then `down`."""

    def __init__(self, base: Path) -> None:
        self._base = base
        self.baton = Baton(base / "state")
        self._salts = 0
        self._index_url = ""

    def up(self) -> None:
        folder = self.checkpoint("model", seed=0)
        settings = {
            "policy.tenants": self._tenants(),
            "model.path": folder,
            "model.name": MODEL,
            "kv.block_size": BLOCK,
            "kv.pool_bytes": NUM_BLOCKS * BLOCK_BYTES,
            "workers.decode": 2,
            "workers.prefill": 0,
            "engine.max_sequences": 4,
        }
        self.baton.up(*(part for name, value in settings.items() for part in ("--set", f"{name}={value}")))

    def _tenants(self) -> Path:
        path = tenants_file(self._base / "tenants.json", [("other", OTHER_KEY), ("brief", BRIEF_KEY)])
        told = json.loads(path.read_text())
        told["tenants"][1]["retention_s"] = BRIEF_S
        path.write_text(json.dumps(told))
        return path

    # ------------------------------------------------------------------------------------------ the model

    def checkpoint(self, name: str, seed: int) -> Path:
        """Random weights with the tests' tokenizer; texts never end by themselves."""
        folder = make_tiny_model(self._base / name, seed=seed, vocab_size=VOCABULARY, eos_token_id=None)
        (folder / "tokenizer.json").write_bytes(tokenizer_json())
        texts = {"chat_template": CHATML, "bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
        (folder / "tokenizer_config.json").write_text(json.dumps(texts))
        return folder

    def replace_weights(self, seed: int) -> None:
        """Other weights under the same name; each worker loads them when it is restarted."""
        new = self.checkpoint(f"model-{seed}", seed)
        for path in new.glob("*.safetensors"):
            os.replace(path, self._base / "model" / path.name)
        done = self.baton.run("restart", "decode")
        assert done.returncode == 0, done.stderr

    # ------------------------------------------------------------------------------------------ a client

    def client(self, key: str = "") -> httpx.AsyncClient:
        assert self.baton.record is not None
        headers = {"Authorization": f"Bearer {key or self.baton.record.api_key}"}
        return httpx.AsyncClient(base_url=self.baton.url, headers=headers, timeout=60)

    def post(self, key: str = "", **fields: Any) -> httpx.Response:
        """One completion; greedy, with log-probabilities."""
        assert self.baton.record is not None
        headers = {"Authorization": f"Bearer {key or self.baton.record.api_key}"}
        return httpx.post(f"{self.baton.url}/v1/completions", json=body(**fields), headers=headers, timeout=60)

    def ask(self, prompt: list[int], key: str = "", **fields: Any) -> Answer:
        """What one completion says."""
        response = self.post(key, prompt=prompt, **fields)
        assert response.status_code == 200, response.text
        return answer_of(response.json())

    def cold(self, prompt: list[int], key: str = "") -> Answer:
        """The same from a worker that may use nothing it has: nobody shares a salt that was never used."""
        self._salts += 1
        answer = self.ask(prompt, key, cache_salt=f"unused {self._salts}")
        assert answer.cached == 0
        return answer

    def warm(self, prompt: list[int], tokens: int, key: str = "", **fields: Any) -> Answer:
        """The first answer that came with so many tokens from the cache: tags are known a moment after an answer."""
        return until(
            lambda: answer if (answer := self.ask(prompt, key, **fields)).cached == tokens else None,
            30,
            lambda: f"{tokens} tokens of a prompt of {len(prompt)} cached",
        )

    # ------------------------------------------------------------------------------------------ what it does

    def span(self, answer: Answer, name: str) -> dict[str, Any]:
        """The attributes of a span of an answer's trace."""
        spans = {span["name"]: span["attributes"] for span in self.baton.trace(answer.id, name)}
        found: dict[str, Any] = spans[name]
        return found

    def worker_of(self, answer: Answer) -> str:
        """Which worker computed it."""
        return str(self.span(answer, "decode.reserve")[a.WORKER])

    def workers(self) -> list[str]:
        """The workers that gateways hear of."""
        return [str(worker["id"]) for worker in self.baton.get("/baton/cluster")["workers"]]

    def total(self, metric: Metric, role: str) -> float:
        """The sum over the processes of a role, by their own word."""
        return sum(sample(httpx.get(url, timeout=10).text, metric.exposed) for url in self._listeners(role))

    def indexed(self) -> int:
        """Blocks that the index believes some worker to hold."""
        if not self._index_url:  # it is never restarted here, and to ask for it starts a process
            (self._index_url,) = self._listeners("prefix-cache-index")
        return int(sample(httpx.get(self._index_url, timeout=10).text, names.INDEX_ENTRIES.exposed))

    def _listeners(self, role: str) -> list[str]:
        shown = json.loads(self.baton.run("status", "--json").stdout)["metrics"]
        return [url for name, url in shown.items() if name.startswith(role)]


def body(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "max_tokens": TOKENS, "temperature": 0, "logprobs": 3, **fields}


def answer_of(told: dict[str, Any]) -> Answer:
    choice, usage = told["choices"][0], told["usage"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return Answer(told["id"], choice["text"], choice["logprobs"], usage["prompt_tokens"], cached)
