"""`lazy_mode()` over ordinary CPU tensors: what happens in the block is what eager does, for every reader.

Each case is a function of a block's factory: `torchlazy.lazy_mode`, or a block that does nothing.
"""

from __future__ import annotations

import contextlib
import copy
import ctypes
import io
import pickle

import numpy as np
import pytest
import torch
import torchlazy
from torch import nn
from torch.nn import functional as F

from tests.lazy.compare import Cases, data, ints
from tests.lazy.models import built, convnet, mlp, same

case = Cases()
eager_block = contextlib.nullcontext


@case.parametrize()
@pytest.mark.parametrize("tiers", ["on", "off"])
def test_as_in_eager(f, tiers):
    torchlazy.config.tiers = tiers
    torchlazy.config.strict = True
    torchlazy.config.rng = "eager"  # the cases draw their data inside the block too
    want_error = have_error = want = have = None
    try:
        want = f(eager_block)
    except Exception as error:
        want_error = error
    try:
        have = f(torchlazy.lazy_mode)
    except Exception as error:
        if want_error is None:
            raise
        have_error = error
    assert type(have_error) is type(want_error)
    if want_error is None:
        same(have, want, rtol=1e-4, atol=1e-5)


def address_read(tensor: torch.Tensor) -> list[float]:
    """The floats at the tensor's address, read without torch."""
    pointer = ctypes.cast(tensor.data_ptr(), ctypes.POINTER(ctypes.c_float))
    return [pointer[i] for i in range(tensor.numel())]


# ---------------------------------------------------------------- training


def two_layers() -> nn.Module:
    return built(lambda: nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)), "cpu")


def train(block, model, make_optimizer, steps=4, around="step", x_shape=(6, 4)):
    optimizer = make_optimizer(model.parameters())
    losses = []
    outer = block() if around == "all" else contextlib.nullcontext()
    with outer:
        for step in range(steps):
            with block() if around == "step" else contextlib.nullcontext():
                optimizer.zero_grad()
                loss = model(data("cpu", *x_shape, seed=step)).square().mean()
                loss.backward()
                optimizer.step()
                losses.append(loss.detach())
    return losses, model.state_dict(), optimizer.state_dict()["state"]


@case
def training_a_step_a_block(block):
    return train(block, two_layers(), lambda p: torch.optim.SGD(p, 0.1, momentum=0.9))


@case
def training_in_one_block(block):
    return train(block, two_layers(), lambda p: torch.optim.AdamW(p, 0.01), around="all")


@case
def training_with_batch_norm(block):
    return train(block, mlp(), lambda p: torch.optim.Adam(p, 0.01))


@case
def training_a_convnet(block):
    return train(block, convnet(), lambda p: torch.optim.SGD(p, 0.05), steps=3, x_shape=(4, 1, 8, 8))


@case
def resumed_from_a_checkpoint(block):
    with block():
        torch.manual_seed(3)
        model, file = two_layers(), io.BytesIO()
        optimizer = torch.optim.Adam(model.parameters(), 0.01)
        generator = torch.Generator().manual_seed(5)
        torch.save((model.state_dict(), optimizer.state_dict(), torch.get_rng_state(), generator.get_state()), file)
        file.seek(0)
        for _ in range(2):
            weights, state, of_torch, of_generator = torch.load(file, map_location="cpu", weights_only=True)
            file.seek(0)
            model.load_state_dict(weights)
            optimizer.load_state_dict(state)
            torch.set_rng_state(of_torch.clone())
            generator.set_state(of_generator)
            x = torch.randn(4, next(model.parameters()).shape[1]) + torch.rand(1, generator=generator)
            model(x).square().mean().backward()
            optimizer.step()
    return list(model.state_dict().values())


@case
def optimizer_outside(block):
    model = two_layers()
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    for step in range(3):
        with block():
            optimizer.zero_grad()
            loss = model(data("cpu", 6, 4, seed=step)).square().mean()
            loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
    return model.state_dict(), [p.grad for p in model.parameters()]


@case
def backward_outside(block):
    model = two_layers()
    x = data("cpu", 6, 4, grad=True)
    with block():
        loss = model(x).square().mean()
    loss.backward()
    return loss, x.grad, [p.grad for p in model.parameters()]


@case
def forward_outside_backward_inside(block):
    model = two_layers()
    x = data("cpu", 6, 4, grad=True)
    loss = model(x).square().mean()
    with block():
        loss.backward()
        norm = x.grad.norm()
    return norm, x.grad, [p.grad for p in model.parameters()]


