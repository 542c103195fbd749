"""Operators that the program defines (`torch.library`), with kernels of its own: values, writes and gradients are
eager's, on the lazy device, in `lazy_mode` and in compiled calls, which are replayed."""

from __future__ import annotations

import warnings

import pytest
import torch
import torchlazy

CALLS = 10
_LIBRARY = torch.library.Library("tlzcustom", "DEF")


def _define(schema, function, key="CompositeExplicitAutograd"):
    _LIBRARY.define(schema)
    _LIBRARY.impl(schema.partition("(")[0], function, key)


_define("either(Tensor a, float k) -> Tensor", lambda a, k: a + (k if k < 0.45 else -k), "CompositeImplicitAutograd")
_define("both(Tensor a, float k) -> Tensor", lambda a, k: (a * k).add(k + 1), "CompositeImplicitAutograd")


def _plus(a, v):
    a.add_(v)


def _all_plus(xs, v):
    for x in xs:
        x.add_(v)


_define("plus(Tensor(a!) a, float v) -> ()", _plus)
_define("turned(Tensor(a!) a, Scalar v) -> Tensor(a!)", lambda a, v: a.mul_(v))
_define("exchange(Tensor(a!) a, Tensor(b!) b, Tensor c) -> (Tensor, Tensor)", lambda a, b, c: _exchange(a, b, c))
_define("all_plus(Tensor(a!)[] xs, float v) -> ()", _all_plus)
_define("told(Tensor x) -> ()", lambda x: TOLD.append(x.sum().item()))
_define("scaled(Tensor x, float k) -> Tensor", lambda x, k: x * k)
TOLD: list[float] = []
ops = torch.ops.tlzcustom


@torch.library.register_fake("tlzcustom::scaled")
def _(x, k):
    return x.new_empty(x.shape)


def _exchange(a, b, c):
    both = a + b
    a.copy_(c)
    b.mul_(2)
    return both, c - a


@pytest.fixture(params=["cpu", "lazy"])
def device(request):
    return request.param


