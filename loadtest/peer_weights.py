"""Weights that every contestant can read: one model, as a Baton folder, as GGUF files, and as vLLM's int8 checkpoint.

Made once in the cache. Two models: the default model, and random weights in the shape of Qwen2.5-0.5B (as a Llama,
without biases), which say nothing about quality but are of a size that speed is often told for.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from shared.contracts.errors import Unavailable
from shared.model.fetch import default_model_dir, fetch_default_gguf, fetch_default_model
from shared.model.gguf_folder import fill_folder
from shared.text.tokenizer import byte_alphabet

RANDOM, DEFAULT = "qwen2.5-0.5b-random", "smollm2-135m-instruct"
MODELS = (RANDOM, DEFAULT)
SEED = 20261129
SHAPE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
    "vocab_size": 151936,
    "torch_dtype": "bfloat16",
    "attention_bias": False,
    "mlp_bias": False,
    "head_dim": 64,
    "initializer_range": 0.02,
}
SPREAD = 0.02
GGUF_TYPES = {"bf16": "BF16", "int8": "Q8_0", "int4": "Q4_0"}
_DONE = "complete"

Say = Callable[[str], None]


class Weights:
    """The files of one model under `folder`, made when they are asked for the first time.

    Raises (all methods):
        Unavailable: a file cannot be made, because a tool is missing or fails.
    """

    def __init__(self, name: str, cache: Path, quantize: Path, say: Say, shape: dict[str, Any] | None = None) -> None:
        self.name = name
        self._cache, self._quantize, self._say = cache, quantize, say
        self._shape = SHAPE if shape is None else shape
        self.folder = cache / "peers" / "weights" / name

    def baton(self) -> Path:
        """A folder without an end-of-text token: Baton's HTTP has no `ignore_eos`, and every answer must be whole."""
        with self._made("baton") as target:
            if target is not None and self.name == DEFAULT:
                self._default(target)
            elif target is not None:
                self._say(f"making random weights in the shape of {self.name} (1 GB)")
                random_folder(target, self._shape)
        return self.folder / "baton"

    def baton_of(self, quant: str) -> Path:
        """The folder that Baton reads: the default model's own four bits where they are what is compared."""
        if gguf_type(self.name, quant) != "Q4_1":
            return self.baton()
        source = self.gguf(quant)
        with self._made("baton-Q4_1") as target:
            if target is not None:
                fill_folder(source, target)
                without_end(target)
        return self.folder / "baton-Q4_1"

    def gguf(self, quant: str) -> Path:
        """The file llama.cpp reads: BF16, Q8_0 and Q4_0 made of it; the default model's own Q4_1."""
        kind = gguf_type(self.name, quant)
        source = self.baton()
        with self._made(f"gguf-{kind}") as target:
            if target is not None and kind == "Q4_1":
                fetch_default_gguf(target / "model.gguf", self._say)
            elif target is not None and kind == "BF16":
                self._say(f"writing {self.name} as BF16 GGUF")
                from loadtest.peer_gguf import random_gguf, same_in_bf16

                if self.name == DEFAULT:
                    same_in_bf16(self.gguf("int4"), target / "model.gguf")
                else:
                    random_gguf(source, target / "model.gguf")
            elif target is not None:
                self._say(f"quantizing {self.name} to {kind}")
                if not self._quantize.exists():
                    raise Unavailable(f"{self._quantize} is not there: --install builds it")
                command = [self._quantize, self.gguf("bf16"), target / "model.gguf", kind]
                done = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False)
                if done.returncode:
                    raise Unavailable(f"llama-quantize failed: {done.stderr.strip()[-400:]}")
        return self.folder / f"gguf-{kind}" / "model.gguf"

    def vllm_int8(self) -> Path:
        """A compressed-tensors checkpoint, W8A8: a scale an output channel, activations quantized token by token."""
        source = self.baton()
        with self._made("vllm-int8") as target:
            if target is not None:
                self._say(f"writing {self.name} as int8 for vLLM")
                int8_checkpoint(source, target)
        return self.folder / "vllm-int8"

    def vocab_size(self) -> int:
        """Of the model: prompts are made of its ids."""
        return int(json.loads((self.baton() / "config.json").read_text())["vocab_size"])

    def _default(self, target: Path) -> None:
        fetch_default_model(self._cache, self._say)
        for path in default_model_dir(self._cache).iterdir():
            if path.suffix == ".safetensors":
                os.link(path, target / path.name)
            else:
                shutil.copy(path, target)
        without_end(target)

    @contextmanager
    def _made(self, name: str) -> Iterator[Path | None]:
        """A folder to fill, which then takes its place; None where it is there already."""
        final = self.folder / name
        if (final / _DONE).exists():
            yield None
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=self.folder, prefix=".making-") as made:
            target = Path(made) / name
            target.mkdir()
            yield target
            (target / _DONE).touch()
            if final.exists():
                shutil.rmtree(final)
            target.rename(final)


