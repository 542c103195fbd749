"""Copies: between devices, with casts, broadcasts and overlap; clones and memory formats."""

from __future__ import annotations

import copy
import io
import pickle

import numpy
import pytest
import torch
import torchlazy

from tests.lazy.compare import Cases, check, data, ints

case = Cases()


@case.parametrize()
def test_as_in_eager(f, tier):
    check(f)


@case
def host_to_device(device):
    x = torch.zeros(3, 4, device=device)
    x.copy_(data("cpu", 3, 4))
    x[1].copy_(data("cpu", 4, seed=1))
    x[:, ::2].copy_(ints("cpu", 3, 2))
    x[2] = data("cpu", 4, seed=2)
    return x


@case
def host_source_changes_afterwards(device):
    host = data("cpu", 3)
    x = torch.zeros(3, device=device)
    x.copy_(host)
    y = host.to(device) if device != "cpu" else host.clone()
    z = x + 1
    host.zero_()
    return x, y, z


@case
def device_to_host(device):
    x = data(device, 3, 4)
    host = torch.zeros(3, 4)
    host.copy_(x + 1)
    part = torch.zeros(3, 8)
    part[:, ::2].copy_(x * 2)
    whole = torch.zeros(3, 4, dtype=torch.float64)
    whole.copy_(x.t().contiguous().t())
    return host, part, whole


@case
def device_to_host_twice(device):
    x = data(device, 3)
    a = x.cpu().clone()
    x.add_(1)
    b = x.to("cpu", torch.float64)
    return a, b


@case
def casts(device):
    x = data(device, 3, 4) * 10
    return [x.to(t) for t in (torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.int64, torch.bool)] + [
        x.int().float(),
        x.half().double(),
        x.to(torch.complex64),
        x.long().to(torch.uint8),
    ]


@case
def copy_with_casts_and_broadcast(device):
    x = torch.zeros(3, 4, device=device, dtype=torch.int64)
    x.copy_(data(device, 4) * 10)
    y = torch.zeros(2, 3, 4, device=device)
    y.copy_(x)
    y[0].copy_(torch.tensor(2.5, device=device))
    return x, y


@case
def copy_of_the_wrong_shape_is_an_error(device):
    torch.zeros(3, device=device).copy_(data(device, 4))


@case
def host_copy_of_the_wrong_shape_is_an_error(device):
    torch.zeros(3, device=device).copy_(data("cpu", 4))


@case
def copy_to_itself(device):
    x = data(device, 3, 4)
    x.copy_(x)
    y = data(device, 4, 4)
    y.copy_(y.clone().t())
    return x, y


@case
def copies_of_copies(device):
    x = data(device, 3)
    a = x.clone()
    b = a.to(torch.float32, copy=True)
    a.add_(1)
    c = torch.empty_like(b).copy_(a)
    a.zero_()
    return x, a, b, c


@case
def clones_keep_layout(device):
    x = data(device, 2, 3, 4)
    p = x.permute(2, 0, 1)
    return (
        p.clone(),
        x[:, ::2].clone(),
        x.expand(5, 2, 3, 4).clone(),
        p.clone(memory_format=torch.contiguous_format),
        p[1:].clone(),
    )


@case
def channels_last(device):
    x = data(device, 2, 3, 4, 5)
    y = x.to(memory_format=torch.channels_last)
    z = y.contiguous()
    w = x.contiguous(memory_format=torch.channels_last)
    return (
        y,
        z,
        w,
        y + 1,
        y.clone(),
        y.relu(),
        torch.empty_like(y).zero_(),
        y.half(),
        w.is_contiguous(memory_format=torch.channels_last),
    )


@case
def channels_last_3d(device):
    x = data(device, 2, 3, 2, 2, 2).to(memory_format=torch.channels_last_3d)
    return x, x * 2, x.to(torch.float64)


@case
def to_with_device_and_format(device):
    host = data("cpu", 2, 3, 4, 5)
    x = host.to(device, memory_format=torch.channels_last)
    return x, host.permute(0, 2, 3, 1).to(device), x.cpu()


@case.ignoring("version")
def deepcopies(device):
    x = data(device, 3, grad=True)
    (x * x).sum().backward()
    y = copy.deepcopy(x)
    base = data(device, 4)
    pair = copy.deepcopy([base, base])
    model = copy.deepcopy(torch.nn.Linear(2, 2, device=device).requires_grad_(False))
    torch.nn.init.ones_(model.weight)
    x.grad.zero_()
    return y, y.grad, pair[0] is pair[1], model.weight


