"""`lazy_mode()` over ordinary CPU tensors: what happens in the block is what eager does, for every reader.

Each case is a function of a block's factory: `torchlazy.lazy_mode`, or a block that does nothing.
"""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
import torch
import torchlazy
from torch import nn
from torch.nn import functional as F

from tests.lazy.compare import Cases, data
from tests.lazy.mode_blocks import check_as_in_eager, two_layers, write_and_read
from tests.lazy.models import same

case = Cases()


@case.parametrize()
@pytest.mark.parametrize("tiers", ["on", "off"])
def test_as_in_eager(f, tiers):
    check_as_in_eager(f, tiers)


# ---------------------------------------------------------------- escaping, nesting, errors


@case
def escaping_tensors(block):
    with block():
        x = data("cpu", 3, 4) * 2
        w = nn.Parameter(torch.ones(4, 2))
    y = x @ w  # outside: at once
    y.sum().backward()
    with block():
        z = (x + 1) @ w
        z.sum().backward()
    out = torch.zeros(3, 2)
    out.copy_(z.detach())
    return x, y, z, w.grad, out, isinstance(x + 1, torch.Tensor)


@case
def mixed_with_ordinary_tensors_afterwards(block):
    with block():
        x = data("cpu", 3) * 2
    plain = torch.ones(3)
    plain.add_(x)
    stacked = torch.stack([plain, x])
    x.add_(plain)
    where = torch.where(x > 0, x, plain)
    return plain, stacked, x, where


@case
def nested_blocks(block):
    x = data("cpu", 3)
    with block():
        x.add_(1)
        with block():
            x.mul_(2)
            y = x.sum()
        first = x.tolist()
        x.sub_(1)
    return [round(v, 4) for v in first], x, y


@case
def one_block_object_used_again(block):
    scope = block()
    x = data("cpu", 3)
    for _ in range(2):
        with scope:
            x.add_(1)
            with scope:
                x.mul_(2)
    return x


@case
def error_of_an_operator(block):
    x = data("cpu", 3, 4)
    try:
        with block():
            x.add_(1)
            y = x * 2
            x @ x
    except RuntimeError as error:
        return x, y, str(error)


@case
def error_of_the_user(block):
    model = two_layers()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with contextlib.suppress(ZeroDivisionError), block():
        model(data("cpu", 5, 4)).sum().backward()
        optimizer.step()
        model[0].weight.data.add_(1)
        raise ZeroDivisionError
    with block():
        out = model(data("cpu", 5, 4))
    return model.state_dict(), out


@case
def error_that_shows_late(block):
    """An index out of range is an error of the program at the cut, of the same type as eager's."""
    x = data("cpu", 3, 4)
    with block():
        y = x.index_select(0, torch.tensor([5]))
        y.sum().item()


@pytest.mark.usefixtures("recorded_in_python")
def test_decorator():
    x = data("cpu", 3)

    @torchlazy.lazy_mode()
    def f(t):
        t.add_(1)
        return t * 2, torchlazy.is_lazy(t * 1)

    want = (x + 1) * 2
    have, inside = f(x)
    same(have, want)
    assert inside and not torchlazy.is_lazy(torch.ones(2) * 1)


@pytest.mark.usefixtures("recorded_in_python")
def test_the_block_ends_when_it_is_left():
    with torchlazy.lazy_mode():
        inside = torch.ones(2)
        assert torchlazy.is_lazy(inside) and inside.device.type == "cpu"
    assert not torchlazy.is_lazy(torch.ones(2))
    assert not torchlazy.is_lazy(torch.ones(2) + 1)
    assert inside.is_cpu and not inside.is_cuda


@pytest.mark.usefixtures("device_in_python")
def test_mixed_with_the_lazy_device():
    x, w = data("cpu", 3, 4), data("lazy", 4, 2)
    with torchlazy.lazy_mode():
        a = (x * 2).to("lazy") @ w
        b = a.cpu() + 1
        x.add_(1)
    assert a.device.type == "lazy" and b.device.type == "cpu"
    want = (data("cpu", 3, 4) * 2) @ w.cpu()
    same([a, b, x], [want, want + 1, data("cpu", 3, 4) + 1], rtol=1e-5, atol=1e-6)
    with torchlazy.lazy_mode(), pytest.raises(RuntimeError):
        (x * 2) @ w
    same(w.cpu(), data("cpu", 4, 2))


# ---------------------------------------------------------------- factories, random, autocast, func


@case
def factories(block):
    with block():
        made = [
            torch.zeros(2, 3), torch.ones(2), torch.full((2,), 3.0), torch.arange(5), torch.linspace(0, 1, 4),
            torch.eye(3), torch.tensor([1.0, 2.0]), torch.tensor(3), torch.zeros_like(torch.ones(2)),
            torch.ones(3).new_full((2,), 4), torch.from_numpy(np.ones(3, np.float32)), torch.as_tensor([1, 2]),
            torch.tril(torch.ones(3, 3)), torch.empty(2, 2).fill_(1), torch.ones(2, dtype=torch.bool),
            torch.scalar_tensor(2.0), torch.complex(torch.ones(2), torch.ones(2)), torch.empty(0, 3),
        ]  # fmt: skip
        made[0][0, 1] = 5
    return made, [str(t.device) for t in made]


