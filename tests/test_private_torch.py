"""Private names of torch: collected in `lazy/torch_private/`; elsewhere only those of this table, with reasons.

Invariant: a use that the table lacks fails, and so does a row that no file needs any more.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("prims", "runtime", "autograd", "inductor", "lazy")
# Functions of these files say in their docstrings why what they do has no public name.
COLLECTED = (
    *sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "lazy" / "torch_private").glob("[a-z]*.py")),
)
# Types that annotations and table keys name: `torch._ops` is where operators live, and has no public alias.
EVERYWHERE = {"torch._ops.OpOverload"}

ALLOWED: dict[str, tuple[str, ...]] = {
    # A tensor subclass, a mode, a device and an exported assertion are made with these; torch documents them, under
    # these names.
    "torch.Tensor._make_wrapper_subclass": ("lazy/record/tensor.py",),
    "torch._C._disabled_torch_function_impl": ("lazy/record/tensor.py",),
    "torch._check": ("lazy/export/module.py",),
    "torch.cuda.jiterator._create_jit_fn": ("prims/random_bits.py",),  # a documented beta
    "torch._register_device_module": ("lazy/device/device.py",),
    "torch._subclasses.fake_tensor.FakeTensorMode": ("lazy/deferred.py", "prims/meta_infer.py"),
    # Code of ours that runs in the middle of another's: no mode and no subclass of theirs may see its operators.
    "torch._C.DisableTorchFunction": (
        "lazy/device/mode.py", "lazy/joint/inner_backward.py", "lazy/record/shared_memory.py", "runtime/executor.py",
    ),
    "torch.utils._python_dispatch._disable_current_modes": ("prims/meta_infer.py", "runtime/executor.py"),
    "torch._C._AutoDispatchBelowAutograd": ("runtime/executor.py",),
    "torch._C._len_torch_dispatch_stack": ("runtime/executor.py",),
    "torch._C._len_torch_function_stack": ("runtime/executor.py",),
    # Autocast of the lazy device: the key of its wrappers, and the guard that keeps its kernels from themselves.
    "torch._C.DispatchKey": ("lazy/ops/autocast.py",),
    "torch._C.DispatchKey.AutocastPrivateUse1": ("lazy/record/tensor.py",),
    "torch._C.DispatchKey.Conjugate": ("lazy/record/tensor.py",),
    "torch._C.DispatchKey.Negative": ("lazy/record/tensor.py",),
    "torch._C.DispatchKeySet": ("lazy/ops/autocast.py", "lazy/record/tensor.py"),
    "torch._C._ExcludeDispatchKeyGuard": ("lazy/ops/autocast.py",),
    # What operators there are, and which are made of others: the dispatcher alone knows.
    "torch._C._dispatch_get_all_op_names": ("lazy/device/device.py",),
    "torch._C._dispatch_has_kernel": ("prims/coverage.py",),
    "torch._C._dispatch_has_computed_kernel_for_dispatch_key": ("prims/coverage.py",),
    "torch._C._dispatch_has_kernel_for_dispatch_key": (
        "lazy/device/device.py", "lazy/trace/op_schema.py", "prims/coverage.py", "runtime/program/steps.py",
    ),
    "torch._C._jit_get_all_schemas": ("lazy/ops/collectives.py", "prims/coverage.py"),
    "torch._C.Argument": ("lazy/trace/op_schema.py",),  # the type of a schema's results
    # The current device and stream, at each run: their public names make an object each time.
    "torch._C._cuda_getDevice": ("runtime/executor.py",),
    "torch._C._cuda_getCurrentRawStream": ("runtime/program/code.py", "runtime/toolchains/toolchain_triton.py"),
    # Descriptors of tensors, taken once, so that a class of the user's that overrides them is not asked.
    "torch.Tensor._base.__get__": ("lazy/compiled/capture/reads.py",),
    "torch.Tensor._is_view": ("lazy/compiled/capture/reads.py",),
    "torch.Tensor._version.__get__": ("lazy/compiled/capture/reads.py",),
    # What pickles name: they are read back without this package, by the functions that torch's own pickles name.
    "torch._tensor._rebuild_from_type_v2": ("lazy/record/subclasses.py",),
    "torch._utils._rebuild_device_tensor_from_cpu_tensor": (
        "lazy/record/tensor.py", "lazy/native/device.py",
    ),
    "torch._utils._rebuild_parameter": ("lazy/record/tensor.py",),
    # Who holds a batch of tangents, and in which dimension.
    "torch._C": ("lazy/joint/function.py",),
    "torch._C._dispatch_key_parse": ("lazy/joint/function.py",),
    "torch._C._functorch": ("lazy/joint/function.py",),
    "torch._C._functorch.is_functorch_wrapped_tensor": ("lazy/device/mode.py",),
    "torch._add_batch_dim": ("lazy/joint/function.py",),
    "torch._remove_batch_dim": ("lazy/joint/function.py",),
    # Classes and functions of torch's own Python that are recognised, or wrapped, where a program meets them.
    # the base of torch.futures.Future
    "torch._C.Future": ("lazy/compiled/capture/threads.py", "lazy/ops/collectives.py"),
    "torch.utils.checkpoint._CheckpointFrame": ("lazy/device/checkpointing.py",),
    "torch.autograd.Variable._execution_engine": ("lazy/distributed/ddp.py",),
    "torch.nn.Module._apply": ("lazy/device/modules.py",),
    "torch._VF._pad_packed_sequence": ("lazy/ops/host_lengths.py",),
    "torch._foreach_mul": ("lazy/device/modules.py",),  # as torch.optim itself calls it
    "torch._tensor_str.PRINT_OPTS.linewidth": ("lazy/record/tensor.py",),  # torch.set_printoptions has no getter
    "torch.utils._pytree.tree_flatten": ("lazy/inspect/flops/trace.py",),
    "torch.utils._pytree.tree_unflatten": ("lazy/inspect/flops/trace.py",),
}  # fmt: skip


def dotted(node: ast.AST) -> str:
    """`torch.a.b` as text; empty for anything that is not a chain of names."""
    if isinstance(node, ast.Name):
        return node.id
    inner = dotted(node.value) if isinstance(node, ast.Attribute) else ""
    return f"{inner}.{node.attr}" if inner else ""


def is_private(name: str) -> bool:
    """Whether a part of a name of torch's is; operators by name (`torch.ops.aten._to_copy`) are public."""
    first, *parts = name.split(".")
    private = any(part.startswith("_") and not part.startswith("__") for part in parts)
    return first == "torch" and parts[:1] != ["ops"] and private


