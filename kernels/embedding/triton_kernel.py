"""Embedding rows of a step's tokens; a token in flight is read where the last step drew it, without the host."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.arguments import FLOATS, check_device, check_dtype, check_rows, check_shape

_BLOCK = 1024


@triton.jit
def embed_kernel(
    token_ids_ptr,  # [num_rows] int32
    source_ptr,  # [num_rows] int32: row of samples, or -1 where token_ids holds the token
    samples_ptr,  # [num_samples] int32
    table_ptr,  # [vocab_size, width], rows contiguous
    out_ptr,  # [num_rows, width], contiguous
    table_row: tl.int64,
    vocab_size,
    scale,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Copy a piece of one row. Grid: (num_rows, cdiv(WIDTH, BLOCK))."""
    i_r = tl.program_id(0).to(tl.int64)
    source = tl.load(source_ptr + i_r)
    token = tl.load(token_ids_ptr + i_r)
    drawn = tl.load(samples_ptr + tl.maximum(source, 0))
    token = tl.where(source >= 0, drawn, token)
    # a row whose token never came is dropped later; until then it must not read outside the table
    token = tl.minimum(tl.maximum(token, 0), vocab_size - 1).to(tl.int64)
    o_w = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    m_w = o_w < WIDTH
    b_row = tl.load(table_ptr + token * table_row + o_w, mask=m_w, other=0.0).to(tl.float32) * scale  # [BLOCK]
    tl.store(out_ptr + i_r * WIDTH + o_w, b_row.to(out_ptr.dtype.element_ty), mask=m_w)


def embed(token_ids: Tensor, source: Tensor, samples: Tensor, table: Tensor, scale: float = 1.0) -> Tensor:
    """scale * table[token], the token being samples[source] where source >= 0 and token_ids elsewhere.

    Args:
        token_ids, source: [num_rows] int32.
        samples: [num_samples] int32, what the last step drew.
        table: [vocab_size, hidden], bfloat16, float16 or float32.

    Returns:
        [num_rows, hidden], of the table's dtype.

    Raises:
        KernelArgumentError: a tensor is not as above.
    """
    check_shape("table", table, None, None)
    check_dtype("table", table, *FLOATS)
    check_rows("table", table)
    check_shape("token_ids", token_ids, None)
    check_shape("source", source, token_ids.shape[0])
    check_shape("samples", samples, None)
    for name, tensor in (("token_ids", token_ids), ("source", source), ("samples", samples)):
        check_dtype(name, tensor, torch.int32)
        check_rows(name, tensor)
        check_device(name, tensor, table)
    num_rows, (vocab_size, width) = token_ids.shape[0], table.shape
    out = torch.empty(num_rows, width, dtype=table.dtype, device=table.device)
    if num_rows:
        embed_kernel[(num_rows, triton.cdiv(width, _BLOCK))](
            token_ids_ptr=token_ids,
            source_ptr=source,
            samples_ptr=samples,
            table_ptr=table,
            out_ptr=out,
            table_row=table.stride(0),
            vocab_size=vocab_size,
            scale=scale,
            WIDTH=width,
            BLOCK=_BLOCK,
        )
    return out
