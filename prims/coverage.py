"""`python -m torchlazy.prims.coverage`: what becomes of every ATen overload of this torch; `--page` as a page.

Invariant: every overload has exactly one way, and every way but "no rule" says why.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import torch
from torchlazy.prims import ops
from torchlazy.prims.builder import EXTERN_REASONS
from torchlazy.prims.decompose import RULES

_SHAPES = Path(__file__).parent.parent / "lazy" / "shapes"


class OverloadOutcome(Enum):
    """What becomes of a call; the value is what the page says of it."""

    COMPOSED = "torch decomposes it into others before it is recorded"
    WRITES = "an in-place or `out=` form: its functional form, and a write"
    DECOMPOSED = "decomposed into primitives by a rule"
    BY_CHOICE = "one library call, by choice"
    AT_ONCE = "run at once on real memory, as its results cannot be described beforehand"
    OTHER_KIND = (
        "for tensors that are never recorded (sparse, quantised, nested), other back ends, or no tensors at all"
    )
    NO_RULE = "one library call, for lack of a rule"
    UNSUPPORTED = "unsupported"


@dataclass(frozen=True)
class CoverageEntry:
    """One overload: its name without `aten.`, its way, and the reason or the family of rules."""

    name: str
    way: OverloadOutcome
    reason: str = ""


# Names of families whose operands are never lazy, or that only other devices and torch's own passes call.
_OTHER_KINDS: tuple[tuple[str, str], ...] = (
    (r"_?sparse|_?to_sparse|_spsolve|_spdiags|hspmm|copy_sparse|.*as_sparse|_?(indices|values)(_copy)?$|"
     r"_?coalesced?$|(crow|ccol|col|row)_indices|_convert_indices|_?to_dense|_cslt|_validate_sparse|_nnz|.*_sparse_",
     "sparse tensors"),
    (r"_nested|_jagged|_padded_dense|to_padded_tensor|nested_|_to_padded|_is_nested", "nested tensors"),
    (r"quantize|_?fake_quantize|.*_quantized|q_per_channel|q_scale|q_zero|qscheme|int_repr|dequantize|_make_per_|"
     r"_empty_(affine|per)|.*int[48]pack|_dyn_quant|.*moving_avg_obs|fbgemm|_weight_int|_choose_qparams|_quantized",
     "quantised tensors"),
    (r"_?mkldnn|to_mkldnn|_?miopen|_?cudnn|_?mps|.*_mps|_mkl|_nnpack|_conv_depthwise|conv_depthwise|_thnn_fused|"
     r"_efficient_attention|_flash_attention|_triton|_scaled_grouped_mm|_mixed_dtypes|_scaled_mm|.*cudnn_attention|"
     r".*(flash|efficient)_attention(_backward)?$|.*overrideable|_fbgemm|_grid_sampler_2d_cpu_fallback|_use_cudnn",
     "kernels of one library or device, which torch chooses by itself where they apply"),
    (r"_foobar|_test|_fw_primal|_make_dual|_lazy_clone|_functional_(assert|sym)|_make_dep|_new_zeros_with|_assert_|"
     r"sym_|_version|_backward$|is_|_copy_from|_resize_output|_print|_debug|_async_error|from_file|_pin_memory|"
     r"_propagate|_cast_|_dim_arange|_local_scalar|item$|_use_|can_cast|result_type|promote_types",
     "torch's own passes, forward-mode derivatives, and calls on the host"),
)  # fmt: skip
_GENERATED = re.compile(r"set\.|resize\.|resize_as\.|_index_put_impl|.*_functional\.|random\.|uniform\.|log_normal\.")


def overloads() -> Iterator[torch._ops.OpOverload]:
    """All ATen overloads that Python can call in this torch."""
    for schema in sorted(torch._C._jit_get_all_schemas(), key=lambda s: (s.name, s.overload_name)):
        namespace, _, name = schema.name.partition("::")
        if namespace != "aten":
            continue
        qualified = schema.name + (f".{schema.overload_name}" if schema.overload_name else "")
        if not torch._C._dispatch_has_kernel(qualified):
            continue
        yield getattr(getattr(torch.ops.aten, name), schema.overload_name or "default")


def aten_overloads() -> Iterator[torch._ops.OpOverload]:
    """Those that a recorded graph may contain: functional, dispatched by themselves, with a tensor result."""
    recorded = (OverloadOutcome.DECOMPOSED, OverloadOutcome.BY_CHOICE, OverloadOutcome.NO_RULE)
    for overload in overloads():
        if entry(overload).way in recorded:
            yield overload


def entry(overload: torch._ops.OpOverload) -> CoverageEntry:
    """What becomes of a call of this overload."""
    name = str(overload).removeprefix("aten.")
    schema = overload._schema
    if overload in RULES:
        return CoverageEntry(name, OverloadOutcome.DECOMPOSED, RULES[overload].__module__.rpartition(".")[2])
    reason = EXTERN_REASONS.get(overload) or ops.why_library(overload)
    if reason is not None:
        return CoverageEntry(name, OverloadOutcome.BY_CHOICE, reason)
    if torch._C._dispatch_has_kernel_for_dispatch_key(overload.name(), "CompositeImplicitAutograd"):
        return CoverageEntry(name, OverloadOutcome.COMPOSED)
    if not any("Tensor" in str(result.type) for result in schema.returns) and not schema.is_mutable:
        return CoverageEntry(name, OverloadOutcome.OTHER_KIND, "no tensor among the results")
    for pattern, what in _OTHER_KINDS:
        if re.match(pattern, name.split(".")[0]):
            return CoverageEntry(name, OverloadOutcome.OTHER_KIND, what)
    if schema.is_mutable:
        return CoverageEntry(name, OverloadOutcome.WRITES)
    if torch.Tag.dynamic_output_shape in overload.tags or torch.Tag.data_dependent_output in overload.tags:
        return CoverageEntry(name, OverloadOutcome.AT_ONCE, "the shape of the result depends on values")
    if torch.Tag.nondeterministic_seeded in overload.tags:
        why = "a distribution: its common forms are drawn from counter-based bits, the rest by ATen's own sampler"
        return CoverageEntry(name, OverloadOutcome.AT_ONCE, why)
    if _GENERATED.match(name):
        return CoverageEntry(
            name,
            OverloadOutcome.AT_ONCE,
            "the functional form that torch generates of a write which the recorder knows",
        )
    if not torch._C._dispatch_has_computed_kernel_for_dispatch_key(overload.name(), "CPU"):
        return CoverageEntry(
            name,
            OverloadOutcome.OTHER_KIND,
            "no kernel for the CPU in this torch: another device's, or nested tensors'",
        )
    sibling = _sibling_reason(overload)
    return (
        CoverageEntry(name, OverloadOutcome.BY_CHOICE, sibling)
        if sibling
        else CoverageEntry(name, OverloadOutcome.NO_RULE)
    )


def _sibling_reason(overload: torch._ops.OpOverload) -> str | None:
    """The reason of another overload of the same operator: `special_zeta.self_scalar` stays with `special_zeta`."""
    packet = overload.overloadpacket
    others = [getattr(packet, name) for name in packet.overloads()]
    if any(other in RULES for other in others):
        return None
    return next(filter(None, (EXTERN_REASONS.get(o) or ops.why_library(o) for o in others)), None)


def coverage() -> tuple[CoverageEntry, ...]:
    """Every overload, by name."""
    return tuple(entry(overload) for overload in overloads())


_SHAPED_BY = (
    "Meta",
    "CompositeImplicitAutograd",
    "CompositeExplicitAutograd",
    "CompositeExplicitAutogradNonFunctional",
)


def unshaped(entries: tuple[CoverageEntry, ...], shape_rules: str) -> list[str]:
    """The operators with a rule whose results nothing can shape: they run at once, and the rule is never asked.

    torch has no meta kernel for them, and `shape_rules`, the text of our own, does not name them.
    """
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    decomposed = {e.name: e.name.removesuffix(".default") for e in entries if e.way is OverloadOutcome.DECOMPOSED}
    kinds = {str(o).removeprefix("aten."): any(has_kernel(o.name(), key) for key in _SHAPED_BY) for o in overloads()}
    return [
        name
        for name, short in decomposed.items()
        if not kinds[name] and not re.search(rf"aten\.{re.escape(name)}\b|\"{re.escape(short)}\"", shape_rules)
    ]


def summary(entries: tuple[CoverageEntry, ...]) -> list[tuple[str, int]]:
    """The count of each way, in order, and of all."""
    counts = {way: sum(e.way is way for e in entries) for way in OverloadOutcome}
    return [("ATen overloads in this torch", len(entries)), *((way.value, counts[way]) for way in OverloadOutcome)]


_HEAD = """# Operators