def private_names(source: str) -> Iterator[str]:
    """Torch's private names in a file, each as long as it is written."""
    tree = ast.parse(source)
    inner = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Attribute) and id(node) not in inner:
            names = [dotted(node)]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        yield from filter(is_private, names)


def test_private_names_stand_where_they_are_collected_or_in_the_table() -> None:
    found: dict[str, set[str]] = {}
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            file = path.relative_to(ROOT).as_posix()
            for name in private_names(path.read_text()):
                if file not in COLLECTED and name not in EVERYWHERE:
                    found.setdefault(name, set()).add(file)
    new = {f"{name} in {file}" for name, files in found.items() for file in files - set(ALLOWED.get(name, ()))}
    assert not new, f"put these into lazy/torch_private/ with the reason, or into the table: {sorted(new)}"
    gone = {f"{name} in {file}" for name, files in ALLOWED.items() for file in set(files) - found.get(name, set())}
    assert not gone, f"these rows are needed no more: {sorted(gone)}"


def test_collected_uses_say_why() -> None:
    """Each public function there has a docstring, and each file says why it touches what is private."""
    for file in COLLECTED:
        tree = ast.parse((ROOT / file).read_text())
        public = [n for n in tree.body if isinstance(n, ast.FunctionDef) and not n.name.startswith("_")]
        assert public and all(ast.get_docstring(node) for node in public), file
        assert "Why private" in (ROOT / file).read_text(), file


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import torch\ntorch._C._fresh(1)", ["torch._C._fresh"]),
        ("from torch._fresh import thing", ["torch._fresh.thing"]),
        ("from torch.utils import _pytree", ["torch.utils._pytree"]),
        ("import torch._fresh", ["torch._fresh"]),
        ("import torch\ntorch.ops.aten._to_copy.default(torch.Tensor.__dict__)", []),
        ("import torch\nself._C = torch.nn.Module", []),
    ],
)
def test_the_search_finds_what_is_private(source: str, expected: list[str]) -> None:
    assert list(private_names(source)) == expected
