"""A Llama GGUF file turned into a Hugging Face model folder: bf16 weights, config and tokenizer.

Knows nothing about where the GGUF came from. Needs numpy, gguf and safetensors; neither torch nor transformers.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import safetensors

Bf16 = npt.NDArray[np.uint16]
"""bfloat16 values as their 16 bits; numpy has no such type."""

_NAMED = (("bos", "bos"), ("eos", "eos"), ("pad", "padding"), ("unk", "unknown"))
"""Special tokens by their name here and in GGUF."""
_SPECIAL_TOKEN = 3
"""`token_type` of a control token in GGUF."""

PRE_TOKENIZERS = ("smollm", "gpt-2", "default")
"""llama.cpp's names of the rules that are known here: byte-level BPE, `smollm` with every digit a piece of its own."""

_TENSOR_NAMES = {
    "output": "lm_head",
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


class NotTold(ValueError):
    """The file does not say enough to make a document of it."""


def tensor_name(gguf_name: str) -> str:
    """The Hugging Face name of a GGUF tensor, `blk.3.attn_q.weight` → `model.layers.3.self_attn.q_proj.weight`.

    Raises:
        KeyError: a tensor that a Llama does not have.
    """
    parts = gguf_name.split(".")
    if parts[0] == "blk":
        return f"model.layers.{int(parts[1])}.{_TENSOR_NAMES[parts[2]]}.{parts[3]}"
    return f"{_TENSOR_NAMES[parts[0]]}.{parts[1]}"


def to_bf16(values: npt.NDArray[np.float32]) -> Bf16:
    """Round finite float32 values to bfloat16, ties to even."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return rounded.astype(np.uint16)


def unpermute(weight: npt.NDArray[Any], num_heads: int) -> npt.NDArray[Any]:
    """Undo llama.cpp's row order of Q and K, which puts rotary pairs next to each other.

    Args:
        weight: [num_heads * head_dim, hidden_size], or anything else with as many rows.
        num_heads: query heads for Q, KV heads for K.
    """
    rows, columns = weight.shape
    pairs = weight.reshape(num_heads, rows // num_heads // 2, 2, columns)
    return pairs.swapaxes(1, 2).reshape(rows, columns)


def read_fields(reader: gguf.GGUFReader) -> dict[str, Any]:
    """Every metadata field of the file as a plain Python value."""
    return {name: field.contents() for name, field in reader.fields.items()}


def read_tensors(reader: gguf.GGUFReader, fields: Mapping[str, Any]) -> Iterator[tuple[str, Bf16]]:
    """(Hugging Face name, bf16 values) of every tensor, dequantized one at a time to bound memory."""
    heads = {
        "attn_q": int(fields["llama.attention.head_count"]),
        "attn_k": int(fields["llama.attention.head_count_kv"]),
    }
    for tensor in reader.tensors:
        weight = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
        kind = tensor.name.split(".")[-2]
        if kind in heads:
            weight = unpermute(weight, heads[kind])
        yield tensor_name(tensor.name), to_bf16(weight)


def weights_digest(tensors: Mapping[str, Bf16]) -> str:
    """BLAKE2b-256, as hex, over name, shape and values of every tensor in order of name."""
    digest = hashlib.blake2b(digest_size=32)
    for name in sorted(tensors):
        values = tensors[name]
        head = json.dumps([name, "bfloat16", list(values.shape)]).encode()
        digest.update(len(head).to_bytes(8, "little") + head)
        digest.update(np.ascontiguousarray(values).data)
    return digest.hexdigest()


def write_weights(tensors: Mapping[str, Bf16], path: Path) -> None:
    """Write one safetensors file of bf16 tensors.

    Raises:
        safetensors.SafetensorError, OSError: the file could not be written.
    """
    specs = {
        name: safetensors.TensorSpec(
            dtype="bfloat16", shape=values.shape, data_ptr=values.ctypes.data, data_len=values.nbytes
        )
        for name, values in tensors.items()
    }
    safetensors.serialize_file(specs, path, metadata={"format": "pt"})


def model_config(fields: Mapping[str, Any]) -> dict[str, Any]:
    """`config.json` of the Llama that the GGUF metadata describes.

    Raises:
        KeyError: a field is missing.
        NotTold: positions are scaled, which GGUF tells by tensors of its own.
    """
    scaling = fields.get("llama.rope.scaling.type", "none")
    if scaling != "none":
        raise NotTold(f"llama.rope.scaling.type: {scaling!r} is not supported")
    # a factor without a type is linear's, and older files have it by another name
    for field in ("llama.rope.scaling.factor", "llama.rope.scale_linear"):
        if fields.get(field, 0.0) not in (0.0, 1.0):
            raise NotTold(f"{field}: {fields[field]!r} is not supported")
    theta = float(fields.get("llama.rope.freq_base", 10000.0))
    heads, hidden = int(fields["llama.attention.head_count"]), int(fields["llama.embedding_length"])
    return {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": _token_id(fields, "bos"),
        "dtype": "bfloat16",
        "eos_token_id": _token_id(fields, "eos"),
        "head_dim": int(fields.get("llama.rope.dimension_count", hidden // heads)),
        "hidden_act": "silu",
        "hidden_size": hidden,
        "initializer_range": 0.02,
        "intermediate_size": int(fields["llama.feed_forward_length"]),
        "max_position_embeddings": int(fields["llama.context_length"]),
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": heads,
        "num_hidden_layers": int(fields["llama.block_count"]),
        "num_key_value_heads": int(fields.get("llama.attention.head_count_kv", heads)),
        "pad_token_id": _token_id(fields, "padding"),
        # the file holds a float32; its nearest short decimal is what the model was trained with
        "rms_norm_eps": float(f"{fields['llama.attention.layer_norm_rms_epsilon']:.6g}"),
        "rope_parameters": {"rope_theta": theta, "rope_type": "default"},
        # read by software older than rope_parameters
        "rope_theta": theta,
        "tie_word_embeddings": True,
        "use_cache": True,
        "vocab_size": int(fields.get("llama.vocab_size") or len(fields["tokenizer.ggml.tokens"])),
    }


def generation_config(fields: Mapping[str, Any]) -> dict[str, Any]:
    """`generation_config.json`: only the ids that begin, end and pad a sequence."""
    ids = {f"{name}_token_id": _token_id(fields, kind) for name, kind in _NAMED if name != "unk"}
    return {name: token_id for name, token_id in ids.items() if token_id is not None}


def special_tokens(fields: Mapping[str, Any]) -> list[tuple[int, str]]:
    """(id, text) of the control tokens."""
    types, texts = fields["tokenizer.ggml.token_type"], fields["tokenizer.ggml.tokens"]
    return [(i, text) for i, text in enumerate(texts) if types[i] == _SPECIAL_TOKEN]


def tokenizer_model(fields: Mapping[str, Any]) -> dict[str, Any]:
    """`tokenizer.json` of a byte-level BPE.

    Raises:
        KeyError: a field is missing.
        NotTold: the vocabulary is of another kind, or text is cut by a rule that is not known here.
    """
    model, rule = fields["tokenizer.ggml.model"], fields.get("tokenizer.ggml.pre", "default")
    if model != "gpt2" or rule not in PRE_TOKENIZERS:
        raise NotTold(f"tokenizer.ggml.pre: a {model!r} vocabulary cut as {rule!r} is not supported")
    digits = [{"type": "Digits", "individual_digits": True}] if rule == "smollm" else []
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": i, **_added_token(text)} for i, text in special_tokens(fields)],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [*digits, byte_level],
        },
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {text: i for i, text in enumerate(fields["tokenizer.ggml.tokens"])},
            "merges": list(fields["tokenizer.ggml.merges"]),
        },
    }


def tokenizer_config(fields: Mapping[str, Any]) -> dict[str, Any]:
    """`tokenizer_config.json`: the named special tokens and the chat template.

    Raises:
        KeyError: a field is missing.
        NotTold: a special token is none of the vocabulary.
    """
    texts = fields["tokenizer.ggml.tokens"]
    specials = special_tokens(fields)

    ids = {f"{name}_token": _token_id(fields, kind) for name, kind in _NAMED}
    for name, kind in _NAMED:
        token_id = ids[f"{name}_token"]
        if token_id is not None and not 0 <= token_id < len(texts):
            raise NotTold(f"tokenizer.ggml.{kind}_token_id: {token_id} is none of {len(texts)} tokens")
    named = {name: str(texts[token_id]) for name, token_id in ids.items() if token_id is not None}
    template = fields.get("tokenizer.chat_template")
    return {
        "add_bos_token": bool(fields.get("tokenizer.ggml.add_bos_token", False)),
        "add_prefix_space": False,
        "added_tokens_decoder": {str(i): _added_token(text) for i, text in specials},
        **({} if template is None else {"chat_template": template}),
        "clean_up_tokenization_spaces": False,
        "extra_special_tokens": [text for _, text in specials],
        "model_max_length": int(fields["llama.context_length"]),
        # a class named after GPT-2 or Llama would replace the pre-tokenizer by its own and lose the digit rule
        "tokenizer_class": "PreTrainedTokenizerFast",
        **named,
    }


def convert(source: Path, folder: Path, progress: Callable[[str], None]) -> str:
    """Fill `folder` from the GGUF at `source`; about 20 s and 0.6 GB of memory for 135M parameters.

    Returns:
        The digest of the weights, see `weights_digest`.

    Raises:
        OSError, safetensors.SafetensorError: `folder` could not be written.
    """
    reader = gguf.GGUFReader(source)
    fields = read_fields(reader)
    documents = {
        "config.json": model_config(fields),
        "generation_config.json": generation_config(fields),
        "tokenizer.json": tokenizer_model(fields),
        "tokenizer_config.json": tokenizer_config(fields),
    }
    for name, document in documents.items():
        (folder / name).write_text(json.dumps(document, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    progress(f"converting {len(reader.tensors)} tensors to bfloat16")
    tensors = dict(read_tensors(reader, fields))
    progress("writing model.safetensors")
    write_weights(tensors, folder / "model.safetensors")
    return weights_digest(tensors)


def _token_id(fields: Mapping[str, Any], kind: str) -> int | None:
    found = fields.get(f"tokenizer.ggml.{kind}_token_id")
    return None if found is None else int(found)


def _added_token(text: str) -> dict[str, Any]:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {"content": text, **flags}
