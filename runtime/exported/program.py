"""Exported graphs as `torch.export`'s ExportedProgram: called as the exported function was, with its state by name.

torch's exporter runs once over a module that takes the function's own arguments, hands their tensors to the FX module
of the graph, and puts the results together again.

Invariant: what was passed by position or by keyword is passed so again, in the same containers, and results come in the
containers that the function gave. Named tuples and records (data classes, a `ModelOutput`), whose classes are the
model's code, are tuples and dicts there.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx
from torchlazy.runtime.errors import RuntimeLayerError
from torchlazy.runtime.exported.fx import OPERATORS, graph_module
from torchlazy.runtime.exported.graph import ExportedGraph, InputSpec, SizeSpec
from torchlazy.runtime.exported.sizes import SizeExpr, evaluate
from torchlazy.runtime.exported.tree import Tree, flatten_plain, unflatten_plain

log = logging.getLogger("torchlazy.runtime")

_PLAIN = {"namedtuple": "tuple", "record": "dict"}


@dataclass(frozen=True)
class _Parameter:
    """An argument that was given: its `inspect` kind, a keyword where it was given by keyword; its structure."""

    name: str
    kind: str
    tree: Tree


class NotConvertible(RuntimeLayerError):
    """torch's exported program has no form for something in this one.

    Cause: random numbers, whose seed is a number drawn anew for each run; a dtype or device among the arguments; a
    program that torch's own exporter cannot take in, which is told in its words.
    Fix: export the model in evaluation mode (`model.eval()`), or use the program through `torchlazy.load`.
    """


def to_exported_program(graph: ExportedGraph, state: Mapping[str, torch.Tensor]) -> torch.export.ExportedProgram:
    """The program as torch's own, by `torch.export.export` with the same symbolic sizes."""
    if graph.seeds:
        raise NotConvertible(
            f"the program draws {len(graph.seeds)} random seeds for each run, which torch's exported program cannot; "
            "export the model in evaluation mode, or run it through torchlazy.load"
        )
    graph = replace(graph, results=_plainer(graph.results))
    parameters = _parameters(graph)
    sizes = {size.name: size.seen[0] for size in graph.sizes}
    examples = iter([_example(given, sizes) for given in graph.inputs])
    args, kwargs = _as_passed(parameters, [unflatten_plain(p.tree, examples) for p in parameters])
    module = _with_signature(parameters, graph_module(graph, state))
    dims = {size.name: _dim(size) for size in graph.sizes}
    with torch.no_grad():
        if not dims:
            fixed = _dynamic(parameters, graph.inputs, lambda size: size)
            return _exported_by_torch(
                lambda: torch.export.export(module, args, kwargs, dynamic_shapes=fixed, strict=False)
            )
        try:
            dynamic = _dynamic(parameters, graph.inputs, lambda size: _dim_of(size, dims))
            return torch.export.export(module, args, kwargs, dynamic_shapes=dynamic, strict=False)
        except Exception as error:
            log.debug("torch.export refuses the program's own sizes: %s", error)
        # Its own analysis allows less than ours (no output of size 1, say): let it find the bounds.
        dynamic = _dynamic(parameters, graph.inputs, lambda size: torch.export.Dim.DYNAMIC)
        return _exported_by_torch(
            lambda: torch.export.export(module, args, kwargs, dynamic_shapes=dynamic, strict=False)
        )


def _exported_by_torch(export: Callable[[], torch.export.ExportedProgram]) -> torch.export.ExportedProgram:
    """What `export` makes; NotConvertible in torch's own words where torch's exporter cannot."""
    try:
        return export()
    except Exception as error:
        text = str(error).strip().splitlines() or [""]
        raise NotConvertible(
            f"torch.export cannot take this program in ({type(error).__name__}: {text[0]}); use the program through "
            'torchlazy.load, or export it in the other dialect ("aten", "prims") or with fixed sizes'
        ) from error


def _parameters(graph: ExportedGraph) -> list[_Parameter]:
    """The arguments in the order of the graph's inputs. What went into a `**kwargs` is a parameter each."""
    found: list[_Parameter] = []
    kinds = dict(graph.parameters)
    for key, tree in zip(graph.arguments.keys, graph.arguments.children, strict=True):
        name, tree = str(key), _plainer(tree)
        _check_constants(tree, name)
        if kinds[name] == "VAR_KEYWORD":
            inner = zip(tree.keys, tree.children, strict=True)
            found += [_Parameter(str(word), "KEYWORD_ONLY", child) for word, child in inner]
        else:
            found.append(_Parameter(name, "KEYWORD_ONLY" if name in graph.keywords else kinds[name], tree))
    return found


