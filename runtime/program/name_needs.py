"""How the names of a program are needed: as tensors by library calls and the caller, as addresses by kernels.

Invariant: a name that stands in neither set is used only by the step that frees it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torchlazy.runtime.program.program import Allocate, ExternCall, ForeachLaunch, Launch, Program, Reinterpret
from torchlazy.runtime.program.steps import names_read
from torchlazy.runtime.toolchains.toolchain import LoadedKernel


def read_as_tensors(program: Program, kernels: Sequence[LoadedKernel]) -> set[str]:
    """Names that somebody gets as the tensors that they are."""
    read = set(program.outputs)
    for step in program.steps:
        if isinstance(step, ExternCall) or (
            isinstance(step, Launch | ForeachLaunch) and kernels[step.kernel].takes_tensors
        ):
            read.update(names_read(step))
    return read


def needs(program: Program, kernels: Sequence[LoadedKernel]) -> tuple[set[str], set[str], dict[str, int]]:
    """Names that must be tensors, names whose address is used, and the last step that uses it."""
    tensors = read_as_tensors(program, kernels)
    addresses: set[str] = set()
    last: dict[str, int] = {}
    for position in range(len(program.steps) - 1, -1, -1):
        step = program.steps[position]
        at: Iterable[str] = ()
        if isinstance(step, Launch):
            at = () if kernels[step.kernel].takes_tensors else step.buffers
        elif isinstance(step, ForeachLaunch):
            at = [name for buffers, _, _ in step.rows for name in buffers]
        elif isinstance(step, Reinterpret):
            if step.name in tensors:
                tensors.add(step.source)
            if step.name in addresses:
                at = (step.source,)
        elif isinstance(step, Allocate) and step.reuse is not None:
            last.setdefault(step.reuse, position)  # its address may be that of what takes it over
        addresses.update(at)
        for name in at:
            last.setdefault(name, position)
    return tensors, addresses, last
