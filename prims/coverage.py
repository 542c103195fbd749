"""`python -m torchlazy.prims.coverage`: how many ATen overloads have a decomposition rule, and which have none.

Invariant: only overloads that can stand in an ATen graph count: functional, dispatched by themselves (not composites of
others), with a tensor result, for dense tensors.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torchlazy.prims.decompose import RULES

# Families for other kinds of tensors (sparse, quantised, nested) or bound to one library.
_FOREIGN = (
    "mkldnn", "_mkldnn", "miopen", "_cudnn", "cudnn", "_sparse", "sparse", "_nested", "quantize", "_test",
    "_fake_quantize", "fake_quantize", "fbgemm", "_to_sparse", "mps", "_mps", "_lstm_mps", "_cslt", "_empty_affine",
    "_empty_per", "_foobar",
)  # fmt: skip


@dataclass(frozen=True)
class Coverage:
    """Names of the ATen overloads with a rule and without one."""

    ruled: tuple[str, ...]
    extern: tuple[str, ...]


def aten_overloads() -> Iterator[torch._ops.OpOverload]:
    """The ATen overloads that a recorded graph may contain."""
    for schema in torch._C._jit_get_all_schemas():
        namespace, _, name = schema.name.partition("::")
        if namespace != "aten" or schema.is_mutable or name.startswith(_FOREIGN):
            continue
        if not any("Tensor" in str(result.type) for result in schema.returns):
            continue
        qualified = schema.name + (f".{schema.overload_name}" if schema.overload_name else "")
        if not torch._C._dispatch_has_kernel(qualified):
            continue
        if torch._C._dispatch_has_kernel_for_dispatch_key(qualified, "CompositeImplicitAutograd"):
            continue
        yield getattr(getattr(torch.ops.aten, name), schema.overload_name or "default")


def coverage() -> Coverage:
    """The overloads, sorted by name."""
    ruled: list[str] = []
    extern: list[str] = []
    for overload in aten_overloads():
        (ruled if overload in RULES else extern).append(str(overload).removeprefix("aten."))
    return Coverage(tuple(sorted(ruled)), tuple(sorted(extern)))


def main() -> None:
    """Print the counts, and with --list the overloads without a rule."""
    parser = argparse.ArgumentParser(prog="python -m torchlazy.prims.coverage", description="ATen rules of torchlazy")
    parser.add_argument("--list", action="store_true", help="name the overloads that stay extern calls")
    arguments = parser.parse_args()
    found = coverage()
    total = len(found.ruled) + len(found.extern)
    print(f"aten overloads  {total:5}")
    print(f"with a rule     {len(found.ruled):5}  ({100 * len(found.ruled) / total:.0f}%)")
    print(f"extern          {len(found.extern):5}")
    print(f"rules in all    {len(RULES):5}  (composites and other namespaces included)")
    if arguments.list:
        print("\n".join(found.extern))


if __name__ == "__main__":
    main()
