"""Host tables of foreach kernels on a GPU: which program works on which row, and from which element on.

Invariant: every element of every row belongs to exactly one program, and a program's first element is a multiple of
the block size. Rows without elements have no program.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import torch


def foreach_blocks(row_sizes: Sequence[int], xblock: int) -> list[tuple[int, int]]:
    """(row, first element) of each program, for rows of `row_sizes` elements."""
    return [(row, start) for row, size in enumerate(row_sizes) for start in range(0, size, xblock)]


def foreach_block_table(row_sizes: Sequence[int], xblock: int) -> torch.Tensor:
    """`foreach_blocks` as an int64 CPU tensor [programs, 2], without a Python loop over the programs."""
    sizes = torch.tensor(list(row_sizes), dtype=torch.int64)
    programs = (sizes + (xblock - 1)) // xblock
    rows = torch.repeat_interleave(torch.arange(len(sizes)), programs)
    before = torch.cumsum(programs, 0) - programs
    starts = (torch.arange(len(rows)) - before[rows]) * xblock
    return torch.stack([rows, starts], dim=1)


def scalar_bits(value: float | int | bool, kind: type) -> int:
    """A row scalar as the int64 that stands in the pointer table: a float's bits, or the integer itself."""
    return struct.unpack("<q", struct.pack("<d", value))[0] if kind is float else int(value)
