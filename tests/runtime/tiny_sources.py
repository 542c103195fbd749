"""Hand-written kernel sources for the tests of the runtime."""

from __future__ import annotations

import torch
from torchlazy.runtime.program.program import KernelSource

PRELUDES = {"cpp": "#include <cmath>\n#include <cstdint>\nstatic inline float twice(float x) { return 2.0f * x; }\n"}


def cpp_scale(factor: float = 1.0) -> KernelSource:
    """out = twice(in) * factor + scalar0 over size0 elements."""
    text = f"""// prelude: cpp
extern "C" int64_t kernel(const float* in_ptr0, float* out_ptr0, double scalar0, int64_t size0) {{
  for (int64_t i = 0; i < size0; i++) out_ptr0[i] = twice(in_ptr0[i]) * {float(factor)}f + (float)scalar0;
  return 0;
}}
"""
    return KernelSource("cpp", "kernel", text, (torch.float32, torch.float32), (float,), 1)


def cpp_foreach() -> KernelSource:
    """Rows of (in, out, size, alpha): out = in * alpha + scalar0."""
    text = """// prelude: cpp
#include <cstring>
extern "C" int64_t kernel(const int64_t* table, int64_t rows, int64_t scalar0) {
  for (int64_t r = 0; r < rows; r++) {
    const int64_t* row = table + 4 * r;
    const float* in_ptr0 = (const float*)row[0];
    float* out_ptr0 = (float*)row[1];
    double alpha;
    memcpy(&alpha, row + 3, 8);
    for (int64_t i = 0; i < row[2]; i++) out_ptr0[i] = in_ptr0[i] * (float)alpha + (float)scalar0;
  }
  return 0;
}
"""
    return KernelSource("cpp", "kernel", text, (torch.float32, torch.float32), (int,), 1, True, (float,))


def cpp_gather() -> KernelSource:
    """out[i] = in[index[i]] for size0 indices into 4 elements; reports an index out of range."""
    text = """// prelude: cpp
extern "C" int64_t kernel(const float* in_ptr0, const int64_t* in_ptr1, float* out_ptr0, int64_t size0) {
  for (int64_t i = 0; i < size0; i++) {
    int64_t at = in_ptr1[i] < 0 ? in_ptr1[i] + 4 : in_ptr1[i];
    if (at < 0 || at >= 4) return 1;
    out_ptr0[i] = in_ptr0[at];
  }
  return 0;
}
"""
    return KernelSource(
        "cpp", "kernel", text, (torch.float32, torch.int64, torch.float32), (), 1,
        index_checks=("gather: index of dimension 0 with size 4",),
    )  # fmt: skip


def cpp_broken() -> KernelSource:
    """Calls what nobody defines."""
    text = '// prelude: cpp\nextern "C" int64_t kernel(float* out_ptr0) { return no_such_function(out_ptr0); }\n'
    return KernelSource("cpp", "kernel", text, (torch.float32,))


def numba_scale() -> KernelSource:
    """The same as `cpp_scale(1)`, in Numba; not parallel, where Numba drops stores into arrays made by carray."""
    text = """# prelude: numba
import numba

def kernel(in_ptr0, out_ptr0, scalar0, size0):
    source = numba.carray(address(in_ptr0), (size0,), numba.float32)
    target = numba.carray(address(out_ptr0), (size0,), numba.float32)
    for i in range(size0):
        target[i] = source[i] * numba.float32(2) + numba.float32(scalar0)
    return 0
"""
    return KernelSource("numba", "kernel", text, (torch.float32, torch.float32), (float,), 1)


NUMBA_PRELUDE = """
from numba import types
from numba.extending import intrinsic


@intrinsic
def address(typingctx, number):
    def codegen(context, builder, signature, args):
        return builder.inttoptr(args[0], context.get_value_type(types.voidptr))

    return types.voidptr(types.int64), codegen
"""
PRELUDES["numba"] = NUMBA_PRELUDE
