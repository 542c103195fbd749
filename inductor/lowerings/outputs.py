"""The program's outputs: each a buffer of its own with the strides that its metadata names.

An input that is donated to itself is named itself. A view (without gaps or repetition) of a buffer that nothing else
outputs is a window on it: eager returns the same, and a transposed weight gradient costs nothing. Everything else
that shares memory (a view of an input, a value output twice, a copy that was inlined away) gets a copy.

Invariant: two outputs never share memory, and none shares an input's unless it is that input.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import fx
from torchlazy.inductor.lowerings.context import Context, LoweringError
from torchlazy.inductor.lowerings.value import LoweredValue
from torchlazy.prims.promotion import COMPUTED


def lower_outputs(
    context: Context, results: Sequence[fx.Node], values: Mapping[fx.Node, LoweredValue], donations: Mapping[int, str]
) -> tuple[tuple[str, ...], dict[str, str]]:
    """(output names, donations by output name)."""
    inputs = {node.name for node in values if node.op == "placeholder"}
    whole = {values[node].window.root.name for node in results if _is_whole(values[node])}  # type: ignore[union-attr]
    taken: set[str] = set()  # buffers whose memory is an output already
    names: list[str] = []
    donated: dict[str, str] = {}
    for position, node in enumerate(results):
        target = donations.get(position)
        if target is not None and target not in inputs:
            raise LoweringError(
                f"lower: output {position} is donated to {target!r}, which is no input\n"
                f"  inputs are {', '.join(sorted(inputs))}\n  name a placeholder of the graph"
            )
        value = values[node]
        if node.op == "placeholder" and target == node.name:
            names.append(node.name)
            continue
        if node.meta["val"].dtype not in COMPUTED:
            target = None  # a copy into the input would be a loop on such numbers; a donation is only an offer
        name = _own_buffer(context, value, inputs, whole, taken, target is not None)
        names.append(name)
        if target is not None:
            donated[name] = target
    return tuple(names), donated


def _is_whole(value: LoweredValue) -> bool:
    return value.window is not None and value.window.is_whole and value.is_stored_as_described


def _own_buffer(
    context: Context, value: LoweredValue, inputs: set[str], whole: set[str], taken: set[str], is_donated: bool
) -> str:
    window = value.window
    if window is not None and window.root.name not in inputs | taken:
        root = window.root
        if root.device != value.meta.device:
            if _is_whole(value):
                taken.add(root.name)
                return context.moved(root, value.meta.device).name
        elif _is_whole(value):
            taken.add(root.name)
            return root.name
        elif window.is_permuted_whole and not is_donated and root.name not in whole and value.is_stored_as_described:
            taken.add(root.name)
            return context.emit_view(window)
    stored = context.emit_pointwise(context.loadable(value), value.meta.strides).window
    assert stored is not None
    if stored.root.device != value.meta.device:
        return context.moved(stored.root, value.meta.device).name
    taken.add(stored.root.name)
    return stored.root.name
