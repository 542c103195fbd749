"""Random numbers: the recorder has turned random operators into `torchlazy.random_bits` and arithmetic on its bits.

Invariant: a rule here is a pure function of (seed, stream); operators that draw from torch's generators have none.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.fx import Node
from torchlazy.prims import ops as P
from torchlazy.prims import random_bits  # noqa: F401  (defines the operator)
from torchlazy.prims.builder import Builder, rule
from torchlazy.prims.decomps.value import Number
from torchlazy.prims.meta import Dim


@rule(torch.ops.torchlazy.random_bits.default)
def draw_random_bits(b: Builder, size: Sequence[Dim], seed: Number, stream: int, *, device: torch.device) -> Node:
    """The operator and the primitive are one function."""
    return b.prim(P.random_bits, shape=tuple(size), seed=seed, stream=stream, device=str(torch.device(device)))
