"""Kernels as C++17 source: loops around what `cpp_ops` prints, and the driver that shares tasks between threads.

A source is a `static` function `body`, which runs a range of tasks, and the entry ` kernel(`, which calls it once or
from every thread. `cpp_plan` says what a task is.

Invariant: text depends on the kernel's structure only (canonical names, constant sizes; a flat pointwise kernel takes
its size at run time). The result does not depend on the number of threads: partial results are cut by sizes alone.
"""

from __future__ import annotations

from collections.abc import Sequence

from torchlazy.inductor.codegen.cpp_body import BodyWriter
from torchlazy.inductor.codegen.cpp_ops import (
    CPP_TYPES,
    CppKernelState,
    indent,
)
from torchlazy.inductor.codegen.cpp_plan import SCALAR_WORK, SHARED_WORK, CppLoopPlan, plan_kernel
from torchlazy.inductor.codegen.kernel import Arguments, EmittedKernel, name_arguments
from torchlazy.inductor.codegen.languages import preludes
from torchlazy.inductor.ir import Kernel
from torchlazy.prims.size_int import SizeInt, markers_in, rename_markers, surely_equal
from torchlazy.runtime.program.program import KernelSource

_TASK_PARAMETERS = ("int64_t begin", "int64_t end", "int *error")
PRELUDES: dict[str, str] = preludes("cpp")


def emit(kernel: Kernel, *, foreach: bool = False, row_scalars: frozenset[str] = frozenset()) -> EmittedKernel:
    """The C++ source of `kernel`; `foreach` makes it run over the rows of a table: of any size if the kernel is flat,
    else all of the kernel's own.

    `row_scalars` names the runtime scalars that differ between rows.
    """
    arguments = name_arguments(kernel)
    plan = plan_kernel(kernel)
    if foreach and (plan.split or surely_equal(plan.tasks, 0)):
        raise ValueError(
            "foreach: a kernel whose threads share each reduction fills the machine by itself; launch it so"
        )
    state = CppKernelState(
        arguments.pointer_of, {buffer.name: buffer.dtype for buffer in arguments.buffers}, arguments.scalar_of
    )
    writer = BodyWriter(plan, state)
    lines = writer.body()
    tracked = markers_in("\n".join([*lines, str(plan.tasks)]))
    if tracked and foreach:
        raise ValueError("foreach: sizes of the program in the text of a kernel are arguments of one launch")
    parameters = _Parameters.of(kernel, arguments, tracked)
    apart = "TL_APART " if foreach or not _is_serial(plan, writer.task_work) else ""
    text = "\n".join(
        [
            "// prelude: cpp",
            f"{apart}static void body({', '.join([*parameters.declared, *parameters.sizes, *_TASK_PARAMETERS])}) {{",
            "  using namespace tl;",
            f"  constexpr int L = {'kLanes8' if state.wide else 'kLanes4'};",
            *indent(lines),
            "}",
            *_entry(plan, parameters, foreach, row_scalars, writer.task_work),
            "",
        ]
    )
    names = {size.marker: f"size{number}" for number, size in enumerate(tracked, int(plan.flat))}
    source = KernelSource(
        language="cpp",
        entry="kernel",
        text=rename_markers(text, names),
        pointers=tuple(buffer.dtype for buffer in arguments.buffers),
        scalars=tuple(kind for name, kind in kernel.scalars if not (foreach and name in row_scalars)),
        sizes=(1 if plan.flat else 0) + len(tracked),
        foreach=foreach,
        row_scalars=tuple(kind for name, kind in kernel.scalars if foreach and name in row_scalars),
        index_checks=tuple(rename_markers(check, dict.fromkeys(names, "n")) for check in state.checks),
    )
    return EmittedKernel(
        source=source,
        buffers=tuple(buffer.name for buffer in arguments.buffers),
        scalars=tuple(name for name, _ in kernel.scalars if not (foreach and name in row_scalars)),
        sizes=((plan.vector.size,) if plan.flat and plan.vector is not None else ()) + tuple(tracked),
        row_scalars=tuple(name for name, _ in kernel.scalars if foreach and name in row_scalars),
    )


# ---------------------------------------------------------------------- parameters and entry
class _Parameters:
    """C++ parameters of a kernel: pointers, scalars, then the sizes of the program that its text names."""

    def __init__(
        self, pointers: list[tuple[str, str]], scalars: list[tuple[str, str, str]], sizes: list[str], restrict: bool
    ) -> None:
        self.pointers = pointers  # (type, parameter)
        self.scalars = scalars  # (type, parameter, program's name)
        self.sizes = [f"int64_t {name}" for name in sizes]
        star = " *__restrict " if restrict else " *"
        self.declared = [f"{kind}{star}{name}" for kind, name in pointers] + [
            f"{kind} {name}" for kind, name, _ in scalars
        ]
        self.names = [name for _, name in pointers] + [name for _, name, _ in scalars] + sizes

    @staticmethod
    def of(kernel: Kernel, arguments: Arguments, tracked: Sequence[SizeInt]) -> _Parameters:
        written = {buffer.name for buffer in kernel.writes}
        pointers = [
            (("" if buffer.name in written else "const ") + CPP_TYPES[buffer.dtype], arguments.pointer_of[buffer.name])
            for buffer in arguments.buffers
        ]
        scalars = [
            ("double" if kind is float else "int64_t", arguments.scalar_of[name], name) for name, kind in kernel.scalars
        ]
        return _Parameters(pointers, scalars, [size.marker for size in tracked], restrict=not kernel.aliases)