What becomes of each ATen overload on the lazy device, with torch {version}; other versions
have some more or fewer. None is unsupported by construction: what is not recorded is
run by ATen's own kernel at once. That it gives eager's results is what the operator database shows (`make opinfo`).

| | overloads |
| --- | --- |
"""
_SECTIONS = (
    (
        OverloadOutcome.NO_RULE, "One library call, for lack of a rule",
        "They run as one call of ATen's kernel inside the program.",
    ),
    (OverloadOutcome.BY_CHOICE, "One library call, by choice", "Each reason stands before its operators."),
    (
        OverloadOutcome.AT_ONCE, "Run at once",
        "The trace is cut, the operator runs on real memory, and recording continues.",
    ),
    (OverloadOutcome.OTHER_KIND, "Not for recorded tensors", "They run as in eager, on what they are given."),
    (OverloadOutcome.DECOMPOSED, "Decomposed", "By the module of `prims/decomps/` that holds the rule."),
)  # fmt: skip


def page(entries: tuple[CoverageEntry, ...]) -> str:
    """The page: the counts, then the operators of each way under their reasons."""
    lines = [_HEAD.format(version=torch.__version__.split("+")[0])]
    lines += [f"| {text} | {count} |\n" for text, count in summary(entries)]
    for way, title, about in _SECTIONS:
        chosen = [e for e in entries if e.way is way]
        lines.append(f"\n## {title}\n\n{about}\n")
        for reason in sorted({e.reason for e in chosen}):
            names = [e.name for e in chosen if e.reason == reason]
            lines.append(f"\n{reason or 'Operators'} ({len(names)}):\n{_wrapped(names)}\n")
        if not chosen:
            lines.append("\nNone.\n")
    return "".join(lines)


def _wrapped(names: list[str]) -> str:
    lines, width = [""], 118
    for name in names:
        text = f"`{name}` "
        if len(lines[-1]) + len(text) > width:
            lines.append("")
        lines[-1] += text
    return "\n".join(line.rstrip() for line in lines)


def main() -> None:
    """Print the counts and what lacks a shape rule; --list names what lacks a rule, --page prints the page."""
    parser = argparse.ArgumentParser(prog="python -m torchlazy.prims.coverage", description="ATen rules of torchlazy")
    parser.add_argument("--list", action="store_true", help="name the overloads without a rule")
    parser.add_argument("--page", action="store_true", help="print the page of operators instead")
    arguments = parser.parse_args()
    found = coverage()
    if arguments.page:
        print(page(found), end="")
        return
    for text, count in summary(found):
        print(f"{count:5}  {text}")
    if arguments.list:
        print("\n".join(e.name for e in found if e.way is OverloadOutcome.NO_RULE))
    if missing := unshaped(found, "".join(path.read_text() for path in sorted(_SHAPES.glob("*.py")))):
        print("These have a rule, but run at once: torch cannot say the shapes of their results. Each needs a shape")
        print(f"rule in lazy/shapes/: {', '.join(missing)}")


if __name__ == "__main__":
    main()