def test_random_numbers():
    torch.manual_seed(0)
    with torchlazy.lazy_mode():
        a, b = torch.rand(1000), torch.randn(1000)
        mask = F.dropout(torch.ones(1000), 0.5)
    assert 0.4 < a.mean() < 0.6 and abs(b.mean()) < 0.2 and 0.8 < b.std() < 1.2
    assert set(mask.unique().tolist()) == {0.0, 2.0}
    torch.manual_seed(0)
    with torchlazy.lazy_mode():
        again = torch.rand(1000)
    same(again, a, rtol=0, atol=0)


@case
def autocast_cpu(block):
    model = two_layers()
    x = data("cpu", 5, 4)
    with block(), torch.autocast("cpu", dtype=torch.bfloat16):
        hidden = model[0](x)
        loss = model[2](model[1](hidden)).float().square().mean()
    loss.backward()
    return str(hidden.dtype), hidden.float().round(decimals=1), [p.grad.dtype for p in model.parameters()]


@case
def torch_func(block):
    x = data("cpu", 3, 4)
    f = lambda t: (t.sin() * t).sum()  # noqa: E731
    with block():
        return (
            torch.func.grad(f)(x[0]),
            torch.func.vmap(torch.func.grad(f))(x),
            torch.func.jacrev(torch.sin)(x[0]),
            torch.func.hessian(f)(x[0]),
        )


@case
def double_backward(block):
    x = data("cpu", 4, grad=True)
    with block():
        (g,) = torch.autograd.grad((x.exp() * x).sum(), x, create_graph=True)
        g.square().sum().backward()
    return g, x.grad


@case
def hooks_and_custom_functions(block):
    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x * x

        @staticmethod
        def backward(ctx, g):
            return 2 * ctx.saved_tensors[0] * g

    x = data("cpu", 4, grad=True)
    seen = []
    x.register_hook(lambda g: seen.append(g.sum()))
    with block():
        Square.apply(x * 2).sum().backward()
    return x.grad, seen


@case
def checkpointed(block):
    model = two_layers()
    x = data("cpu", 5, 4, grad=True)
    with block():
        out = torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False)
        out.square().sum().backward()
    return out, x.grad, [p.grad for p in model.parameters()]


@case
def inference_and_no_grad(block):
    model = two_layers().eval()
    with block(), torch.inference_mode():
        a = model(data("cpu", 5, 4))
    with torch.no_grad(), block():
        b = model(data("cpu", 5, 4))
    return a.clone(), b, b.requires_grad


@case
def data_dependent(block):
    x = data("cpu", 4, 4)
    with block():
        x.add_(0.5)
        picked = x[x > 0]
        places = x.nonzero()
        if x.sum() > 0:
            x.mul_(2)
        rows = [row.max() for row in x]
        values = torch.unique((x * 2).round())
    return picked, places, x, rows, values


@case
def module_made_inside(block):
    torch.manual_seed(0)
    with block():
        model = nn.Linear(4, 2)
        nn.init.constant_(model.weight, 0.5)
        nn.init.zeros_(model.bias)
    out = model(data("cpu", 3, 4))
    out.sum().backward()
    with block():
        again = model(data("cpu", 3, 4))
    return out, again, model.weight.grad, isinstance(model.weight, nn.Parameter), write_and_read(model.state_dict())


@case
def versions_guard_the_backward(block):
    x = data("cpu", 3, grad=True)
    with block():
        y = x.exp()
        y.mul_(2)
        y.sum().backward()


@case
def plain_versions_guard_the_backward(block):
    w = data("cpu", 3)
    x = data("cpu", 3, grad=True)
    with block():
        y = (x * w).sum()
        w.add_(1)
    y.backward()


@pytest.mark.parametrize("workers", [0, 2])
def test_data_loader_with_workers_inside(workers):
    x = data("cpu", 8, 3)
    with torchlazy.lazy_mode():
        x.add_(1)
        loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x), batch_size=4, num_workers=workers)
        rows = [batch * 2 for (batch,) in loader]
    same(torch.cat(rows), x * 2)


@case
def subclass_parameters_and_buffers(block):
    class Bias(nn.Parameter):
        pass

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.bias = Bias(torch.ones(3))
            self.shift = nn.Buffer(torch.ones(3))

        def forward(self, x):
            self.shift.add_(1)
            return x * self.bias + self.shift

    model = Net()
    with block():
        with torch.no_grad():
            model.bias.mul_(3)
        out = model(data("cpu", 2, 3))
        out.sum().backward()
        model.shift.mul_(2)
    return out, model.bias.grad, model.bias, model.shift


@case
def structure_in_place(block):
    x = data("cpu", 2, 3)
    y = data("cpu", 3)
    with block():
        x.add_(1)
        x.t_()
        x.mul_(2)
        x.unsqueeze_(0)
        y.set_(x)
        y.add_(1)
        z = torch.empty(0)
        z.set_(x.untyped_storage(), 1, (2,), (2,))
        z.mul_(3)
    return x, y, z, x.stride()


@case
def moved_and_deleted(block):
    """Memory that is freed inside the block may be given to another tensor: nothing old may be written there."""
    kept = []
    with block():
        for step in range(20):
            x = torch.zeros(64)
            x.add_(step)
            kept.append(x.sum())
            plain = torch.from_numpy(np.full(64, step, np.float32))
            plain.mul_(2)
            kept.append(plain[0])
            del x, plain
    return kept


@case
def gradient_written_by_hand(block):
    model = two_layers()
    with block():
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        model[0].weight.grad.mul_(2)
        torch.optim.SGD(model.parameters(), 0.1).step()
    model[0].weight.grad.add_(1)
    torch.optim.SGD(model.parameters(), 0.1).step()
    return model.state_dict()
