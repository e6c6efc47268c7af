"""The C library's structures and functions (`model.h`, `step.h`, `library.c`) as ctypes sees them.

Standard library only. Pointers are plain addresses: who fills a structure keeps the memory alive.
"""

from __future__ import annotations

import ctypes
from ctypes import Structure, c_double, c_float, c_int, c_int64, c_uint64, c_void_p
from typing import Any

DTYPES = ("bfloat16", "float32")
FORMAT_ELEMENTS, FORMAT_INT8, FORMAT_INT4, FORMAT_INT4_STEPS = range(4)
KV_ELEMENTS, KV_INT8, KV_FLOAT16 = range(3)
TO_ELEMENTS, TO_SUM, TO_GATED, TO_FLOATS = range(4)
EMBEDDING_KINDS = ("float32", "bfloat16", "float16")
BLOCK = 32
"""Outputs that are packed and computed together."""
PACK = {"bfloat16": 2, "float32": 1}
"""Inputs in a word of 32 bits."""

NO_MEMORY, NO_HEAD = 1, 8
FAULTS = {
    1: "no memory",
    2: "a token id is outside the vocabulary",
    3: "a position is outside the model's context",
    4: "a slot is outside the pool",
    5: "a block table has a block outside the pool, or too few",
    6: "the lengths of the sequences contradict one another",
    7: "a row of logits is asked for that is no token's",
    8: "rows of logits asked of a model loaded without its head",
    9: "the pool does not fit the model",
    10: "a row is sampled in a way that cannot be",
}


class LinearStruct(Structure):
    _fields_ = (
        ("weight", c_void_p),
        ("bias", c_void_p),
        ("in_features", c_int64),
        ("out_features", c_int64),
        ("scales", c_void_p),
        ("format", c_int64),
        ("group", c_int64),
        ("order", c_void_p),
    )


class LayerStruct(Structure):
    _fields_ = (
        ("attention_norm", c_void_p),
        ("mlp_norm", c_void_p),
        ("qkv", LinearStruct),
        ("o", LinearStruct),
        ("gate_up", LinearStruct),
        ("down", LinearStruct),
        ("group", c_int64),
        ("index", c_int64),
    )


class ModelStruct(Structure):
    _fields_ = (
        *(
            (name, c_int64)
            for name in (
                "num_layers",
                "hidden",
                "intermediate",
                "vocab",
                "q_heads",
                "kv_heads",
                "head_dim",
                "positions",
                "embedding_kind",
            )
        ),
        ("eps", c_double),
        ("scale", c_double),
        ("embedding", c_void_p),
        ("rotary", c_void_p),
        ("final_norm", c_void_p),
        ("layers", c_void_p),
        ("head", LinearStruct),
        ("quick_head", LinearStruct),
        ("quick_norms", c_void_p),
    )


class GroupStruct(Structure):
    _fields_ = (
        ("pool", c_void_p),
        ("num_blocks", c_int64),
        ("num_layers", c_int64),
        ("block_size", c_int64),
        ("slots", c_void_p),
        ("tables", c_void_p),
        ("table_starts", c_void_p),
        ("format", c_int64),
    )


class StepStruct(Structure):
    _fields_ = (
        *((name, c_int64) for name in ("num_tokens", "num_sequences", "num_logits", "num_groups")),
        *(
            (name, c_void_p)
            for name in ("tokens", "positions", "cu_seqlens", "seq_lens", "logit_rows", "groups", "logits")
        ),
        ("top_only", c_int64),
        ("rechecked", c_void_p),
        ("draws", c_void_p),
    )


class RowStruct(Structure):
    _fields_ = (
        ("seed", c_uint64),
        ("position", c_uint64),
        ("top_p", c_double),
        ("log_min_p", c_double),
        *((name, c_void_p) for name in ("said", "bias_ids", "bias_values", "allowed")),
        *((name, c_int64) for name in ("num_said", "num_prompt", "num_biases", "top_k")),
        *((name, c_float) for name in ("temperature", "repetition", "presence", "frequency")),
    )


class SamplingStruct(Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("logits", "rows", "tokens")),
        *((name, c_int64) for name in ("num_rows", "vocab")),
    )


class LogprobsStruct(Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("logits", "rows", "tokens", "tops", "logprobs", "top_ids")),
        *((name, c_int64) for name in ("num_wanted", "num_rows", "vocab", "most_top")),
    )


class StretchStruct(Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("model", "step", "draws")),
        ("is_bfloat16", c_int64),
        ("most", c_int64),
        ("until", c_double),
        ("ending", c_void_p),
        ("num_ending", c_int64),
        *((name, c_void_p) for name in ("halt", "tokens", "ends", "rechecked")),
        ("taken", c_int64),
    )


STRUCTURES = (
    LinearStruct,
    LayerStruct,
    ModelStruct,
    GroupStruct,
    StepStruct,
    RowStruct,
    SamplingStruct,
    LogprobsStruct,
    StretchStruct,
)


def declare(library: ctypes.CDLL) -> ctypes.CDLL:
    """Tell ctypes the types of every function.

    Raises:
        ValueError: the library was built from structures of other sizes.
        AttributeError: it lacks a function.
    """
    sizes = (c_int64 * len(STRUCTURES))()
    library.baton_sizes.restype = None
    library.baton_sizes(sizes)
    if list(sizes) != [ctypes.sizeof(structure) for structure in STRUCTURES]:
        raise ValueError("the library's structures have other sizes")
    _function(library, "baton_open", c_void_p, c_int64)
    _function(library, "baton_use", None, c_void_p, c_int64)
    _function(library, "baton_close", None, c_void_p)
    _function(library, "baton_sample", c_int, c_void_p, c_void_p)
    _function(library, "baton_logprobs_of", c_int, c_void_p, c_void_p)
    _function(library, "baton_go_on", c_int, c_void_p, c_void_p)
    for dtype in DTYPES:
        _function(library, f"baton_step_{dtype}", c_int, *[c_void_p] * 3)
        _function(library, f"baton_pack_{dtype}", c_int, *[c_void_p] * 3, *[c_int64] * 5)
        _function(library, f"baton_pack_integers_{dtype}", c_int, *[c_void_p] * 3, *[c_int64] * 7)
        _function(library, f"baton_linear_{dtype}", c_int, *[c_void_p] * 4, *[c_int64] * 4)
        _function(library, f"baton_norm_{dtype}", c_int, *[c_void_p] * 4, c_int64, c_int64, c_double)
        _function(library, f"baton_rotate_{dtype}", c_int, *[c_void_p] * 4, c_int64)
        _function(library, f"baton_keys_read_{dtype}", c_int, *[c_void_p] * 4)
        _function(library, f"baton_attention_{dtype}", c_int, *[c_void_p] * 5, c_int64, c_int64)
        _function(library, f"baton_sweep_{dtype}", c_int, c_void_p, c_void_p, c_int64, c_int64)
    return library


def _function(library: ctypes.CDLL, name: str, result: Any, *arguments: Any) -> None:
    function = getattr(library, name)
    function.restype, function.argtypes = result, arguments
