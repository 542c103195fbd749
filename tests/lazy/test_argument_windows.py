"""Arguments that are windows on larger memory: a compiled call does to them, and tells of them, what a plain call does.

Invariant: every window of `WINDOWS` is passed to every function of `FUNCTIONS`, at several places of its memory.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torchlazy
from torchlazy.lazy.compiled.template.views import copy_argument_views, view_of_argument

pytestmark = pytest.mark.usefixtures("operator_by_operator")

WINDOWS: dict[str, Callable[[torch.Tensor, int], torch.Tensor]] = {
    "rows": lambda data, i: data[i : i + 2],
    "columns": lambda data, i: data[:, i : i + 3],
    "one column": lambda data, i: data[:, i : i + 1],
    "transposed rows": lambda data, i: data[i : i + 2].t(),
    "transposed columns": lambda data, i: data[:, i : i + 3].t(),
    "every other": lambda data, i: data[i % 2 :: 2, ::2][:2],
    "expanded": lambda data, i: data[:, i : i + 1].expand(4, 3),
    "one row often": lambda data, i: data[i, :3].expand(4, 3),
    "one element often": lambda data, i: data[0, i].expand(3, 3),
    "three dimensions": lambda data, i: data.view(4, 2, 3)[:, :, i % 2 : i % 2 + 2],
    "overlapping": lambda data, i: data.as_strided((3, 3), (1, 1), i),
    "empty": lambda data, i: data[i:i],
}


def writes_to_contiguous(x):
    return x.contiguous().add_(1) * 2


def writes_to_flat(x):
    flat = x.reshape(-1)
    flat[flat == 7] = -100
    return flat * 2


def fills(x):
    x[..., :2].fill_(2)


def asks_strides(x):
    return x + sum(x.stride()) + 10 * x.is_contiguous()


def asks_place(x):
    return x + x.storage_offset()


def tells_strides(x):
    return [(y, y.stride(), y.is_contiguous()) for y in (x * 2, x.t() if x.dim() == 2 else x, x.reshape(-1))]


def turns_in_place(x):
    x.transpose_(0, 1).unsqueeze_(0)
    return x * 2, x.shape


def gives_views_of_other_types(x):
    return [x.view(torch.int32)[..., :1]]


def gives_views(x):
    views = [x[:1], x.flatten()[1:], x.unsqueeze(0), x[..., -1]]
    return [*views, x]


def writes_to_data(x):
    if x.numel():
        x.data[(0,) * x.dim()].fill_(5)


def writes_by_numpy(x):
    x.numpy()[..., :1] = 5


def moves(x):
    x.data = x.data * 2
    x += 1


def sees_its_memory(x):
    return x.as_strided((2, 2), (1, 2), 0) + 0


def writes_to_its_memory(x):
    x.flatten()[:1] = 8  # a view or a copy
    torch.as_strided(x, (2,), (1,), 3).fill_(9)
    return x * 1


FUNCTIONS = [
    writes_to_contiguous,
    writes_to_flat,
    fills,
    asks_strides,
    asks_place,
    tells_strides,
    gives_views,
    gives_views_of_other_types,
    turns_in_place,
    writes_to_data,
    writes_by_numpy,
    moves,
    sees_its_memory,
    writes_to_its_memory,
]


def turns(function: Any, window: Callable[[torch.Tensor, int], torch.Tensor]) -> list[Any]:
    data = torch.arange(24.0).reshape(4, 6)
    found: list[Any] = []
    for i in (0, 1, 2, 0, 1, 2, 1):
        given = window(data, i)
        result = function(given)
        found.append((given.clone(), [s for n, s in zip(given.shape, given.stride(), strict=True) if n > 1]))
        if isinstance(result, list) and isinstance(result[0], torch.Tensor):
            for number, view in enumerate(result):
                if not any(n > 1 and s == 0 for n, s in zip(view.shape, view.stride(), strict=True)):
                    view[...] = view + number  # an out-of-place sum: views of one memory may overlap themselves
        found.append(torch.utils._pytree.tree_map(lambda x: x.clone() if isinstance(x, torch.Tensor) else x, result))
        found.append((data.clone(), None if isinstance(result, list) else data._version))
    return found


@pytest.mark.parametrize("name", WINDOWS)
@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
def test_compiled_is_as_plain(function: Any, name: str) -> None:
    expected = turns(function, WINDOWS[name])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        torch.testing.assert_close(turns(torchlazy.compile(function), WINDOWS[name]), expected)


@pytest.mark.parametrize("name", [name for name in WINDOWS if name != "overlapping"])
def test_copies_are_laid_out_alike(name: str) -> None:
    data = torch.arange(24.0).reshape(4, 6)
    window = WINDOWS[name](data, 1)
    (copy,) = copy_argument_views([window])
    assert copy is not window and copy._version == 0 and copy.untyped_storage().nbytes() <= 2 * data.nbytes
    assert torch.equal(copy, window) and copy.is_contiguous() == window.is_contiguous()
    for view in (copy, copy[1:], copy[..., -1], copy.unsqueeze(1)):
        seen = view_of_argument(window, copy, view)
        assert seen is not None
        assert torch.equal(seen, view) and seen.untyped_storage()._cdata == data.untyped_storage()._cdata


def test_copies_have_the_strides_of_what_they_stand_for() -> None:
    data = torch.arange(44.0).view(11, 4)
    for view in (data[::2], data[:, 1:3], data[1:5].t(), data[2:3, ::2], data.view(11, 2, 2)[::3, :, 1]):
        (copy,) = copy_argument_views([view])
        assert copy is not view and copy.stride() == view.stride() and torch.equal(copy, view)


def test_a_column_of_a_wide_table_is_not_copied_with_its_gaps() -> None:
    table = torch.zeros(4096, 4096)
    assert copy_argument_views([table[:, 5]])[0].untyped_storage().data_ptr() == table.data_ptr()
    call = torchlazy.compile(lambda x: x.sum() + 1)
    for i in range(4):
        assert call(table[:, i]) == 1


WRITES: dict[str, Callable[[torch.Tensor], Any]] = {
    "add_": lambda x: x.add_(1),
    "setitem": lambda x: x.__setitem__(0, 7),
    "through t": lambda x: x.t().add_(1),
    "copy_": lambda x: x.copy_(torch.arange(8.0)),
    "data": lambda x: x.data.add_(2),
    "out": lambda x: torch.add(x, 1, out=x),
    "index_add_": lambda x: x.index_add_(0, torch.tensor([1]), torch.ones(1)),
    "detached": lambda x: x.detach().fill_(3),
    "slice": lambda x: x[2:5].mul_(4),
    "foreach": lambda x: torch._foreach_add_([x], 1.0),
    "returned view": lambda x: x[1:3],
}


@pytest.mark.parametrize("name", WRITES)
@pytest.mark.parametrize("before", [0, 1, 3, 6, 9])
def test_what_was_captured_with_whole_tensors_does_not_lose_writes_to_views(name: str, before: int) -> None:
    """Templates of whole tensors served calls with slices, which copies stood for: the writes went to the copies."""
    compiled = torchlazy.compile(WRITES[name])
    for _ in range(before):
        compiled(torch.zeros(8))
    have, want = torch.zeros(64), torch.zeros(64)
    for i in range(8):
        mine, theirs = compiled(have[8 * i : 8 * i + 8]), WRITES[name](want[8 * i : 8 * i + 8])
        if name == "returned view":
            mine.add_(i)
            theirs.add_(i)
    assert torch.equal(have, want)


@pytest.mark.parametrize(
    "asks",
    [
        lambda x: x + 1 if x.is_contiguous() else x * 5,
        lambda x: x * x.stride(0),
        lambda x: x * (x.storage_offset() + 1),
        lambda x: x.view(-1)[:2] * 2 if x.is_contiguous() else x.reshape(-1)[:3],
    ],
)
@pytest.mark.parametrize("before", [0, 4])
def test_questions_about_layout_get_the_views_answer(asks: Callable[[torch.Tensor], torch.Tensor], before: int) -> None:
    compiled = torchlazy.compile(asks)
    for _ in range(before):
        compiled(torch.ones(6, 4))
    data = torch.arange(96.0).view(24, 4)
    for i in range(8):
        for view in (data[i : i + 11 : 2], data[i : i + 6], torch.ones(6, 4)):
            assert torch.equal(compiled(view), asks(view))


def test_a_view_that_eager_refuses_is_refused() -> None:
    compiled = torchlazy.compile(lambda x: x.view(-1) + 1)
    for _ in range(4):
        compiled(torch.ones(6, 4))
    for _ in range(3):
        with pytest.raises(RuntimeError, match="view size is not compatible"):
            compiled(torch.ones(11, 4)[::2])


def test_hooks_of_arguments_run() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        return torch.autograd.grad((x * 2).sum(), x)[0]

    compiled = torchlazy.compile(step)
    for hooked in [False] * 5 + [True] * 3 + [False]:
        x = torch.ones(2, requires_grad=True)
        if hooked:
            x.register_hook(lambda gradient: gradient * 10)
        assert torch.equal(compiled(x), torch.full((2,), 20.0 if hooked else 2.0))
    assert any("has hooks" in reason for reason in compiled.report().reasons)


def test_places_do_not_matter_where_nobody_asks() -> None:
    data = torch.arange(60.0).reshape(6, 10)
    call = torchlazy.compile(lambda x: x * 2 + 1, audit=False)
    for i in range(7):
        assert torch.equal(call(data[:, i : i + 3]), data[:, i : i + 3] * 2 + 1)
    assert call.report().captures == 1 and call.report().replays == 6


def test_a_view_beside_a_gradient_is_the_windows() -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    data = torch.arange(24.0).reshape(4, 6)
    call = torchlazy.compile(lambda x: ((x * weight).sum(), x[0]))
    for i in range(4):
        loss, view = call(data[:, 1:4])
        loss.backward()
        view += 1
        assert view.data_ptr() == data[0, 1:].data_ptr() and data[0, 1] == 2 + i


def test_state_and_containers_get_the_window_itself() -> None:
    state = SimpleNamespace(last=None, both=None)

    def call(x: torch.Tensor, seen: list[torch.Tensor]) -> None:
        state.last = x
        state.both = [x, x + 1]
        seen.append(x)

    compiled = torchlazy.compile(call, audit=False)
    for number in range(4):
        seen: list[torch.Tensor] = []
        x = torch.arange(10.0)[number % 2 :: 2]
        compiled(x, seen)
        assert state.last is x and state.both[0] is x and seen[0] is x


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_out_of_another_size_is_the_windows() -> None:
    call = torchlazy.compile(lambda x: torch.arange(3, out=x), audit=False)
    for _ in range(4):
        data, eager = torch.full((12,), 7.0), torch.full((12,), 7.0)
        given, wanted = data[1::2], eager[1::2]
        call(given)
        torch.arange(3, out=wanted)
        assert torch.equal(given, wanted) and given.stride() == wanted.stride() and torch.equal(data, eager)


def _product(x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
    whole = x[::2]
    x.add_(1)
    torch.mul(y, 2, out=x)
    return [whole, x, x[1:], x.squeeze()]


def _count(x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
    view = x[None]
    torch.arange(4, out=view)
    return [view, x, view[1:]]


@pytest.mark.filterwarnings(
    "ignore:torchlazy.compile", "ignore:An output with one or more", "ignore:The number of elements"
)
@pytest.mark.parametrize("size", [1, 2, 8, 12, 20])
@pytest.mark.parametrize("call", [_product, _count])
def test_what_is_seen_of_a_window_that_out_resizes(call: Callable[..., list[torch.Tensor]], size: int) -> None:
    """Views from before and after, and the memory around it."""
    run = torchlazy.compile(call, audit=False)
    for _ in range(3):
        found, seen = [], []
        for function, into in ((run, found), (call, seen)):
            data = torch.arange(64.0)
            window = data[3:27:2]
            into += [*function(window, torch.arange(float(size))), window, data]
            into.append(torch.tensor(window._version))
        for mine, eagers in zip(found, seen, strict=True):
            assert torch.equal(mine, eagers) and mine.stride() == eagers.stride()
            assert mine.storage_offset() == eagers.storage_offset()


def test_a_window_of_one_element() -> None:
    """Made contiguous it keeps its stride, with which no bytes can be compared."""
    run = torchlazy.compile(lambda x: x * 2)
    for _ in range(3):
        assert run(torch.ones(2, dtype=torch.bfloat16)[1::2]).tolist() == [2]


@pytest.mark.filterwarnings("ignore:torchlazy.compile")
def test_leaves_made_of_a_window_need_their_gradients() -> None:
    call = torchlazy.compile(lambda x: [x.detach().requires_grad_(), torch.nn.Parameter(x.detach())], audit=False)
    for _ in range(4):
        leaf, parameter = call(torch.arange(6.0)[1::2])
        assert leaf.requires_grad and leaf.is_leaf and isinstance(parameter, torch.nn.Parameter)
        assert parameter.requires_grad and leaf.stride() == parameter.stride() == (2,)


@pytest.mark.parametrize("needs_gradient", [False, True])
@pytest.mark.parametrize("form", ["detached", "appended", "a part", "itself"])
def test_state_gets_views_of_the_window_beside_a_gradient(form: str, needs_gradient: bool) -> None:
    state = SimpleNamespace(seen=[torch.zeros(1)], last=None)

    def call(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        if form == "appended":
            state.seen.append(x.detach())
        elif form == "detached":
            state.seen = [x.detach()]
        elif form == "itself":
            state.seen = [x]
        else:
            state.seen[:] = [x[0:]]
        return weight.sum(0)

    compiled = torchlazy.compile(call)
    for _ in range(4):
        data, weight = torch.arange(6.0), torch.ones(3, requires_grad=needs_gradient)
        window = data[1::2]
        result = compiled(window, weight)
        state.seen[-1].add_(1)
        assert torch.equal(data, torch.tensor([0.0, 2.0, 2.0, 4.0, 4.0, 6.0]))
        assert state.seen[-1].stride() == (2,) and (form != "itself" or state.seen[-1] is window)
        assert result.requires_grad == needs_gradient and result.item() == 3


def test_a_window_that_is_in_a_place_of_the_state_that_changes() -> None:
    class State:
        b: torch.Tensor

    def call(state: Any, x: torch.Tensor) -> torch.Tensor:
        state.b.add_(1)
        return x * 2

    compiled, state = torchlazy.compile(call), State()
    for i in range(12):
        state.b = torch.arange(8.0)[:4]
        x = torch.arange(8.0)[:4] if i < 6 or i % 2 else state.b
        assert torch.equal(compiled(state, x), x * 2)
        assert torch.equal(state.b, torch.arange(1.0, 5.0)) and state.b._base[4] == 4