def _plainer(tree: Tree) -> Tree:
    """The tree without classes: a named tuple as a tuple, a record as a dict."""
    kind = _PLAIN.get(tree.kind, tree.kind)
    keys = () if tree.kind == "namedtuple" else tree.keys
    return replace(tree, kind=kind, keys=keys, name="", children=tuple(map(_plainer, tree.children)))


def _check_constants(tree: Tree, place: str) -> None:
    if tree.kind == "constant" and isinstance(tree.value, (torch.dtype, torch.device)):
        raise NotConvertible(
            f"argument {place} is a {type(tree.value).__name__}, which torch's exported program cannot take; export a "
            "function that names it itself, or run the program through torchlazy.load"
        )
    for child in tree.children:
        _check_constants(child, place)


def _example(given: InputSpec, sizes: Mapping[str, int]) -> torch.Tensor:
    shape = [evaluate(n, sizes) for n in given.spec.shape]
    strides = [evaluate(n, sizes) for n in given.spec.strides]
    return torch.empty_strided(shape, strides, dtype=given.spec.dtype, device=given.spec.device).zero_()


def _as_passed(parameters: Sequence[_Parameter], values: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments by position and by keyword."""
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    for parameter, value in zip(parameters, values, strict=True):
        if parameter.kind == "VAR_POSITIONAL":
            args += value
        elif parameter.kind == "KEYWORD_ONLY":
            kwargs[parameter.name] = value
        else:
            args.append(value)
    return tuple(args), kwargs


def _dynamic(
    parameters: Sequence[_Parameter], inputs: Sequence[InputSpec], dim_of: Callable[[Any], Any]
) -> dict[str, Any]:
    """What varies, as `torch.export` wants it told: containers like the arguments', a dict for each tensor."""
    specs = iter(inputs)

    def told(tree: Tree) -> Any:
        if tree.kind == "leaf":
            shape = next(specs).spec.shape
            return {axis: dim_of(size) for axis, size in enumerate(shape) if isinstance(size, SizeExpr)} or None
        if tree.kind == "constant":
            return None
        children = [told(child) for child in tree.children]
        if tree.kind == "dict":
            return dict(zip(tree.keys, children, strict=True))
        return children if tree.kind == "list" else tuple(children)

    found = {parameter.name: told(parameter.tree) for parameter in parameters}
    return {parameter.name: found[parameter.name] for parameter in _in_order(parameters)}


def _with_signature(parameters: Sequence[_Parameter], flat: fx.GraphModule) -> torch.nn.Module:
    """A module with the state of `flat` that is called as the exported function is."""
    signature = inspect.Signature(
        [inspect.Parameter(p.name, getattr(inspect.Parameter, p.kind)) for p in _in_order(parameters)]
    )

    def forward(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs).arguments
        return flat(*_tensors_in([bound.get(parameter.name, ()) for parameter in parameters]))

    forward.__signature__ = signature  # type: ignore[attr-defined]
    module = torch.nn.Module()
    # The very tables: what torch's exporter puts in their place for the time of its run, `flat` sees too.
    module._parameters, module._buffers, module._modules = flat._parameters, flat._buffers, flat._modules
    module.__dict__["forward"] = forward
    return module


def _in_order(parameters: Sequence[_Parameter]) -> list[_Parameter]:
    """As a signature lists them: keywords after all others."""
    return sorted(parameters, key=lambda parameter: parameter.kind == "KEYWORD_ONLY")


def _tensors_in(values: list[Any]) -> Iterator[torch.Tensor]:
    for value in values:
        for _, tensor in flatten_plain(value)[0]:
            yield tensor


def _dim(size: SizeSpec) -> Any:
    if size.step == 1:
        return torch.export.Dim(size.name, min=size.low, max=size.high)
    low = -(-(size.low - size.rest) // size.step)
    high = None if size.high is None else (size.high - size.rest) // size.step
    return size.step * torch.export.Dim(f"{size.name}_units", min=low, max=high) + size.rest


def _dim_of(expr: Any, dims: Mapping[str, Any]) -> Any:
    if not isinstance(expr, SizeExpr):
        return expr
    if expr.op == "size":
        return dims[expr.args[0]]
    a, b = (_dim_of(arg, dims) for arg in expr.args)
    return OPERATORS[expr.op](b, a) if isinstance(a, int) and expr.op in ("add", "mul") else OPERATORS[expr.op](a, b)


__all__ = ["NotConvertible", "to_exported_program"]
