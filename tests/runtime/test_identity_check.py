"""Identity checks: each kind of row holds for what is there, and no more once it is something else, however equal.

Invariant: what a change did is undone before the next one, and the check holds again.
"""

from __future__ import annotations

import contextvars
import dataclasses
import gc
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torchlazy
from torch import nn
from torchlazy.lazy.torch_private.dispatch import tensor_readers
from torchlazy.runtime.errors import ToolchainMissing
from torchlazy.runtime.native import identity_check, object_layout
from torchlazy.runtime.native.dict_views import keeps_order, shows_all
from torchlazy.runtime.native.identity_check import IdentityCheck, is_available

from tests.runtime.undone_changes import Steps, seen

needs_compiler = pytest.mark.skipif(not is_available(), reason="no C++ compiler here")


@needs_compiler
@pytest.mark.parametrize("kind", [dict, defaultdict])
def test_dicts(kind: type) -> None:
    table = kind()
    first, second = [1], (2.5,)
    table.update(a=first, b=second, c=None)
    check = IdentityCheck()
    check.size(table, 3)
    check.entries(table, {"b": second})
    check.values(table, list(table.values()))
    check.keys(table, list(table))

    def rename() -> None:
        table["d"] = table.pop("c")

    def name_back() -> None:
        table["c"] = table.pop("d")

    def swap() -> None:
        table["a"], table["b"] = table["b"], table["a"]

    seen(
        check,
        [
            (lambda: table.update(a=[1]), lambda: table.update(a=first)),  # equal, and another one
            (lambda: table.update(b=(float("2.5"),)), lambda: table.update(b=second)),
            (lambda: table.update(d=None), lambda: table.pop("d")),
            (rename, name_back),
            (swap, swap),
        ],
    )
    first.append(2)  # what a value holds is not looked at
    assert check.holds()
    table.clear()
    assert not check.holds()


@needs_compiler
def test_each_row_by_itself() -> None:
    """Of two dicts and a list only one changes; rows of the others before and after it do not hide it."""
    tables: list[dict[str, Any]] = [{"a": object()}, {"a": object()}, {}]
    items: list[Any] = [tables[0], "x"]
    check = IdentityCheck()
    check.entries(tables[0], tables[0])
    check.keys(tables[1], list(tables[1]))
    check.size(tables[2], 0)
    check.items(items, items)
    old = tables[1].copy()
    seen(
        check,
        [
            (lambda: tables[1].update(b=1), lambda: tables[1].pop("b")),
            (lambda: tables[2].update(b=1), lambda: tables[2].clear()),
            (lambda: items.append(1), lambda: items.pop()),
            (lambda: items.__setitem__(0, dict(tables[0])), lambda: items.__setitem__(0, tables[0])),
        ],
    )
    tables[1].update({"a": object()})
    assert check.holds()  # only its keys were entered
    tables[0]["a"] = old["a"]
    assert not check.holds()
    del tables[0]["a"]
    assert not check.holds()


@needs_compiler
@pytest.mark.parametrize("gaps", [False, True])
def test_entries_by_their_keys(gaps: bool) -> None:
    """In a dict from which something was deleted entries do not stand where their number says."""
    values = [object() for _ in range(6)]
    table: dict[Any, Any] = {"x": 0, **{f"key {i}": value for i, value in enumerate(values)}, 7: "y"}
    if gaps:
        del table["x"]
    check = IdentityCheck()
    check.entries(table, {"key 1": values[1], "key 4": values[4], 7: "y"})

    def swap() -> None:
        table["key 1"], table["key 4"] = table["key 4"], table["key 1"]

    seen(
        check,
        [
            (lambda: table.update({"key 1": 1}), lambda: table.update({"key 1": values[1]})),
            (lambda: table.update({7: "z"}), lambda: table.update({7: "y"})),
            (swap, swap),
        ],
    )
    table["another"] = 1
    table["key 0"] = None
    assert check.holds()
    del table[7]
    assert not check.holds()