@case.ignoring("version")
def pickles(device):
    x = data(device, 3, 4) + 1
    y = pickle.loads(pickle.dumps(x.t()))
    p = pickle.loads(pickle.dumps(torch.nn.Parameter(data(device, 3))))
    return y, p, isinstance(p, torch.nn.Parameter), str(y.device) == device


@case.ignoring("version")
def saves_and_loads(device):
    x = data(device, 3, 4) * 2
    file = io.BytesIO()
    torch.save({"x": x, "n": 3}, file)
    file.seek(0)
    back = torch.load(file)
    file.seek(0)
    mapped = torch.load(file, map_location=device)
    host_file = io.BytesIO()
    torch.save([x.cpu()], host_file)
    host_file.seek(0)
    moved = torch.load(host_file, map_location=torch.device(device))
    return back["x"], mapped["x"], moved, str(mapped["x"].device) == device, str(moved[0].device) == device


@case
def numpy_round_trip(device):
    x = data(device, 3, 4)
    array = (x + 1).numpy()
    back = torch.from_numpy(array).to(device)
    return back, numpy.asarray(x).tolist(), numpy.add(x.numpy(), 1).tolist(), float(numpy.float32(x[0, 0].item()))


@case
def numpy_of_a_tensor_with_grad_is_an_error(device):
    data(device, 3, grad=True).numpy()


@case
def list_round_trips(device):
    x = data(device, 2, 3)
    return (
        x.tolist(),
        [float(v) for v in x[0]],
        [row.tolist() for row in x],
        x[0, 0].item(),
        len(x),
        3 in ints(device, 9),
    )


@case
def tensors_from_lazy_values(device):
    x = data(device, 3)
    return (
        torch.tensor([x[0], x[1]]),
        torch.stack(list(x)),
        torch.as_tensor(x) is x,
        torch.tensor(x[0].item(), device=device),
    )


@case
def type_conversions(device):
    x = data(device, 3)
    return (
        x.type(torch.float64),
        x.double(),
        x.type_as(ints(device, 1)),
        x.bool(),
        x.byte(),
        x.char(),
        x.short(),
        x.bfloat16(),
    )


@pytest.mark.parametrize("length", [1, 9, 12, 17, 30])
def test_text_breaks_its_lines_where_eager_does(length):
    """But for the device, which is named on the lazy device alone."""

    def texts() -> list[str]:
        x = torch.arange(float(length)).requires_grad_()
        return [repr(x), repr(x * 2), repr(torch.nn.Parameter(x.detach())), repr((x * 2).double())]

    want = texts()
    with torchlazy.lazy_mode():
        assert texts() == want


@case.ignoring("version")
def deep_copies_share_memory_as_their_originals_do(device):
    x = data(device, 6)
    views = {"part": x[2:], "whole": x, "turned": x.view(2, 3).t(), "bits": x.view(torch.int32), "again": [x, x[0]]}
    copied = copy.deepcopy(views)
    copied["whole"].mul_(10)
    copied["part"][0] = -1
    wide = copy.deepcopy(data(device, 4, 1).expand(4, 3))
    return copied, copied["again"][0] is copied["whole"], x, wide


@case.ignoring("version")
def deep_copies_of_leaves(device):
    x = data(device, 2, grad=True)
    (x * 2).sum().backward()
    x.note = 3
    copied = copy.deepcopy([x, torch.nn.Parameter(x.detach())])
    return copied, copied[0].grad, copied[0].note


@case
def data_must_be_a_tensor(device):
    data(device, 2).data = True


@pytest.mark.usefixtures("operator_by_operator")
def test_deep_copies_outside_of_the_mode_that_made_the_tensors():
    """They are ordinary tensors then: an optimizer's state after a compiled step, views of one memory."""
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())

    @torchlazy.compile
    def step(x):
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    for number in range(1, 4):
        step(torch.ones(1, 3))
        copied = copy.deepcopy(optimizer.state_dict())["state"][0]
        assert copied["step"] == number
        torch.testing.assert_close(copied["exp_avg"], optimizer.state[model.weight]["exp_avg"])
    with torchlazy.lazy_mode():
        held = torch.arange(6.0).view(2, 3)
        parts = [held, held[1], held.t()]
    for copies in (copy.deepcopy(parts), copy.deepcopy(parts[::-1])[::-1]):
        copies[1].add_(10)
        assert copies[0].tolist() == [[0, 1, 2], [13, 14, 15]] and copies[2].tolist() == [[0, 13], [1, 14], [2, 15]]
    assert held.tolist() == [[0, 1, 2], [3, 4, 5]]