def without_end(folder: Path) -> None:
    """Let a model folder name no token that ends a text."""
    for name in ("config.json", "generation_config.json"):
        body = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps({k: v for k, v in body.items() if k != "eos_token_id"}))


def gguf_type(model: str, quant: str) -> str:
    """llama.cpp's name of what is compared with Baton's `quant`."""
    return "Q4_1" if (model, quant) == (DEFAULT, "int4") else GGUF_TYPES[quant]


def random_folder(target: Path, shape: dict[str, Any]) -> None:
    """A model folder of normally distributed weights, always the same ones."""
    import torch
    from safetensors.torch import save_file

    draw = torch.Generator().manual_seed(SEED)
    hidden, inner, vocab = shape["hidden_size"], shape["intermediate_size"], shape["vocab_size"]
    kv = hidden // shape["num_attention_heads"] * shape["num_key_value_heads"]

    def normal(*size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.bfloat16).normal_(0.0, SPREAD, generator=draw)

    weights = {"model.embed_tokens.weight": normal(vocab, hidden)}
    ones = {"model.norm.weight": torch.ones(hidden, dtype=torch.bfloat16)}
    for layer in range(shape["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        for name, rows in (("q", hidden), ("k", kv), ("v", kv)):
            weights[f"{at}.self_attn.{name}_proj.weight"] = normal(rows, hidden)
        weights[f"{at}.self_attn.o_proj.weight"] = normal(hidden, hidden)
        weights[f"{at}.mlp.gate_proj.weight"] = normal(inner, hidden)
        weights[f"{at}.mlp.up_proj.weight"] = normal(inner, hidden)
        weights[f"{at}.mlp.down_proj.weight"] = normal(hidden, inner)
        for name in ("input_layernorm", "post_attention_layernorm"):
            ones[f"{at}.{name}.weight"] = torch.ones(hidden, dtype=torch.bfloat16)
    save_file(weights | ones, target / "model.safetensors", {"format": "pt"})
    (target / "config.json").write_text(json.dumps(shape, indent=1))
    (target / "generation_config.json").write_text("{}")
    (target / "tokenizer.json").write_text(json.dumps(tokenizer_body(vocab)))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": shape["max_position_embeddings"]}
    (target / "tokenizer_config.json").write_text(json.dumps(settings))


def tokens_of(vocab_size: int) -> list[str]:
    """The 256 bytes, then words without meaning: as long as real ones, so that detokenizing costs what it costs."""
    bytes_first = [char for char, _ in sorted(byte_alphabet().items(), key=lambda item: item[1])]
    return [*bytes_first, *(f"t{number}x" for number in range(vocab_size - len(bytes_first)))]


MERGES = ("Ġ t", "Ġ a")


def tokenizer_body(vocab_size: int) -> dict[str, Any]:
    """`tokenizer.json` of a byte-level vocabulary of that size. Needs at least 258 tokens."""
    tokens = tokens_of(vocab_size)
    tokens[-2:] = [merge.replace(" ", "") for merge in MERGES]
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": level,
        "post_processor": None,
        "decoder": level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {text: number for number, text in enumerate(tokens)},
            "merges": list(MERGES),
        },
    }


def int8_checkpoint(source: Path, target: Path) -> None:
    """Every linear layer but the head rounded to int8 by its rows' largest values; all else as it is."""
    import torch
    from safetensors.torch import load_file, save_file

    out: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        if name.endswith("_proj.weight"):
            scale = (tensor.float().abs().amax(1, keepdim=True) / 127).clamp_min(1e-12).to(torch.bfloat16)
            out[name] = (tensor.float() / scale.float()).round().clamp(-127, 127).to(torch.int8)
            out[f"{name}_scale"] = scale
        else:
            out[name] = tensor
    save_file(out, target / "model.safetensors", {"format": "pt"})
    for path in source.glob("*.json"):
        shutil.copy(path, target)
    config = json.loads((source / "config.json").read_text())
    args = {"num_bits": 8, "type": "int", "symmetric": True}
    scheme = {
        "targets": ["Linear"],
        "weights": args | {"strategy": "channel", "dynamic": False},
        "input_activations": args | {"strategy": "token", "dynamic": True},
    }
    quantization = {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": scheme},
        "ignore": ["lm_head"],
    }
    (target / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}, indent=1))