@case
def gradients_gathered_across_blocks(block):
    model = two_layers()
    for seed in range(3):
        with block() if seed != 1 else contextlib.nullcontext():
            model(data("cpu", 6, 4, seed=seed)).square().mean().backward()
    return [p.grad for p in model.parameters()]


@case
def zeroed_gradients(block):
    model = two_layers()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for seed in range(3):
        with block():
            optimizer.zero_grad(set_to_none=False)
            model(data("cpu", 6, 4, seed=seed)).square().mean().backward()
            optimizer.step()
    return model.state_dict()


@case
def data_loader_and_metrics(block):
    x, y = data("cpu", 12, 4), ints("cpu", 12, high=2)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=4)
    model = two_layers()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    total, right = 0.0, 0
    with block():
        for a, b in loader:
            optimizer.zero_grad()
            out = model(a)
            loss = F.cross_entropy(out, b)
            loss.backward()
            optimizer.step()
            total += loss.item() * len(a)
            right += (out.argmax(1) == b).sum().item()
    return round(total, 4), right, model.state_dict()


def test_parameters_keep_their_memory_and_objects():
    model = two_layers()
    before = [(id(p), p.data_ptr(), type(p)) for p in model.parameters()]
    train(torchlazy.lazy_mode, model, lambda p: torch.optim.AdamW(p, 0.01))
    train(torchlazy.lazy_mode, model, lambda p: torch.optim.SGD(p, 0.01), around="all")
    assert [(id(p), p.data_ptr(), type(p)) for p in model.parameters()] == before


def test_a_step_is_one_program():
    torchlazy.config.tiers = "off"
    torchlazy.config.strict = True
    model = two_layers()
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    for step in range(5):
        if step == 2:
            torchlazy.reset_metrics()
        with torchlazy.lazy_mode():
            optimizer.zero_grad()
            model(data("cpu", 6, 4)).square().mean().backward()
            optimizer.step()
    counts = torchlazy.metrics()
    assert counts["cuts"] == {"optimizer step": 3}, counts["cuts"]
    assert (counts["hits"], counts["compiles"]) == (3, 0)


# ---------------------------------------------------------------- readers


READERS = {
    "tolist": lambda t: t.tolist(),
    "numpy": lambda t: t.numpy().tolist(),
    "array": lambda t: np.asarray(t).tolist(),
    "address": address_read,
    "pickle": lambda t: pickle.loads(pickle.dumps(t)),
    "save": lambda t: _saved(t),
    "repr": repr,
    "str": lambda t: f"{t}",
    "format": lambda t: f"{t[0]:.3f}",
    "deepcopy": lambda t: copy.deepcopy(t),
    "copy": lambda t: copy.copy(t),
    "storage": lambda t: bytes(t.untyped_storage()[i] for i in range(8)),
    "typed storage": lambda t: list(t.storage())[:3],
    "dlpack": lambda t: torch.from_dlpack(t).tolist(),
    "numpy dlpack": lambda t: np.from_dlpack(t).tolist(),
    "item": lambda t: t[1].item(),
    "iterate": lambda t: [float(v) for v in t],
    "bool": lambda t: bool((t > 0).any()),
    "equal": lambda t: torch.equal(t, t + 0),
    "len and in": lambda t: (len(t), 0.0 in t),
    "clone": lambda t: t.clone(),
}


def _saved(tensor):
    file = io.BytesIO()
    torch.save({"t": tensor}, file)
    file.seek(0)
    return torch.load(file)["t"]


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("of", ["plain", "made inside"])
@pytest.mark.parametrize("when", ["inside", "after"])
def test_readers(reader, of, when):
    read = READERS[reader]

    def run(block):
        t = data("cpu", 4)
        found = []
        with block():
            t.add_(1)
            value = t if of == "plain" else t * 2
            if when == "inside":
                found.append(read(value))
                value.mul_(3)
                found.append(read(value))
        found += [read(value), read(t)]
        return found

    have, want = run(torchlazy.lazy_mode), run(eager_block)
    if reader in ("repr", "str"):
        assert have == want
    else:
        same(have, want)


@case
def module_readers_inside(block):
    model = two_layers()
    with block():
        with torch.no_grad():
            model[0].weight.mul_(2)
        saved = _saved(model.state_dict())
        twin = copy.deepcopy(model)
        pickled = pickle.loads(pickle.dumps(model))
        model[0].weight.data.mul_(2)
    return saved, twin.state_dict(), pickled.state_dict(), model.state_dict()


# ---------------------------------------------------------------- views and memory


@case
def views_made_outside(block):
    base = data("cpu", 4, 6)
    row, column, flat = base[1], base[:, 2], base.view(-1)
    with block():
        row.add_(1)
        column.mul_(2)
        flat[0] = 7
        total = base.sum()
        base.sub_(0.5)
    return base, row, column, flat, total


