"""Differences that are known and not mended: the fuzzer leaves them out, and a test fails once one is gone.

Invariant: each has a program that shows it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from tests.fuzz.program import Program
from tests.fuzz.ways import Failure


@dataclass(frozen=True)
class Known:
    """`differs` is searched in the failure's text, `needs` in the program's; `program` is as small as it fails."""

    reason: str
    ways: tuple[str, ...]
    differs: str
    needs: str
    program: str
    compiled: bool = False  # whether its test compiles it: run operator by operator, not all ways differ

    def is_it(self, program: Program, failure: Failure) -> bool:
        return (
            failure.way in self.ways
            and re.search(self.differs, str(failure)) is not None
            and re.search(self.needs, program.text()) is not None
        )


_PROD = """SEED, PACKING = 100, 'plain'
INPUTS = (
    ('v1', torch.float32, (3,), True, ''),
)
CALLS = (
    (4, 3, (0.5, 1, True), 0, '', 'backward()'),
    (4, 3, (0.5, 1, True), 1, '', 'backward()'),
)


def step(S, dev, k0, k1, k2, v1):
    v2 = v1.prod(-1)
    v1.data.add_(1)
    return v2
"""

_AGAIN = """SEED, PACKING = 100, 'plain'
INPUTS = (
    ('v1', torch.float32, (3,), True, ''),
)
CALLS = (
    (4, 3, (0.5, 1, True), 0, '', ''),
)


def step(S, dev, k0, k1, k2, v1):
    S.b.add_(1)
    return torch.autograd.grad(v1.sum(), v1, create_graph=True)[0]
"""
_EXPANDED = """SEED, PACKING = 401993, 'box'
INPUTS = (
    ('v1', torch.int8, ('m', 'n'), False, 'state'),
)
CALLS = (
    (4, 3, (0.25, 2, 0.5), 798, '', ''),
    (4, 3, (0.25, 2, 0.5), 203, '', ''),
    (4, 3, (0.25, 2, 0.5), 746, '', ''),
)


def step(S, dev, k0, k1, k2, args):
    v1, = args.t
    S.b.requires_grad_(not S.b.requires_grad) if S.b.is_leaf else 0
    return torch.autograd.grad(v1.sum(), v1, retain_graph=True, create_graph=True, allow_unused=True)[0]
"""

KNOWN: tuple[Known, ...] = (
    Known(
        "the gradient of `prod` does not read what `.data` wrote to its operand since",
        ("device", "compile", "compile_lazy"),
        r"\.grad: \[",
        r"\.prod\([\s\S]*\.data\b",
        _PROD,
        compiled=True,
    ),
    Known(
        "a gradient of a gradient behind a graph that writes to what it reads is asked to be called again",
        ("bridge",),
        r"raised \['call', 'RuntimeError'",
        r"create_graph=True",
        _AGAIN,
    ),
    Known(
        "gradients that are asked for with create_graph=True are dense, eager's of a sum an expanded number",
        ("bridge",),
        r"strides is",
        r"create_graph=True",
        _EXPANDED,
    ),
)


def known(program: Program, failure: Failure) -> str:
    """Why this difference is no news; empty where it is."""
    return next((one.reason for one in KNOWN if one.is_it(program, failure)), "")