def _entry(
    plan: CppLoopPlan, parameters: _Parameters, foreach: bool, row_scalars: frozenset[str], task_work: int
) -> list[str]:
    """The driver. Flat kernels share elements in blocks of 1024, others share tasks."""
    if foreach:
        return _foreach_entry(plan, parameters, row_scalars, task_work)
    declared = ", ".join([*parameters.declared, *(["int64_t size0"] if plan.flat else []), *parameters.sizes])
    call = ", ".join(parameters.names)
    head = [f'extern "C" int kernel({declared}) {{', "  int error = 0;"]
    if plan.flat:
        work = max(1, task_work) * 1024
        tasks, run = "(size0 + 1023) / 1024", "part.begin * 1024, tl::min_index(part.end * 1024, size0)"
        whole = "0, size0"
    else:
        work = _work_of_a_task(plan, task_work)
        tasks, run, whole = str(plan.tasks), "part.begin, part.end", f"0, {plan.tasks}"
    if _is_serial(plan, task_work):
        return [
            *head,
            *([] if surely_equal(plan.tasks, 0) else [f"  body({call}, {whole}, &error);"]),
            "  return error;",
            "}",
        ]
    return [
        *head,
        f"  if (tl::worth_threads({tasks}, {work})) {{",
        "    #pragma omp parallel",
        "    {",
        f"      const tl::Range part = tl::share({tasks});",
        f"      if (part.begin < part.end) body({call}, {run}, &error);",
        "    }",
        f"  }} else body({call}, {whole}, &error);",
        "  return error;",
        "}",
    ]


def _work_of_a_task(plan: CppLoopPlan, task_work: int) -> int:
    return max(1, task_work) * (SCALAR_WORK if plan.vector is None else 1)


def _is_serial(plan: CppLoopPlan, task_work: int) -> bool:
    """Whether tasks are never shared among threads: the text says how much there is, and `worth_threads` refuses it."""
    if plan.flat:
        return False
    if plan.split or surely_equal(plan.tasks, 0):
        return True
    tasks, work = str(plan.tasks), str(_work_of_a_task(plan, task_work))  # a size of the program stands as its name
    return tasks.isdigit() and work.isdigit() and (int(tasks) < 2 or int(tasks) * int(work) < SHARED_WORK)


def _foreach_entry(
    plan: CppLoopPlan, parameters: _Parameters, row_scalars: frozenset[str], task_work: int
) -> list[str]:
    """One parallel region over the blocks of all rows: tasks, or in flat kernels pieces of 1024 elements."""
    size_at = len(parameters.pointers)
    call: list[str] = [f"({kind} *)row[{n}]" for n, (kind, _) in enumerate(parameters.pointers)]
    shared, at = [], size_at + plan.flat
    for kind, name, original in parameters.scalars:
        if original in row_scalars:
            call.append(f"tl::bits_to<{kind}>(row[{at}])")
            at += 1
        else:
            call.append(name)
            shared.append(f", {kind} {name}")
    if plan.flat:
        size, count = [f"      const int64_t size = row[{size_at}];"], "(size + 1023) / 1024"
        part, work = "from * 1024, tl::min_index(to * 1024, size)", max(1, task_work) * 1024
        total = f"for (int64_t r = 0; r < rows; ++r) blocks += (table[r * {at} + {size_at}] + 1023) / 1024;"
    else:
        size, count, part, total = [], str(plan.tasks), "from, to", f"blocks = rows * {plan.tasks};"
        work = _work_of_a_task(plan, task_work)
    return [
        f'extern "C" int kernel(const int64_t *table, int64_t rows{"".join(shared)}) {{',
        "  int error = 0;",
        "  const auto run = [&](int64_t begin, int64_t end) {  // of all blocks of all rows",
        "    int64_t first = 0;",
        "    for (int64_t r = 0; r < rows && first < end; ++r) {",
        f"      const int64_t *row = table + r * {at};",
        *size,
        f"      const int64_t blocks = {count};",
        "      const int64_t from = tl::max_index(begin - first, 0), to = tl::min_index(end - first, blocks);",
        f"      if (from < to) body({', '.join(call)}, {part}, &error);",
        "      first += blocks;",
        "    }",
        "  };",
        "  int64_t blocks = 0;",
        f"  {total}",
        f"  if (tl::worth_threads(blocks, {work})) {{",
        "    #pragma omp parallel",
        "    {",
        "      const tl::Range part = tl::share(blocks);",
        "      run(part.begin, part.end);",
        "    }",
        "  } else run(0, blocks);",
        "  return error;",
        "}",
    ]