@case
def views_made_inside(block):
    base = data("cpu", 4, 6)
    with block():
        row = base[1]
        row.add_(1)
        base.t()[2].exp_()
        copy_ = row.clone()
        base.mul_(2)
    row.add_(1)
    return base, row, copy_


@case
def views_shared_between_blocks(block):
    base = data("cpu", 4, 6)
    with block():
        inside = base[2:]
        inside.add_(1)
    base.mul_(2)
    outside = base[3]
    with block():
        inside.sub_(1)
        outside.mul_(3)
    outside.add_(1)
    return base, inside, outside


@case
def made_inside_viewed_outside(block):
    with block():
        x = data("cpu", 4, 6) * 1
    view = x[1:3]
    view.add_(1)
    with block():
        x.mul_(2)
        y = view + 1
    view.zero_()
    return x, y, view


@case
def numpy_memory(block):
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    tensor = torch.from_numpy(array)
    with block():
        tensor.add_(1)
        tensor[0].mul_(2)
    first = array.copy().tolist()
    array += 1  # seen by the next block
    with block():
        y = tensor * 2
    return first, y, array.tolist(), tensor


@case
def numpy_view_of_a_result(block):
    with block():
        x = data("cpu", 3) * 2
    array = x.numpy()
    array[0] = 5
    with block():
        x.add_(1)
    return array.tolist(), x


@case
def storage_with_an_offset(block):
    base = data("cpu", 10)
    part = base[3:7]
    with block():
        part.fill_(1)
        y = base.sum()
    return base, y


@case
def expanded_and_strided(block):
    base = data("cpu", 3, 1)
    with block():
        wide = base.expand(3, 4)
        y = wide * 2
        base.add_(1)
        z = wide.sum()
        window = torch.as_strided(base, (2,), (1,), 1)
        window.mul_(2)
    return base, y, z, window


@case
def other_dtypes(block):
    x = torch.arange(4, dtype=torch.int32)
    with block():
        floats = x.view(torch.float32)
        doubled = x * 2
        flags = x > 1
        x[flags] = 9
    return x, doubled, flags, floats.view(torch.int32)


@case
def data_attribute_and_set(block):
    p = nn.Parameter(data("cpu", 3))
    with block():
        p.data.add_(1)
        p.data = p.data * 2
        y = p * 1
    p.data.sub_(1)
    return p, y


@case
def resized(block):
    x = data("cpu", 4)
    with block():
        x.add_(1)
        x.resize_(2, 2)
        x.mul_(2)
    return x


@case
def out_arguments(block):
    x, out = data("cpu", 4), torch.empty(4)
    with block():
        torch.add(x, 1, out=out)
        torch.mul(out, 2, out=x)
    return x, out


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


def test_the_block_ends_when_it_is_left():
    with torchlazy.lazy_mode():
        inside = torch.ones(2)
        assert torchlazy.is_lazy(inside) and inside.device.type == "cpu"
    assert not torchlazy.is_lazy(torch.ones(2))
    assert not torchlazy.is_lazy(torch.ones(2) + 1)
    assert inside.is_cpu and not inside.is_cuda


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
    return out, again, model.weight.grad, isinstance(model.weight, nn.Parameter), _saved(model.state_dict())


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


def test_recurrent_layers_without_gradients():
    """oneDNN's operator for them takes sizes as numbers: it must not be tried on tensors of other sizes."""
    for layer in (torch.nn.LSTM(8, 16, batch_first=True), torch.nn.LSTM(4, 8, num_layers=2, bidirectional=True)):
        x = torch.randn(3, 5, layer.input_size)
        with torch.no_grad():
            want = layer(x)[0]
            with torchlazy.lazy_mode():
                got = layer(x)[0]
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("options", [{}, {"num_layers": 2, "bidirectional": True}, {"bias": False}])
def test_recurrent_layers_in_training(options):
    """How large oneDNN's workspace is, only the kernel knows; the fake kernel promises none."""
    layer = torch.nn.LSTM(4, 6, batch_first=True, **options)
    for length in (3, 3, 5):
        x = torch.randn(2, length, 4)
        found = []
        for mode in (contextlib.nullcontext(), torchlazy.lazy_mode()):
            layer.zero_grad()
            with mode:
                out, (hidden, cell) = layer(x)
                (out.square().sum() + hidden.sum() + cell.sum()).backward()
            found.append([out.detach(), *(p.grad for p in layer.parameters())])
        torch.testing.assert_close(found[1], found[0])