@needs_compiler
def test_empty_check_and_empty_containers() -> None:
    assert IdentityCheck().holds()
    check, items, table = IdentityCheck(), list[int](), dict[str, int]()
    check.items(items, items)
    check.values(table, [])
    seen(check, [(lambda: items.append(1), items.clear), (lambda: table.update(a=1), table.clear)])


@needs_compiler
def test_attributes_of_tensors() -> None:
    weight, constant = nn.Parameter(torch.ones(3)), torch.zeros(2)
    check = IdentityCheck()
    check.attribute(weight, "grad", None)
    check.attribute(weight, "requires_grad", True)
    check.attribute(constant, "requires_grad", False)
    seen(
        check,
        [
            (lambda: weight.sum().backward(), lambda: setattr(weight, "grad", None)),
            (lambda: weight.requires_grad_(False), lambda: weight.requires_grad_()),
            (lambda: constant.requires_grad_(), lambda: constant.requires_grad_(False)),
        ],
    )


@needs_compiler
def test_an_attribute_that_is_gone_does_not_hold() -> None:
    class Thing:
        name = "here"

    check = IdentityCheck()
    check.attribute(Thing(), "name", Thing.name)
    assert check.holds()
    del Thing.name
    assert not check.holds()


class Kept:
    """An object with a dict, a class with bases."""

    def __init__(self) -> None:
        self.rate = 1.0


