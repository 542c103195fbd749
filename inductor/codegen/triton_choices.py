"""Block sizes of Triton kernels, each with its reason.

Invariant: a choice depends on the kernel's structure and on coarse classes of its sizes, so that kernels which differ
in size only mostly share one text and one compiled function. Measure with `python benchmarks/triton_kernels.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

PROCESSORS = 132  # streaming multiprocessors of an H100 or H200
LANE_ELEMENTS = 8  # elements a thread holds at once: two 16-byte accesses of float32, one of a half


@dataclass(frozen=True, slots=True)
class Blocks:
    """The launch facts of one kernel; `rblock` is 0 for kernels that reduce nothing."""

    xblock: int
    rblock: int
    num_warps: int
    persistent: bool
    reason: str
    num_stages: int = 1
    loop_stages: int = 1  # steps of the reduction loop whose loads are in flight at once, through shared memory

    def options(self) -> tuple[tuple[str, int], ...]:
        """As `KernelSource.options`: upper-case names are constexpr parameters of the function."""
        blocks = (("XBLOCK", self.xblock), ("RBLOCK", self.rblock)) if self.rblock else (("XBLOCK", self.xblock),)
        return (*blocks, ("num_warps", self.num_warps), ("num_stages", self.num_stages))


def next_power_of_2(n: int) -> int:
    """The least power of two that is not less than n; 1 for 0."""
    return 1 << max(n - 1, 0).bit_length()


def warps_for(tile: int, per_thread: int = LANE_ELEMENTS, most: int = 16) -> int:
    """Warps such that a thread holds about `per_thread` elements of a tile."""
    return min(max(next_power_of_2(tile // (32 * per_thread)), 1), most)


def choose_pointwise(numel: int, *, one_axis: bool = True) -> Blocks:
    """Blocks of 1024; smaller ones where that would leave processors without work.

    Kernels of one flat axis are cut alike whatever their size: their text does not tell it either, so they stay equal
    and share one binary and one foreach launch.
    """
    if not one_axis and numel < 2 * PROCESSORS * 1024:
        return Blocks(256, 0, 2, False, "few elements: small blocks reach more processors")
    return Blocks(1024, 0, 4, False, "many elements: 8 a thread, 16-byte accesses")


def choose_foreach() -> Blocks:
    """Blocks of every row alike: the block table is read once per program, so programs are larger."""
    return Blocks(2048, 0, 8, False, "foreach: larger programs pay less for reading their row of the table")


FULL = 1 << 20  # more parallel points than any choice asks for


def choose_foreach_reduction() -> Blocks:
    """Rows of any length, each to one result: a loop, so that the text does not tell the length."""
    return Blocks(1, 1024, 4, False, "foreach: most rows are partial sums or biases, two or three steps")


@dataclass(frozen=True, slots=True)
class LoopBody:
    """What one step over the reduced axes does, as far as blocks depend on it."""

    live: int  # buffers that are read
    stores: bool = False
    heavy: bool = True  # computes transcendentals


def choose_reduction(xnumel: int, rnumel: int, *, r_contiguous: bool, r_sweeps: int, body: LoopBody) -> Blocks:
    """Blocks of a reduction. `r_sweeps` counts passes over the reduced axes."""
    if r_contiguous:
        return _inner_reduction(xnumel, rnumel, r_sweeps, body.live)
    return _outer_reduction(xnumel, rnumel, r_sweeps, body)


def choose_any_length(xnumel: int, rnumel: int, *, r_contiguous: bool) -> Blocks:
    """A reduction whose length changes from run to run: a loop, with a block for the length seen at planning."""
    whole = next_power_of_2(rnumel)
    if r_contiguous:
        rblock = min(max(whole, 64), 2048 if xnumel >= 2 * PROCESSORS else 4096)
        xblock = 1
        while xblock * rblock < 1024 and xnumel >= 4 * PROCESSORS * xblock:
            xblock *= 2
        warps = warps_for(xblock * rblock)
        return Blocks(xblock, rblock, warps, False, "rows of any length: a loop, one step at the length seen")
    xblock = 64
    while xblock > 16 and xnumel < xblock * PROCESSORS:
        xblock //= 2
    rblock = min(max(4096 // xblock // 2, 16), max(whole, 16))
    return Blocks(xblock, rblock, warps_for(xblock * rblock, 2 * LANE_ELEMENTS, 8), False, "columns of any length")


def _inner_reduction(xnumel: int, rnumel: int, r_sweeps: int, live: int) -> Blocks:
    """The reduced axis is contiguous: a row (or several short ones) a program."""
    whole = next_power_of_2(rnumel)
    # Later sweeps of a persistent row read registers: worth up to 16 elements x live buffers a thread.
    most = 4096 if r_sweeps == 1 else 8192 if live <= 4 else 4096
    if whole <= most:
        xblock = 1
        while xblock * whole < 1024 and xnumel >= 4 * PROCESSORS * xblock:
            xblock *= 2
        tile = xblock * whole
        warps = warps_for(tile, LANE_ELEMENTS if tile <= 2048 else 2 * LANE_ELEMENTS)
        return Blocks(xblock, whole, warps, True, "whole rows in registers: memory is read once")
    if xnumel >= 2 * PROCESSORS:
        return Blocks(1, 2048, 8, False, "long rows, many of them: one row a program, 8 elements a thread")
    return Blocks(1, 4096, 16, False, "long rows, few of them: many threads a row keep more loads in flight")


def _outer_reduction(xnumel: int, rnumel: int, r_sweeps: int, body: LoopBody) -> Blocks:
    """The parallel axis is contiguous: tiles of columns, each thread adding down its own.

    Measured (H200, operands of 8192 to 16384 rows), loads of three steps in flight against one: sums of 3072 bfloat16
    columns in 384 blocks 42 instead of 77 us, of 768 columns 14 instead of 25, both gradients of a layer norm 26
    instead of 32; with an exponential and no store in the loop it costs 15 %. A loop that stores, too (the gradient of
    a gelu and its sum), wants small tiles: 88 us at 16 rows, 106 to 118 at 32.
    """
    whole = next_power_of_2(rnumel)
    xblock = 64
    while xblock > 16 and xnumel < xblock * PROCESSORS:
        xblock //= 2
    if whole <= 64 and (r_sweeps > 1 or whole <= 32):
        xblock = max(min(xblock, 2048 // whole), 16)
        return Blocks(xblock, whole, warps_for(xblock * whole), True, "short columns in registers")
    rblock = min(max(4096 // xblock // (2 if body.live > 2 else 1), 16), whole)
    flying = "columns in tiles, loads of three steps in flight"
    if body.stores and rnumel >= 64:
        rblock = max(1024 // xblock, 16)
        return Blocks(xblock, rblock, warps_for(xblock * rblock), False, flying, loop_stages=3)
    if not body.heavy and body.live <= 4 and rnumel >= 4 * rblock:
        warps = warps_for(xblock * rblock, 4 * LANE_ELEMENTS if body.live <= 2 else 2 * LANE_ELEMENTS, 8)
        return Blocks(xblock, rblock, warps, False, flying, loop_stages=3)
    return Blocks(xblock, rblock, warps_for(xblock * rblock, 2 * LANE_ELEMENTS, 8), False, "columns in tiles")
