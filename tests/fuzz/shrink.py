"""Makes a failing program small: statements, branches, calls and arguments go while it still fails the same way.

Invariant: every candidate is a program that parses; what is kept fails in the same way with a difference of one kind.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Callable, Iterator
from dataclasses import replace

from tests.fuzz.program import Program

_BODIES = ("body", "orelse", "finalbody")


def _lists(tree: ast.AST) -> Iterator[list[ast.stmt]]:
    """Every list of statements, the outermost first."""
    for node in ast.walk(tree):
        for field in _BODIES:
            found = getattr(node, field, None)
            if isinstance(found, list) and found:
                yield found


def _without(source: str) -> Iterator[str]:
    """The source less one statement, with a compound one replaced by what it holds, or with less of a result; the last
    ones first."""
    count = sum(len(found) for found in _lists(ast.parse(source)))
    for number in reversed(range(1, count)):  # 0 is the function
        for unwrap in (False, True):
            text = _edited(ast.parse(source), number, unwrap)
            if text is not None and text != source:
                yield text
    yield from _with_less_results(source)


def _with_less_results(source: str) -> Iterator[str]:
    results = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Return)]
    for number, result in enumerate(results):
        value = result.value
        for place in range(len(getattr(value, "elts", getattr(value, "values", ())))):
            tree = ast.parse(source)
            less = [node for node in ast.walk(tree) if isinstance(node, ast.Return)][number].value
            for field in ("elts", "keys", "values"):
                if isinstance(getattr(less, field, None), list):
                    del getattr(less, field)[place]
            yield ast.unparse(tree) + "\n"


def _edited(tree: ast.Module, number: int, unwrap: bool) -> str | None:
    for found in _lists(tree):
        if number >= len(found):
            number -= len(found)
            continue
        statement = found[number]
        if unwrap:
            inner = getattr(statement, "body", None)
            if not isinstance(inner, list) or isinstance(statement, (ast.FunctionDef, ast.ClassDef)):
                return None
            found[number : number + 1] = copy.deepcopy(inner)
        elif isinstance(statement, ast.Pass):
            return None
        else:
            found[number : number + 1] = [] if len(found) > 1 else [ast.Pass()]
        try:
            text = ast.unparse(ast.fix_missing_locations(tree)) + "\n"
            compile(text, "<smaller>", "exec")
        except (SyntaxError, ValueError):
            return None
        return text
    return None


def _smaller(program: Program) -> Iterator[Program]:
    """Programs that are a little smaller."""
    calls = program.calls
    for number in reversed(range(len(calls))):
        if len(calls) > 1:
            yield replace(program, calls=calls[:number] + calls[number + 1 :])
        for field in ("before", "after"):
            if getattr(calls[number], field):
                less = calls[number]._replace(**{field: ""})
                yield replace(program, calls=(*calls[:number], less, *calls[number + 1 :]))
    for source in _without(program.source):
        yield replace(program, source=source)
    for number, item in enumerate(program.inputs):
        for less in (item._replace(leaf=False), item._replace(memory="")):
            if less != item:
                yield replace(program, inputs=(*program.inputs[:number], less, *program.inputs[number + 1 :]))
    for number in range(1, len(calls)):
        alike = calls[number]._replace(n=calls[0].n, m=calls[0].m, numbers=calls[0].numbers)
        if alike != calls[number]:
            yield replace(program, calls=(*calls[:number], alike, *calls[number + 1 :]))


def shrink(program: Program, fails: Callable[[Program], bool], most: int = 600) -> Program:
    """The program as small as it still fails, after at most so many candidates."""
    place = without = 0  # candidates since the last one that fails are not tried again before the others
    for _ in range(most):
        candidates = list(_smaller(program))
        if without >= len(candidates):
            break
        place %= len(candidates)
        if fails(candidates[place]):
            program, without = candidates[place], 0
        else:
            place, without = place + 1, without + 1
    return program
