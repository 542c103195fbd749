"""Index expressions as text: SymPy integers printed as C++, Python (Numba) or Triton source.

Invariant: the text depends on the expression's value only (terms are sorted by their own text), and every composite
operand stands in parentheses, so the three languages read the same tree. `FloorDiv` and `Mod` of the index module
guarantee operands that are not negative, so plain division serves; SymPy's own `floor` and `Mod` do not, and
where an operand may be negative C-like languages call the helpers named in their `ExprSyntax`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import sympy
from torchlazy.inductor.index import FloorDiv, Mod


@dataclass(frozen=True)
class ExprSyntax:
    """How one language writes what differs: {a} and {b} are operands that are already safe to embed."""

    floor_div: str  # any signs
    mod: str  # any signs, sign of the divisor
    floor_div_nonnegative: str  # both operands known to be >= 0
    mod_nonnegative: str
    minimum: str
    maximum: str
    integer: Callable[[int], str]


def _cpp_integer(value: int) -> str:
    """C++ literals are int (32 bit) unless they say otherwise; products of two literals never appear."""
    return str(value) if abs(value) < 2**31 else f"INT64_C({value})"


CPP = ExprSyntax(
    floor_div="tl::floor_div(int64_t({a}), int64_t({b}))",
    mod="tl::remainder(int64_t({a}), int64_t({b}))",
    floor_div_nonnegative="{a} / {b}",
    mod_nonnegative="{a} % {b}",
    minimum="tl::min_index({a}, {b})",
    maximum="tl::max_index({a}, {b})",
    integer=_cpp_integer,
)
PYTHON = ExprSyntax(
    floor_div="{a} // {b}",
    mod="{a} % {b}",
    floor_div_nonnegative="{a} // {b}",
    mod_nonnegative="{a} % {b}",
    minimum="min({a}, {b})",
    maximum="max({a}, {b})",
    integer=str,
)
# Triton's // and % truncate; b > 0 in every index that lowering builds, which the expanded forms rely on.
TRITON = ExprSyntax(
    floor_div="tl.where({a} >= 0, {a} // {b}, -((-{a} + {b} - 1) // {b}))",
    mod="(({a} % {b}) + {b}) % {b}",
    floor_div_nonnegative="{a} // {b}",
    mod_nonnegative="{a} % {b}",
    minimum="tl.minimum({a}, {b})",
    maximum="tl.maximum({a}, {b})",
    integer=str,
)


def print_expr(
    expr: sympy.Expr | int, dialect: ExprSyntax = CPP, names: Mapping[sympy.Symbol, str] | None = None
) -> str:
    """`expr` as source text; `names` replaces symbols by other text (for instance `(x0 + k)`)."""
    return _Printer(dialect, names or {}).text(sympy.sympify(expr))


class _Printer:
    """One walk over an expression; `text` returns the bare form, `atom` a form safe as any operand."""

    def __init__(self, dialect: ExprSyntax, names: Mapping[sympy.Symbol, str]) -> None:
        self.dialect = dialect
        self.names = names

    def atom(self, expr: sympy.Expr) -> str:
        text = self.text(expr)
        simple = text.replace("_", "").isalnum() or text.startswith("INT64_C") or _is_enclosed(text)
        return text if simple else f"({text})"

    def text(self, expr: sympy.Expr) -> str:
        if expr.is_Integer:
            return self.dialect.integer(int(expr))
        if expr.is_Symbol:
            return self.names.get(expr, expr.name)
        if expr.is_Add:
            return self._sum(expr)
        if expr.is_Mul:
            return self._product(expr)
        if expr.is_Pow and expr.exp.is_Integer and int(expr.exp) > 0:
            return " * ".join([self.atom(expr.base)] * int(expr.exp))
        rule = _FUNCTIONS.get(expr.func.__name__)
        if rule is None:
            raise TypeError(
                f"index expression: no text for {expr.func.__name__} in {expr}; add a rule to codegen/expr.py"
            )
        return rule(self, expr)

    def _sum(self, expr: sympy.Expr) -> str:
        positive: list[str] = []
        negative: list[str] = []
        constant = 0
        for term in expr.args:
            if term.is_Integer:
                constant += int(term)
                continue
            coefficient, rest = term.as_coeff_Mul()
            if coefficient.is_negative:
                negative.append(self.text(-coefficient * rest))
            else:
                positive.append(self.text(term))
        if constant > 0 or (constant and not positive):
            positive.append(self.dialect.integer(constant) if constant > 0 else f"({constant})")
        elif constant < 0:
            negative.append(self.dialect.integer(-constant))
        first = " + ".join(sorted(positive, key=_constants_last)) or "0"
        return first + "".join(f" - {text}" for text in sorted(negative, key=_constants_last))

    def _product(self, expr: sympy.Expr) -> str:
        if any(arg.is_Rational and not arg.is_Integer for arg in expr.args):
            raise TypeError(f"index expression: {expr} is not integral; lowering must write FloorDiv")
        factors = sorted(self.atom(arg) for arg in expr.args if not arg.is_Integer)
        literals = [self.dialect.integer(int(arg)) for arg in expr.args if arg.is_Integer]
        return " * ".join(factors + [f"({t})" if t.startswith("-") else t for t in literals])

    def divide(self, expr: sympy.Expr, a: sympy.Expr, b: sympy.Expr, any_sign: str, nonnegative: str) -> str:
        safe = isinstance(expr, (FloorDiv, Mod)) or (bool(a.is_nonnegative) and bool(b.is_nonnegative))
        return (nonnegative if safe else any_sign).format(a=self.atom(a), b=self.atom(b))

    def floor_div(self, expr: sympy.Expr) -> str:
        a, b = expr.args if isinstance(expr, FloorDiv) else expr.args[0].as_numer_denom()
        return self.divide(expr, a, b, self.dialect.floor_div, self.dialect.floor_div_nonnegative)

    def mod(self, expr: sympy.Expr) -> str:
        a, b = expr.args
        return self.divide(expr, a, b, self.dialect.mod, self.dialect.mod_nonnegative)

    def fold(self, template: str, expr: sympy.Expr) -> str:
        atoms = sorted(self.atom(arg) for arg in expr.args)
        text = atoms[0]
        for other in atoms[1:]:
            text = template.format(a=text, b=other)
        return text


def _is_enclosed(text: str) -> bool:
    """Whether one pair of parentheses holds all of `text`: "(a) * (b)" does not count."""
    depth = 0
    for position, char in enumerate(text):
        depth += (char == "(") - (char == ")")
        if depth == 0:
            return position > 0 and position == len(text) - 1
    return False


def _constants_last(text: str) -> tuple[bool, str]:
    return text.lstrip("(-").rstrip(")").isdigit(), text


# Keyed by class name: sympy.Mod and the index module's own functions print alike.
_FUNCTIONS: dict[str, Callable[[_Printer, sympy.Expr], str]] = {
    "FloorDiv": _Printer.floor_div,
    "floor": _Printer.floor_div,
    "Mod": _Printer.mod,
    "Min": lambda printer, expr: printer.fold(printer.dialect.minimum, expr),
    "Max": lambda printer, expr: printer.fold(printer.dialect.maximum, expr),
}