@needs_compiler
@pytest.mark.parametrize("layout", ["found", "unknown"])
def test_parts_of_python_objects(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Functions, cells, classes, dicts of objects, sets: by words in memory, and where their places are unknown."""
    if layout == "unknown":
        unknown = object_layout.ObjectLayout(None, None, None, None, None, None, None, lambda value, own: 0)
        monkeypatch.setattr(identity_check, "layout", lambda: unknown)
    held = [1.0]

    def function(first: Any = (1,), *, second: Any = None) -> Any:
        return held, first, second

    def other(first: Any = (1,), *, second: Any = None) -> Any:
        return second, first, held

    class First:
        pass

    class Second:
        pass

    kind: Any = type("Kind", (First,), {})
    thing, cell, value = Kept(), function.__closure__[0], held  # type: ignore[index]
    own, code, defaults, items = thing.__dict__, function.__code__, function.__defaults__, {1, 2, 3}

    def watching() -> IdentityCheck:
        made = IdentityCheck()
        made.function(function)
        made.cell(cell, value)
        made.bases(kind)
        made.dict_of(thing, own)
        made.size(own, 1)
        if made.reads_sets:
            made.members(items, list(items))
        assert made.classes([thing])
        return made

    check = watching()
    assert check.set_size(items) is (layout == "found")

    def parts(name: str, then: Any, now: Any) -> Steps:
        return lambda: setattr(function, name, now), lambda: setattr(function, name, then)

    def exchange() -> None:
        items.remove(1)
        items.add(9)

    def exchange_back() -> None:
        items.remove(9)
        items.add(1)

    assert check.holds()
    kind.__bases__ = (Second,)
    assert not check.holds()  # and what is put back makes another tuple of bases
    kind.__bases__ = (First,)
    check = watching()
    steps: list[Steps] = [
        parts("__code__", code, other.__code__),
        parts("__defaults__", defaults, ([1],)),
        parts("__defaults__", defaults, None),
        (lambda: setattr(cell, "cell_contents", [1.0]), lambda: setattr(cell, "cell_contents", value)),
        (lambda: delattr(cell, "cell_contents"), lambda: setattr(cell, "cell_contents", value)),
        (lambda: setattr(thing, "__dict__", dict(own)), lambda: setattr(thing, "__dict__", own)),
        (lambda: setattr(thing, "late", 1), lambda: delattr(thing, "late")),
        (lambda: setattr(thing, "__class__", First), lambda: setattr(thing, "__class__", Kept)),
    ]
    if check.reads_sets:
        steps += [(exchange, exchange_back), (lambda: items.add(4), lambda: items.remove(4))]
    seen(check, steps)
    function.__kwdefaults__ = {"second": 1.0}
    assert not check.holds()


@needs_compiler
@pytest.mark.parametrize("way", ["watched", "versions", "looked at"])
def test_a_dict_whose_other_entries_change_holds(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A dict that something is stored in is looked at again, as often as that happens; a change of what was entered is
    noticed among any number of others, and still is at each later look."""
    if way != "watched":  # as where all watchers of the interpreter are taken
        monkeypatch.setattr(identity_check, "watcher", lambda: None)
    if way == "looked at":
        without = dataclasses.replace(object_layout.layout(), dict_version=None)
        monkeypatch.setattr(identity_check, "layout", lambda: without)
    thing = Kept()
    table = thing.__dict__
    value = table["rate"]
    check = IdentityCheck()
    check.entries(table, {"rate": value})
    check.absent(table, ["missing"])
    for number in range(200):
        thing.late = number  # type: ignore[attr-defined]
        assert check.holds()
        thing.rate = float(number)
        for _ in range(2):
            assert not check.holds(), number
        thing.rate = value
        assert check.holds()
    table["missing"] = 1
    assert not check.holds() and not check.holds()
    del table["missing"]
    assert check.holds()


@needs_compiler
@pytest.mark.skipif(tensor_readers() is None, reason="this torch does not let native code read tensors")
def test_geometry_of_tensors() -> None:
    weight = nn.Parameter(torch.arange(12.0).view(4, 3), requires_grad=False)
    scalar, empty = torch.tensor(3.0), torch.empty(0, 4)
    check = IdentityCheck(tensor_readers())
    for tensor in (scalar, weight, empty):
        check.geometry(tensor)
    assert check.reads_tensors and not IdentityCheck().reads_tensors
    memory, other = weight.data, nn.Parameter(torch.zeros(4, 3))

    def back() -> None:
        weight.data = memory

    seen(
        check,
        [
            (lambda: setattr(weight, "data", memory.view(3, 4)), back),
            (lambda: setattr(weight, "data", memory.view(3, 4).t()), back),  # the same sizes, address and dtype
            (lambda: setattr(weight, "data", memory.view(torch.int32)), back),
            (lambda: setattr(weight, "data", memory.clone()), back),
            (lambda: setattr(weight, "data", memory[1:]), back),
            (lambda: setattr(weight, "data", memory[None]), back),
            (lambda: weight.t_(), lambda: weight.t_()),
            (lambda: torch.utils.swap_tensors(weight, other), lambda: torch.utils.swap_tensors(weight, other)),
            (lambda: scalar.resize_(1), lambda: scalar.resize_(())),
            (lambda: empty.resize_(0, 5), lambda: empty.resize_(0, 4)),
        ],
    )
    weight.add_(1)  # other values, and another version
    assert check.holds()


@needs_compiler
@pytest.mark.skipif(tensor_readers() is None, reason="this torch does not let native code read tensors")
@pytest.mark.parametrize("device", ["cpu", "lazy"])
def test_gradients_of_tensors(device: str) -> None:
    weight, frozen = (nn.Parameter(torch.ones(3).to(device), requires_grad=flag) for flag in (True, False))
    frozen.requires_grad_().requires_grad_(False)  # autograd keeps something of it from now on
    held = nn.Parameter(torch.ones(3).to(device))
    held.grad = gradient = torch.ones_like(held)
    check, other = IdentityCheck(tensor_readers()), nn.Parameter(torch.ones(3).to(device))
    check.gradient(weight, present=True)
    check.gradient(frozen)
    check.gradient(held, present=True)
    seen(
        check,
        [
            (lambda: weight.sum().backward(), lambda: setattr(weight, "grad", None)),
            (lambda: weight.requires_grad_(False), lambda: weight.requires_grad_()),
            (lambda: frozen.requires_grad_(), lambda: frozen.requires_grad_(False)),
            (lambda: setattr(held, "grad", None), lambda: setattr(held, "grad", gradient)),
            (lambda: setattr(held, "grad", gradient.clone()), lambda: setattr(held, "grad", gradient)),
            (lambda: torch.utils.swap_tensors(weight, other), lambda: torch.utils.swap_tensors(weight, other)),
        ],
    )
    frozen.grad = torch.ones_like(frozen)  # not entered
    assert check.holds()


@pytest.mark.skipif(tensor_readers() is None, reason="this torch does not let native code read tensors")
def test_how_tensors_are_read_is_found_out_unseen() -> None:
    """The first call may come from within a program: its hooks of saved tensors count what is saved."""
    readers, seen = tensor_readers(), []
    assert readers is not None
    keep = lambda tensor: seen.append(tensor) or tensor  # noqa: E731
    with torch.autograd.graph.saved_tensors_hooks(keep, keep), torch.no_grad(), torch.device("meta"):
        with torch.autograd.graph.saved_tensors_hooks(keep, keep):
            found = tensor_readers.__wrapped__()
        assert not seen
        with torch.enable_grad():
            torch.ones(2, requires_grad=True).exp()
    assert len(seen) == 1
    assert (found.words, found.counter, found.gradients, found.graph) == (
        readers.words, readers.counter, readers.gradients, readers.graph
    )  # fmt: skip


@needs_compiler
@pytest.mark.skipif(tensor_readers() is None, reason="this torch does not let native code read tensors")
@pytest.mark.parametrize("unknown", [{}, {"graph": -1}, {"gradients": None}])
@pytest.mark.parametrize("kept", [True, False])
def test_gradients_of_tensors_that_require_none(kept: bool, unknown: dict[str, Any]) -> None:
    """Whether autograd keeps something of them or not."""
    readers = tensor_readers()
    assert readers is not None
    readers = dataclasses.replace(readers, **unknown)
    changes: list[Callable[[torch.Tensor], Any]] = [
        lambda x: x.requires_grad_(), lambda x: setattr(x, "grad", torch.ones(3)),
        lambda x: x.add_(nn.Parameter(torch.ones(3))),
        lambda x: torch.utils.swap_tensors(x, nn.Parameter(torch.ones(3))),
    ]  # fmt: skip
    for change in changes:
        constant, written = torch.ones(3), torch.ones(3)
        if kept:
            constant.requires_grad_().requires_grad_(False)
        check = IdentityCheck(readers)
        check.gradient(constant, present=True)
        check.gradient(written)
        written.add_(1)
        assert check.holds()
        change(constant)
        assert not check.holds()


@needs_compiler
@pytest.mark.skipif(getattr(tensor_readers(), "gradients", None) is None, reason="no places of gradients are known")
def test_a_parameter_by_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be given another memory, another implementation, or what autograd keeps of it may be exchanged."""
    weight = nn.Parameter(torch.ones(3))
    check = IdentityCheck(tensor_readers())
    check.gradient(weight, present=True)
    assert len(check._rows) == 0  # nothing is asked of torch
    weight.data = torch.zeros(4)
    with torch.no_grad():
        weight.mul_(2)
    assert check.holds()
    torch.utils.swap_tensors(weight, nn.Parameter(torch.ones(3)))
    assert not check.holds()
    gc.collect()
    for _ in range(100):  # its implementation is gone, and its memory another's
        nn.Parameter(torch.rand(8))
        assert not check.holds()


@needs_compiler
@pytest.mark.skipif(tensor_readers() is None, reason="this torch does not let native code read tensors")
def test_hooks_of_tensors() -> None:
    for register in ("register_hook", "register_post_accumulate_grad_hook"):
        weight = nn.Parameter(torch.ones(3))
        check = IdentityCheck(tensor_readers())
        check.geometry(weight)
        assert check.holds()
        getattr(weight, register)(lambda found: None)
        assert not check.holds()


@pytest.mark.parametrize(
    "mode", [torch.inference_mode, torchlazy.lazy_mode, torch.no_grad, lambda: torch.device("lazy")]
)
def test_how_tensors_are_read_is_found_out_in_any_mode(mode: Callable[[], Any]) -> None:
    with mode():
        found = tensor_readers.__wrapped__()
    known = tensor_readers()
    assert (found and (found.functions, found.words, found.counter, found.gradients)) == (
        known and (known.functions, known.words, known.counter, known.gradients)
    )


class Backwards(dict[str, Any]):
    def values(self) -> Any:
        return reversed(list(super().values()))


def test_which_dicts_iterate_in_the_order_of_their_entries() -> None:
    assert keeps_order({}) and keeps_order(defaultdict(list))
    assert not any(map(keeps_order, (OrderedDict(), Backwards(), [], ())))


class Made(OrderedDict[str, Any]):
    """Whose items are made when they are asked for."""

    def __getitem__(self, key: str) -> Any:
        return [super().__getitem__(key)]


def test_views_that_show_all() -> None:
    assert shows_all({}) is dict and shows_all(defaultdict(list)) is dict
    assert shows_all(OrderedDict()) is OrderedDict and shows_all(Made()) is OrderedDict
    assert shows_all(Backwards()) is None and shows_all([]) is None


@needs_compiler
def test_ordered_dicts() -> None:
    first, second = [1], [2]
    table = Made(a=first, b=second)
    check = IdentityCheck()
    check.values(table, list(dict.values(table)))
    seen(check, [(lambda: table.update(a=[1]), lambda: table.update(a=first))])
    assert check.order(table) and check.holds()
    table.move_to_end("a")  # the dict that it is does not see that
    assert not check.holds()


def test_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(identity_check, "_loaded", lambda: None)
    assert not is_available()
    with pytest.raises(ToolchainMissing, match="install g"):
        IdentityCheck()


@needs_compiler
def test_answers_of_functions_in_c() -> None:
    check = IdentityCheck()
    assert check.answer(torch.is_grad_enabled) and check.answer(torch.get_default_dtype)
    assert check.answer(torch._C._get_float32_matmul_precision)  # another string each time
    assert not check.answer(lambda: 1) and not check.answer(ALONE.copy)  # of Python; no plain value
    ALONE.extend([0] * 600)
    assert check.answer(ALONE.count, 0) and check.holds()  # a number that is another object each time
    precision = torch.get_float32_matmul_precision()
    assert check.answer(torch._C._get_float32_matmul_precision)
    seen(
        check,
        [
            (lambda: ALONE.append(0), ALONE.pop),
            (
                lambda: torch.set_float32_matmul_precision("medium"),
                lambda: torch.set_float32_matmul_precision(precision),
            ),
        ],
    )
    check.answer(ALONE.index, 0)
    ALONE.clear()  # it raises now
    assert not check.holds() and not check.holds()


ALONE: list[int] = []


@needs_compiler
def test_context_variables() -> None:
    none, value = object(), [1]
    unset: contextvars.ContextVar[Any] = contextvars.ContextVar("unset")
    given: contextvars.ContextVar[Any] = contextvars.ContextVar("given", default=value)
    check = IdentityCheck()
    check.context_value(unset, none)
    check.context_value(given, none)
    tokens: list[Any] = []
    seen(
        check,
        [
            (lambda: tokens.append(unset.set(None)), lambda: unset.reset(tokens.pop())),
            (lambda: tokens.append(given.set([1])), lambda: given.reset(tokens.pop())),
        ],
    )
    assert contextvars.Context().run(check.holds)  # another context, in which they have the same values
    tokens.append(given.set([1]))
    assert not check.holds() and contextvars.Context().run(lambda: given.get(None)) is None


@needs_compiler
def test_a_pass_keeps_what_it_compares_with() -> None:
    items = [str(number) for number in range(1000, 1040)]
    check = IdentityCheck()
    check.items(items, items)
    check.answer(torch._C._get_float32_matmul_precision)
    passes = check.complete()
    del check
    gc.collect()
    assert passes() and passes.__module__.startswith("torchlazy.")  # a text: torch's own capture takes it apart
    items[3] = str(1003)
    assert not passes()


@needs_compiler
def test_lengths_of_dicts_whose_values_are_watched() -> None:
    """One number of entries for a dict, which its version tells, too."""
    table: dict[str, Any] = {"a": 1, "b": 2}
    check = IdentityCheck()
    check.size(table, 2)
    check.entries(table, {"a": 1})
    check.size(table, 2)
    seen(
        check,
        [(lambda: table.update(c=1), lambda: table.pop("c")), (lambda: table.pop("b"), lambda: table.update(b=2))],
    )
    table["b"] = 3  # not watched
    assert check.holds()
    with pytest.raises(ValueError, match="one number"):
        check.size(table, 3)
