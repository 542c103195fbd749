"""Two forms of one call: as ATen's schema has it, and as a primitive has it (tensors separate from attributes).

Operands are the tensors of the schema in order. Optional tensors that are not given are named in the attribute
`absent`; the tensors of a list take as many operands as the other arguments leave, and the attribute `places` says
where in the list they stand. Everything else is an attribute under the schema's name.

Invariant: `aten_form(overload, *prim_form(overload, args, kwargs))` is the same call, with defaults filled in.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torchlazy.prims.errors import MetaError


def bind(
    overload: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[list[Any], dict[str, Any]]:
    """Every argument of the schema, defaults filled in, lists as tuples: (positional, keyword-only)."""
    positional: list[Any] = []
    keywords: dict[str, Any] = {}
    for i, argument in enumerate(overload._schema.arguments):
        if i < len(args):
            value = args[i]
        elif argument.name in kwargs:
            value = kwargs[argument.name]
        elif argument.has_default_value():
            value = argument.default_value
        else:
            raise MetaError(f"{overload}: argument {argument.name} is missing")
        value = tuple(value) if isinstance(value, (list, tuple)) else value
        if argument.kwarg_only:
            keywords[argument.name] = value
        else:
            positional.append(value)
    return positional, keywords


def _kind(argument: torch.Argument) -> str:
    """ "tensor", "optional", "list" (of tensors) or "attribute"."""
    text = str(argument.type)
    if "Tensor" not in text:
        return "attribute"
    if "List" in text or "[]" in text:
        return "list"
    return "optional" if "Optional" in text or text.endswith("?") else "tensor"


def attribute_names(overload: torch._ops.OpOverload) -> tuple[str, ...]:
    """The names of the attributes that a primitive over this operator has."""
    kinds = [(_kind(argument), argument.name) for argument in overload._schema.arguments]
    names = [name for kind, name in kinds if kind == "attribute"]
    names += ["absent"] if any(kind == "optional" for kind, _ in kinds) else []
    names += ["places"] if any(kind == "list" for kind, _ in kinds) else []
    return tuple(names)


def prim_form(
    overload: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[list[Any], dict[str, Any]]:
    """(operands, attributes) of a call in schema form."""
    positional, keywords = bind(overload, args, kwargs)
    values = iter(positional)
    operands: list[Any] = []
    attrs: dict[str, Any] = {}
    for argument in overload._schema.arguments:
        value = keywords[argument.name] if argument.kwarg_only else next(values)
        match _kind(argument):
            case "attribute":
                attrs[argument.name] = value
            case "tensor":
                operands.append(value)
            case "optional":
                attrs.setdefault("absent", ())
                if value is None:
                    attrs["absent"] += (argument.name,)
                else:
                    operands.append(value)
            case "list":
                attrs["places"] = tuple(place for place, item in enumerate(value) if item is not None)
                operands += [item for item in value if item is not None]
    return operands, attrs


def aten_form(
    overload: torch._ops.OpOverload, operands: Sequence[Any], attrs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """(args, kwargs) in schema form of operands and attributes."""
    places: tuple[int, ...] = attrs.get("places", ())
    absent: tuple[str, ...] = attrs.get("absent", ())
    left = iter(operands)
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    for argument in overload._schema.arguments:
        kind = _kind(argument)
        value: Any
        if kind == "attribute":
            value = attrs[argument.name]
        elif kind == "list":
            items: list[Any] = [None] * (places[-1] + 1 if places else 0)
            for place in places:
                items[place] = next(left)
            value = tuple(items)
        else:
            value = None if argument.name in absent else next(left)
        if argument.kwarg_only:
            kwargs[argument.name] = value
        else:
            args.append(value)
    return tuple(args), kwargs