def data(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def compiled(function, *arguments):
    """The compiled function, after calls with each of the arguments have given what it gives by itself."""
    found = torchlazy.compile(function)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for given in arguments:
            torch.testing.assert_close(found(*given), function(*given))
    return found


@pytest.mark.parametrize("name", ["either", "both"])
def test_what_an_operator_in_python_makes_of_a_number_is_its_own(device, name):
    """The number goes to several operators, or decides of them, where nobody follows it."""
    op = getattr(ops, name)
    compiled(op, *[(data(3, seed=i).to(device), 0.1 * (i % 8) + 0.03) for i in range(CALLS)])


def same_as_eager(program, device, arguments, *, replays=2):
    """Results, arguments and state of each call; `program` makes the function and its state anew."""
    function, state = program("cpu")
    other, of_other = program(device)
    replayed = torchlazy.compile(other)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for number in range(CALLS):
            given, (first, *others) = arguments(number), arguments(number)
            taken = [first.to(device), *others]
            expected, found = function(*given), replayed(*taken)
            for ours, plain in ((found, expected), (taken[:1], given[:1]), (of_other, state)):
                torch.testing.assert_close([x.cpu() for x in ours], list(plain))
    assert replayed.report().replays > replays, replayed.report()


def _writes_arguments_and_state(device):
    kept = torch.zeros(4, device=device)

    def call(x):
        ops.plus(kept, 1.0)
        ops.plus(x[1], 2.0)
        y = x * 1
        z = y.clone()
        ops.plus(y[:, 0], 3.0)
        return x + kept, y, z, ops.turned(y, 2)[0]

    return call, [kept]


def _branches_after_a_write(device):
    kept = torch.zeros(4, device=device)

    def call(x):
        ops.plus(kept, 1.0)
        ops.plus(x[0], 1.0)
        if (x.sum() > 0).item():
            ops.plus(kept, 2.0)
            return x * kept
        return x - kept

    return call, [kept]


def _several_at_once(device):
    a, b, many = torch.zeros(4, device=device), torch.ones(4, device=device), [torch.ones(4, device=device)] * 2

    def call(x):
        first = ops.exchange(a, b, x[0])
        second = ops.exchange(b, a, x[1])
        y = x * 1
        third = ops.exchange(y[0], y[1], y[2])
        ops.all_plus([*many, y[0]], 0.5)
        b.mul_(0.4)
        return *first, *second, *third, y

    return call, [a, b, *many]


@pytest.mark.parametrize("program", [_writes_arguments_and_state, _branches_after_a_write, _several_at_once])
def test_operators_that_write_are_replayed(device, program):
    same_as_eager(program, device, lambda number: [data(3, 4, seed=number)])


@pytest.mark.parametrize("program", [_writes_arguments_and_state, _several_at_once])
def test_operators_that_write_under_lazy_mode(program):
    (function, state), (other, of_other) = program("cpu"), program("cpu")
    for number in range(3):
        given, taken = data(3, 4, seed=number), data(3, 4, seed=number)
        with torchlazy.lazy_mode():
            found = other(taken)
        torch.testing.assert_close(list(found), list(function(given)))
        torch.testing.assert_close((taken, of_other), (given, state))


def test_numbers_that_vary_reach_the_operator(device):
    def program(device):
        kept = torch.zeros(3, device=device)

        def call(x, k):
            y = x * k
            ops.plus(y, k * 2 + 1)
            ops.plus(kept, x.sum().item())
            return ops.scaled(y, k), ops.scaled(y, 0.5)

        return call, [kept]

    same_as_eager(program, device, lambda number: [data(3, seed=number), 0.3 + 0.1 * number])


def test_an_operator_that_gives_nothing_runs_in_each_replay(device):
    TOLD.clear()
    step = torchlazy.compile(lambda x: ops.told(x * 2) or x + 1)
    batches = [data(3, seed=number) for number in range(CALLS)]
    for x in batches:
        step(x.to(device))
    assert step.report().replays > 2
    torch.testing.assert_close(TOLD, [(x * 2).sum().item() for x in batches])


def test_a_number_beside_a_gradient_is_a_constant(device):
    """What an operator's backward makes of the number is seen by nobody."""
    weight = data(3, seed=99).to(device).requires_grad_()

    @torch.library.custom_op("tlzcustom::taught", mutates_args=())
    def taught(x: torch.Tensor, k: float) -> torch.Tensor:
        return x * k

    taught.register_fake(lambda x, k: torch.empty_like(x))
    taught.register_autograd(
        lambda ctx, g: (g * ctx.k + ctx.k + 1, None),
        setup_context=lambda ctx, inputs, output: setattr(ctx, "k", inputs[1]),
    )

    def call(x, k):
        weight.grad = None
        taught(weight * x, k).sum().backward()
        return weight.grad

    compiled(call, *[(data(3, seed=number).to(device), 0.3 + 0.1 * number) for number in range(6)])


@pytest.mark.parametrize("tags", [(), (torch.Tag.nondeterministic_seeded,)], ids=["untold", "told"])
def test_one_whose_shape_is_told_and_that_draws(tags, monkeypatch):
    """The numbers are eager's, and so is where the generator stands behind the call, once it is known that it draws."""
    monkeypatch.setattr(torchlazy.config, "rng", "eager")
    name = f"noisy{len(tags)}"
    _LIBRARY.define(f"{name}(Tensor x) -> Tensor", tags=tags)
    _LIBRARY.impl(name, lambda x: x + torch.randn_like(x), "CompositeExplicitAutograd")
    torch.library.register_fake(f"tlzcustom::{name}", torch.empty_like)
    op = getattr(ops, name)

    def call(x):
        first = torch.rand(3)
        return op(x * 2) * torch.rand(3) + ops.scaled(first, 2.0), op(x)

    def seen(function, seed):
        torch.manual_seed(seed)
        return [*function(data(3, seed=seed)), torch.rand(2)]

    run = torchlazy.compile(call)
    for seed in range(CALLS):
        found, expected = seen(run, seed), seen(call, seed)
        if seed or tags:
            torch.testing.assert_close(found, expected)
    assert run.report().replays > 2, run.report()


def test_a_call_that_seeds_beside_an_operator_that_draws_nothing_is_told_so():
    def call(x):
        torch.manual_seed(int(x.numel()))
        return ops.scaled(x, 2.0) + torch.rand(3)

    run = torchlazy.compile(call)
    for seed in range(3):
        run(data(3, seed=seed))
    assert "its Python seeds" in str(run.report()) and not run.report().replays
