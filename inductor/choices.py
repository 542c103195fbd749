"""The heuristics of lowering: what to put into memory, how to split reductions.

Invariant: every choice is a pure function of sizes and counts, depends on no machine, and stands here with its reason.
None of them changes what is computed. What the numbers rest on is said beside each; "model" means the arithmetic given,
to be replaced by a measurement where one disagrees.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

# A body of more inlined nodes or more distinct buffers than this is cut. Model: a Triton kernel of 60 elementwise ops
# on 12 pointers needs about 80 registers a thread at 4 elements a thread, the last size without spills; a C++ compiler
# takes 0.1 s for it, and its time grows faster than linearly.
MAX_CHAIN_OPS = 60
MAX_CHAIN_READS = 12

# A cat of more operands becomes one aten.cat: each operand of an inlined cat costs a comparison and a masked load at
# every point, the library call moves each byte once.
MAX_INLINE_CAT = 4

# A chain as light as this is computed again in each kernel that reads it instead of stored; see `recompute`.
MAX_RECOMPUTED_WORK = 12

# On a GPU a value of up to this much work, with transcendentals, is computed again in a second kernel that reads it.
# Model, H200: a float32 written and read is 8 bytes / 4.1 TB/s = 2 ps an element; erf and a few multiplications are 30
# operations / 60 TFLOP/s = 0.5 ps. On a CPU core the two cost the same, so there it is stored.
MAX_RECOMPUTED_WORK_CUDA = 40
MAX_HEAVY_KERNELS = 2

# Recomputing may read this much more than the stored value: row statistics and weights beside one full operand are
# served by the cache. With 1.0 the logits of a cross-entropy were stored twice more (x - max and x - max - lse).
RECOMPUTE_SLACK = 1.25

# Below this many bytes (64 KiB move in the time of a hundredth of a launch) traffic does not count, launches do.
SMALL_BYTES = 1 << 16
MAX_SMALL_READS = 3

# A value that stands in more kernels than this is stored even where recomputing reads no more bytes: code size.
MAX_RECOMPUTED_KERNELS = 16

# A value that one loop computes this many times for each of its elements, through overlapping windows, is stored unless
# `recompute` says that it is light: the positions of a max_pool2d(3, 2, 1), inlined into its backward, took 20 ms there
# instead of 1 (8 x 32 x 56 x 56).
MIN_REPEATED_READS = 2

# Growth of an expand from which work before it is worth doing once a row instead of once an element.
MIN_HOIST_GROWTH = 8

# Rows up to this many elements stay in a core's L2 cache (256 KiB of float32) or an SM's share of the L2, so that
# variance can be computed as two sums over the row without reading memory twice.
MAX_TWO_PASS_ROW = 65536

# Reductions over fewer points in all are never split: one block does them in the time of a launch.
MIN_SPLIT_POINTS = 1 << 16

_FLAT_CHUNKS = (8192, 4096, 2048)

# Concurrent blocks that fill a target. H200: 132 SMs, 4 blocks each. CPU: tasks for up to 32 cores; a few tasks too
# many cost a machine of 2 cores nothing measurable, and the choice must not depend on the machine that compiles.
_CUDA_BLOCKS = 528
_CPU_TASKS = 32


@dataclass(frozen=True, slots=True)
class ChainCost:
    """An estimate of what inlining a value costs, per element of it: `work` in additions, `bytes_read` from memory."""

    work: int
    heavy: int
    bytes_read: float
    reads: int
    reads_reduction: bool = False


def recompute(cost: ChainCost, numel: Any, itemsize: int, kernels: int, device: str = "cpu") -> bool:
    """Whether a value needed by several kernels is computed in each of them rather than stored.

    Recomputing costs memory nothing where it reads no more than the stored value's bytes (a convert from a half, a
    scaled input, an input less its row's mean), and then only light work is repeated; transcendentals on GPUs only.
    Where all of it is small, a launch that it may need costs more than reading a few operands again.
    """
    if cost.work == 0 and cost.reads == 0:
        return True  # a literal
    is_light = cost.heavy == 0 and cost.work <= MAX_RECOMPUTED_WORK
    is_bearable = device.startswith("cuda") and cost.work <= MAX_RECOMPUTED_WORK_CUDA and kernels <= MAX_HEAVY_KERNELS
    if not is_light and not is_bearable:
        return False
    if kernels > MAX_RECOMPUTED_KERNELS:
        return False
    if isinstance(numel, int) and numel * cost.bytes_read <= SMALL_BYTES and cost.reads <= MAX_SMALL_READS:
        return True
    return cost.bytes_read <= itemsize * RECOMPUTE_SLACK


def hoist(cost: ChainCost, growth: float, is_scalar: bool) -> bool:
    """Whether the operand of an expand is computed into memory first.

    Only where it reads a reduction's result: then it joins that reduction's kernel as its epilogue and launches nothing
    of its own (layer norm's rsqrt(var + eps), the clip coefficient of a gradient norm). A 0-dim chain over inputs costs
    less inlined than a launch; loop-invariant motion takes it out of the loop.
    """
    if growth < MIN_HOIST_GROWTH:
        return False
    if cost.reads_reduction:
        return cost.work >= 4
    return cost.heavy >= 4 and not is_scalar


def gather_source_in_memory(cost: ChainCost, source_size: Any, gathered: Any) -> bool:
    """Whether the source of an indexed read is stored first: not when few of its elements are read, nor when each costs
    one load and light work.

    A cross-entropy picks one logit a row out of (x - max) - lse, which must not be stored for it (1.6 GB at 8x1024
    tokens of a vocabulary of 50257); an embedding table converted from bfloat16 is read in some rows only.
    """
    if isinstance(source_size, int) and isinstance(gathered, int) and gathered * 4 <= source_size:
        return False
    return cost.heavy > 0 or cost.reads > 1 or cost.work > MAX_RECOMPUTED_WORK


def split_count(device: str, outputs: int, reduce_size: int, order: str) -> int:
    """Into how many partial reductions a reduction falls; 1 for none.

    "row": the innermost reduced axis is contiguous, one block or task reduces an output. "column": kept axes are
    contiguous, one block takes 64 neighbouring outputs. Split until the target is full, but leave chunks so large that
    the second stage, one small launch more, is noise (model: 4096 elements in a chunk of a row, 64 rows of columns).
    """
    wanted = _CUDA_BLOCKS if device.startswith("cuda") else _CPU_TASKS
    blocks = outputs if order == "row" else -(-outputs // 64)
    least_chunk = 4096 if order == "row" else 64
    if blocks * 2 > wanted or reduce_size < 2 * least_chunk:
        return 1
    return max(1, min(-(-wanted // blocks), reduce_size // least_chunk))


def flat_chunk(device: str, size: int) -> int:
    """Elements in each partial result of a reduction of `size` contiguous elements to one; 0 where sizes decide.

    A number that does not depend on the size: the first stages of a gradient norm are then one kernel text for all
    parameters, and one launch. It is the largest that divides the size, so that no load needs a mask. A chunk of 8192
    is 8 elements a thread for each of four steps of 256 threads. CPUs cut by their cores.
    """
    if not device.startswith("cuda"):
        return 0
    return next((chunk for chunk in _FLAT_CHUNKS if size % chunk == 0), 0)


def welford_strategy(reduce_size: Any, splits: int, divides: bool) -> Literal["two_pass", "split", "welford"]:
    """How mean and squared deviations are computed.

    "two_pass" (sum, then sum of squared deviations) vectorises without a division an element and rounds better; its
    second pass reads the cache where a row fits there. "split" (a welford for each chunk, then their combination) where
    outputs are too few to fill the target, as batch norm's channels, and chunks are of equal size. "welford" reads long
    rows once.
    """
    if splits > 1:
        return "split" if divides else "two_pass"
    return "two_pass" if reduce_size <= MAX_TWO_PASS_ROW else "welford"
