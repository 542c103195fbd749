"""`python -m torchlazy.prims.page`: the set of primitives as a page.

Invariant: the page says what the table says, and nothing else: name, operands and attributes, meaning, shapes, source.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields

from torchlazy.prims.ops import PRIMS, Kind, Prim

_HEAD = """# Primitives

The closed set that every ATen operator becomes: {count} primitives, of which generated code computes {loops}; each of
the other {calls} is one call of an ATen operator, with its operands in the layout of their metadata. What is outside
of the set is `extern(operator)`: any other ATen call, its arguments as in the operator's schema.

None broadcasts, none promotes: operands of an elementwise primitive have one shape and one dtype, `expand` and
`convert` make them so, and `prims.verify` says where a graph does not keep to that. Reductions drop their axes.
Attributes are keywords, checked by a frozen dataclass (`prims/attrs.py`, `prims/library/attrs.py`). Metadata rules
compute on symbolic sizes as on numbers. Calling a primitive runs its eager reference.
"""

_TITLES: dict[Kind, str] = {
    Kind.POINTWISE: "Elementwise",
    Kind.CREATION: "Creation",
    Kind.RANDOM: "Random numbers",
    Kind.VIEW: "Views, and elements put together",
    Kind.REDUCTION: "Reductions",
    Kind.SCAN: "Scans",
    Kind.SORT: "Order",
    Kind.INDEXING: "Reading and writing at positions",
    Kind.CONTRACTION: "Products",
    Kind.WINDOW: "Windows",
    Kind.LINALG: "Transforms and linear algebra",
    Kind.COLLECTIVE: "Collectives",
}


def kind_of(prim: Prim) -> Kind:
    """The kind under whose title a primitive stands."""
    own = [kind for kind in _TITLES if prim.is_kind(kind)]
    return own[1] if own[0] is Kind.RANDOM and len(own) > 1 else own[0]


def _row(prim: Prim) -> str:
    what, _, rest = prim.doc.partition("\n\n")
    shapes, _, source = rest.replace("\n\n", " ").replace("\n", " ").partition("Source: ")
    shapes = shapes.replace("Broadcasting: none. Promotion: none.", "").strip()
    attributes = ", ".join(field.name for field in fields(prim.attrs))
    cells = (f"`{prim.name}`", attributes, what.replace("\n", " "), shapes, source.rstrip("."))
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"


def _section(title: str, about: str, prims: list[Prim]) -> Iterator[str]:
    yield f"\n### {title}\n\n{about}| name | attributes | meaning | shapes and dtypes | source |\n"
    yield "| --- | --- | --- | --- | --- |\n"
    yield from map(_row, prims)


def page() -> str:
    """The page: a section for each kind, a row for each primitive."""
    loops = [prim for prim in PRIMS.values() if prim.overload is None]
    calls = [prim for prim in PRIMS.values() if prim.overload is not None]
    parts = [_HEAD.format(count=len(PRIMS), loops=len(loops), calls=len(calls))]
    for title, prims in (("Computed by generated code", loops), ("One ATen call each", calls)):
        parts.append(f"\n## {title}\n")
        for kind, name in _TITLES.items():
            chosen = [prim for prim in prims if kind_of(prim) is kind]
            if chosen:
                parts.extend(_section(name, "", chosen))
    return "".join(parts)


if __name__ == "__main__":
    print(page(), end="")