def _padded(layout):
    tensors = [torch.ones(2, 3), torch.full((4, 3), 2.0)]
    nested = torch.nested.nested_tensor(tensors, layout=layout)
    return torch.nested.to_padded_tensor(nested * 2, 0.5)


def _through_a_layer():
    torch.manual_seed(0)
    layer = nn.Linear(3, 2)
    nested = torch.nested.nested_tensor([torch.ones(2, 3), torch.full((4, 3), 2.0)])
    padded = torch.nested.to_padded_tensor(layer(nested), 0.0)
    padded.square().sum().backward()
    return padded.detach(), layer.weight.grad


def _quantized():
    found = torch.quantize_per_tensor(torch.linspace(-1, 1, 5) * 2, 0.1, 0, torch.qint8)
    return found.int_repr(), found.dequantize() + 1


def _sparse():
    sparse = (torch.eye(3).to_sparse() * 2).coalesce()
    weight = torch.ones(3, 2, requires_grad=True)
    torch.sparse.mm(sparse, weight).square().sum().backward()
    return sparse.values() + 1, sparse.to_dense(), sparse.indices(), weight.grad


def _packed(total_length=None, batch_first=False):
    torch.manual_seed(0)
    layer = nn.GRU(3, 4, bidirectional=True)
    x = torch.randn(5, 4, 3, requires_grad=True)
    packed, _ = layer(nn.utils.rnn.pack_padded_sequence(x, [5, 3, 3, 1]))
    padded, lengths = nn.utils.rnn.pad_packed_sequence(packed, batch_first, 0.25, total_length)
    padded.square().sum().backward()
    return padded.detach(), lengths, x.grad, layer.weight_ih_l0.grad


def _split(method):
    x = torch.arange(20.0).reshape(5, 4) * 2
    points = torch.tensor([1, 2]) + 1
    split = x.tensor_split if method else (lambda *args, **kwargs: torch.tensor_split(x, *args, **kwargs))
    sections = torch.tensor(2)
    return *split(points), *split(points, dim=1), *split(sections, 1), *split([1, 3]), *split(3)


def _written_out():
    made, rank, wider = torch.zeros(4, 6), torch.zeros((), dtype=torch.int64), torch.zeros(2, 2, dtype=torch.float64)
    torch.kron(torch.arange(4.0).reshape(2, 2), torch.ones(2, 3), out=made)
    torch.linalg.matrix_rank(torch.eye(3), out=rank)
    torch.kron(torch.ones(2, 1), torch.ones(1, 2), out=wider)
    return (
        made * 1,
        rank * 1,
        wider,
        torch.kron(torch.ones(2), torch.ones(2)),
        torch.linalg.matrix_rank(torch.ones(3, 3)),
    )


OTHER_KINDS = {
    "written_out": _written_out,
    "split_at_a_tensor": lambda: _split(False),
    "method_split_at_a_tensor": lambda: _split(True),
    "nested": lambda: _padded(torch.strided),
    "jagged": lambda: _padded(torch.jagged),
    "nested_through_a_layer": _through_a_layer,
    "quantized": _quantized,
    "sparse": _sparse,
    "packed": _packed,
    "packed_longer": lambda: _packed(total_length=7, batch_first=True),
}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("kind", OTHER_KINDS)
def test_other_kinds_of_tensors_take_part(kind):
    torchlazy.config.rng = "eager"
    want = OTHER_KINDS[kind]()
    for _ in range(3):
        with torchlazy.lazy_mode():
            have = OTHER_KINDS[kind]()
        same(have, want)


def test_tensors_made_after_the_same_ones_on_the_lazy_device() -> None:
    for _ in range(2):  # the second is followed
        torch.ones(4, device="lazy").add_(1)
        torchlazy.sync()
    with torchlazy.lazy_mode():
        made = torch.ones(4, device="cpu")
        assert made.device.type == "cpu"
        later = made.add_(1)
    assert later.device.type == "cpu" and later.tolist() == [2.0] * 4


def test_a_storage_that_is_copied_is_there_at_once() -> None:
    """Files are written from the storage's own memory, which no operator reads (for a GPU from a copy on the host)."""

    def values(storage: torch.UntypedStorage) -> list[float]:
        return list((ctypes.c_float * 4).from_address(storage.data_ptr()))

    with torchlazy.lazy_mode():
        t = torch.arange(4.0) * 2
        copy = t.untyped_storage().clone()
        assert values(copy) == [0, 2, 4, 6]
        t.add_(1)
        assert values(torch.UntypedStorage(16).copy_(t.untyped_storage())) == [1, 3, 5, 7]
        assert values(copy) == [0, 2, 4, 6]
