"""GGUF files for llama.cpp, of the very weights that Baton reads. Needs gguf and numpy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from loadtest.peer_weights import MERGES

_TOP = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
_PARTS = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def gguf_name(name: str) -> str:
    """llama.cpp's name of a tensor, `model.layers.3.self_attn.q_proj.weight` → `blk.3.attn_q.weight`."""
    if name in _TOP:
        return _TOP[name]
    parts = name.split(".")
    return f"blk.{parts[2]}.{_PARTS['.'.join(parts[3:-1])]}.{parts[-1]}"


def random_gguf(source: Path, target: Path) -> None:
    """Write a folder of `peer_weights.random_folder` as BF16 GGUF: the same bits, the same vocabulary."""
    import torch
    from safetensors import safe_open

    shape: dict[str, Any] = json.loads((source / "config.json").read_text())
    vocabulary = json.loads((source / "tokenizer.json").read_text())["model"]["vocab"]
    writer = gguf.GGUFWriter(target, "llama")
    writer.add_name(source.parent.name)
    writer.add_block_count(shape["num_hidden_layers"])
    writer.add_context_length(shape["max_position_embeddings"])
    writer.add_embedding_length(shape["hidden_size"])
    writer.add_feed_forward_length(shape["intermediate_size"])
    writer.add_head_count(shape["num_attention_heads"])
    writer.add_head_count_kv(shape["num_key_value_heads"])
    writer.add_rope_dimension_count(shape["head_dim"])
    writer.add_rope_freq_base(shape["rope_theta"])
    writer.add_layer_norm_rms_eps(shape["rms_norm_eps"])
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    writer.add_vocab_size(shape["vocab_size"])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(list(vocabulary))
    writer.add_token_types([gguf.TokenType.NORMAL] * shape["vocab_size"])
    writer.add_token_merges(list(MERGES))
    writer.add_eos_token_id(shape["vocab_size"] - 3)
    writer.add_add_bos_token(False)
    with safe_open(source / "model.safetensors", "pt") as file:
        for name in file.keys():  # noqa: SIM118 (not a mapping)
            tensor = file.get_tensor(name)
            if tensor.ndim == 1:
                writer.add_tensor(gguf_name(name), tensor.float().numpy())
            else:
                if heads := _rotated(name, shape):
                    tensor = permute(tensor, heads)
                bits = tensor.contiguous().view(torch.uint16).numpy().view(np.uint8)
                kind = gguf.GGMLQuantizationType.BF16
                writer.add_tensor(gguf_name(name), bits.reshape(tensor.shape[0], -1), raw_dtype=kind)
    _write(writer)


def permute(weight: Any, num_heads: int) -> Any:
    """llama.cpp's order of the rows of Q and K: rotary pairs beside each other. Any tensor `[num_heads * d, in]`."""
    rows, inputs = weight.shape
    return weight.reshape(num_heads, 2, rows // num_heads // 2, inputs).swapaxes(1, 2).reshape(rows, inputs)


def _rotated(name: str, shape: dict[str, Any]) -> int:
    """Heads of a tensor that is rotated, else 0."""
    for part, key in (("q_proj", "num_attention_heads"), ("k_proj", "num_key_value_heads")):
        if part in name:
            return int(shape[key])
    return 0


def same_in_bf16(source: Path, target: Path) -> None:
    """Write a quantized GGUF file's values rounded to bfloat16; vectors stay float32, all that is told of it stays."""
    reader = gguf.GGUFReader(source)
    architecture = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(target, architecture)
    left_out = ("general.architecture", "general.file_type", "general.quantization_version")
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name in left_out:
            continue
        part = field.types[-1] if len(field.types) > 1 else None
        writer.add_key_value(field.name, field.contents(), field.types[0], part)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    for tensor in reader.tensors:
        values = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        if values.ndim == 1:
            writer.add_tensor(tensor.name, values)
        else:
            bits = gguf.quantize(values, gguf.GGMLQuantizationType.BF16)
            writer.add_tensor(tensor.name, bits, raw_dtype=gguf.GGMLQuantizationType.BF16)
    _write(writer)


def _write(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
