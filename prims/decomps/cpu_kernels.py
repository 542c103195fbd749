"""Which operators stay with ATen's kernel, mostly on the CPU, although they have a rule.

A rule that looks for the windows which cover a position, or that reads between elements, divides indices at each
element. GPUs hide that behind memory, and ATen's way there adds with atomics, in another order at each run. A CPU core
does not hide it. Measured on two cores against ATen's kernel, (8, 32, 56, 56) float32, row-major, best of 40: gradient
of max_pool2d(3, 2, 1) 7.6 times as long, of avg_pool2d(3, 2, 1) 1.3, and 5 fused with a relu, of
adaptive_avg_pool2d(5) 31, of bilinear doubling 2.8; bilinear doubling itself 2.6; grid_sample 5.2. What is faster than
ATen's stays a rule on both: pooling forward (0.1 to 0.5), bicubic resampling (0.3), padding gradients (0.8), col2im
(0.4).

On an H200 (benchmarks/README.md has the table) the gradient of adaptive_max_pool2d(5) of (64, 64, 112, 112) takes
ATen's kernel 40 us, which writes few elements, and the rule 860: it stays with ATen there too. Slower than ATen's, and
rules all the same: the gradient of bilinear doubling on channels-last memory (1.9), adaptive_avg_pool2d(5) (1.8).

Invariant: this changes who computes, never what.
"""

from __future__ import annotations

from torch.fx import Node
from torchlazy.prims.builder import Builder, ExternByChoice

ENABLED = True
"""Tests turn it off to see the rules at work on the CPU."""


def leave_to_aten(b: Builder, x: Node, *, also_on_gpus: bool = False) -> None:
    """Raise ExternByChoice where x is on the CPU, or anywhere."""
    if ENABLED and (also_on_gpus or b.meta(x).device == "cpu"):
        place = "" if also_on_gpus else "on the CPU: "
        raise ExternByChoice(f"{place}ATen's kernel, as generated code divides indices at each element")
