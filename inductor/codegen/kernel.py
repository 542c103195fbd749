"""What the three code generators share: canonical argument names, and the result they all return.

Invariant: generated text depends on the kernel's structure only, never on the names its buffers have in one program, so
equal kernels have equal text and one compiled function.
"""

from __future__ import annotations

from dataclasses import dataclass

from torchlazy.inductor.ir import Buffer, Kernel
from torchlazy.runtime.program.program import KernelSource


@dataclass(frozen=True)
class EmittedKernel:
    """A kernel's source and the program's names to launch it with.

    `buffers[i]` is the buffer bound to `source.pointers[i]`; `scalars[i]` the runtime scalar bound to
    `source.scalars[i]`; `sizes` the loop bounds bound to the source's size parameters. For a foreach source the three
    describe one row: `source.row_scalars` are bound to `row_scalars`.
    """

    source: KernelSource
    buffers: tuple[str, ...]
    scalars: tuple[str, ...]
    sizes: tuple[int, ...]
    row_scalars: tuple[str, ...] = ()


@dataclass(frozen=True)
class Arguments:
    """Canonical parameter names of a kernel: one pointer per piece of memory.

    A buffer that is both read and written is one `inout_ptr`; a donated pair (`Kernel.aliases`) stays two pointers,
    because its memory is one at run time only. No pointer may be declared restrict when `aliases` is not empty.
    """

    pointer_of: dict[str, str]  # buffer name -> parameter name
    buffers: tuple[Buffer, ...]  # in parameter order
    scalar_of: dict[str, str]
    scalars: tuple[tuple[str, type], ...]


def name_arguments(kernel: Kernel) -> Arguments:
    """Number inputs, outputs and scalars in the order in which the kernel lists them."""
    written = {buffer.name for buffer in kernel.writes}
    read = {buffer.name for buffer in kernel.reads}
    pointer_of: dict[str, str] = {}
    buffers: list[Buffer] = []
    for prefix, group in (
        ("in_ptr", [b for b in kernel.reads if b.name not in written]),
        ("inout_ptr", [b for b in kernel.writes if b.name in read]),
        ("out_ptr", [b for b in kernel.writes if b.name not in read]),
    ):
        for number, buffer in enumerate(group):
            pointer_of[buffer.name] = f"{prefix}{number}"
            buffers.append(buffer)
    scalar_of = {name: f"scalar{number}" for number, (name, _) in enumerate(kernel.scalars)}
    return Arguments(pointer_of, tuple(buffers), scalar_of, kernel.scalars)
