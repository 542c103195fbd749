"""Hand-written Triton sources in the form that the launcher expects."""

from __future__ import annotations

import torch
from torchlazy.runtime.program.program import KernelSource

_OPTIONS = (("XBLOCK", 256), ("num_warps", 2), ("num_stages", 1))


def triton_scale(factor: float = 1.0) -> KernelSource:
    """out = in * 2 * factor + scalar0."""
    text = f"""import triton
import triton.language as tl


@triton.jit(do_not_specialize=["scalar0"])
def scale(in_ptr0, out_ptr0, scalar0: tl.float64, size0, XBLOCK: tl.constexpr):
    xindex = tl.program_id(0) * XBLOCK + tl.arange(0, XBLOCK)
    xmask = xindex < size0
    value = tl.load(in_ptr0 + xindex, mask=xmask)
    tl.store(out_ptr0 + xindex, value * 2.0 * {float(factor)} + tl.full([XBLOCK], scalar0, tl.float32), mask=xmask)
"""
    return KernelSource("triton", "scale", text, (torch.float32, torch.float32), (float,), 1, options=_OPTIONS)


def triton_row_sum() -> KernelSource:
    """out[i] = sum over r of in[i * size1 + r], one row a program."""
    text = """import triton
import triton.language as tl


@triton.jit
def row_sum(in_ptr0, out_ptr0, size0, size1, XBLOCK: tl.constexpr, RBLOCK: tl.constexpr):
    xindex = tl.program_id(0) * XBLOCK + tl.arange(0, XBLOCK)[:, None]
    total = tl.full([XBLOCK, RBLOCK], 0, tl.float32)
    for start in range(0, size1, RBLOCK):
        rindex = start + tl.arange(0, RBLOCK)[None, :]
        mask = (xindex < size0) & (rindex < size1)
        total += tl.load(in_ptr0 + xindex * size1 + rindex, mask=mask, other=0.0)
    tl.store(out_ptr0 + xindex, tl.sum(total, 1)[:, None], mask=xindex < size0)
"""
    options = (("XBLOCK", 1), ("RBLOCK", 64), ("num_warps", 1), ("num_stages", 1))
    return KernelSource("triton", "row_sum", text, (torch.float32, torch.float32), (), 2, options=options)


def triton_foreach() -> KernelSource:
    """Rows of (in, out, size, alpha): out = in * alpha + scalar0."""
    text = """import triton
import triton.language as tl


@triton.jit(do_not_specialize=["scalar0"])
def foreach_scale(table_ptr, blocks_ptr, scalar0: tl.int64, XBLOCK: tl.constexpr):
    program = tl.program_id(0)
    row_ptr = table_ptr + tl.load(blocks_ptr + 2 * program) * 4
    start = tl.load(blocks_ptr + 2 * program + 1)
    in_ptr0 = tl.load(row_ptr).to(tl.pointer_type(tl.float32))
    out_ptr0 = tl.load(row_ptr + 1).to(tl.pointer_type(tl.float32))
    size0 = tl.load(row_ptr + 2)
    row_scalar0 = tl.load(row_ptr + 3).to(tl.float64, bitcast=True).to(tl.float32)
    xindex = start + tl.arange(0, XBLOCK)
    value = tl.load(in_ptr0 + xindex, mask=xindex < size0)
    tl.store(out_ptr0 + xindex, value * row_scalar0 + scalar0, mask=xindex < size0)
"""
    return KernelSource(
        "triton", "foreach_scale", text, (torch.float32, torch.float32), (int,), 1, True, (float,), options=_OPTIONS
    )


def triton_broken() -> KernelSource:
    """Names what does not exist."""
    text = """import triton
import triton.language as tl


@triton.jit
def broken(out_ptr0, size0, XBLOCK: tl.constexpr):
    tl.store(out_ptr0, no_such_value)
"""
    return KernelSource("triton", "broken", text, (torch.float32,), (), 1, options=_OPTIONS)
