"""Storages and views: writes through any window are seen through every other, as in eager."""

from __future__ import annotations

import random

import pytest
import torch
import torchlazy
from torchlazy.lazy.trace.geometry import geometry_like, overlap

from tests.lazy.compare import Cases, check, data, ints

case = Cases()


@case.parametrize()
def test_as_in_eager(f, tier):
    check(f)


@case
def inplace_through_view_of_view(device):
    x = data(device, 4, 6)
    v = x[1:][:, ::2]
    v.mul_(2)
    return x, v


@case
def inplace_on_base_seen_by_views(device):
    x = data(device, 4, 6)
    a, b = x[1:], x.t()
    c = b[2:4]
    x.add_(1)
    return a, b, c, x


@case
def interleaved_writes(device):
    x = data(device, 4, 6)
    a, b = x[:, 1:3], x[2]
    a.add_(1)
    b.mul_(3)
    y = a + 1
    x.sub_(b.clone())
    a.copy_(y)
    return a, b, x, y


@case
def partial_overlap_is_an_error(device):
    x = data(device, 8)
    x[1:].add_(x[:-1])


@case
def partial_overlap_of_out_is_an_error(device):
    x = data(device, 8)
    torch.mul(x[1:], 2, out=x[:-1])


@case
def columns_of_one_storage(device):
    x = data(device, 4, 6)
    x[:, 0].add_(x[:, 1])
    x[:, 2:4] *= x[:, 4:]
    x[1, :3] = x[2, 3:]
    x.view(-1)[:12].copy_(x.view(-1)[12:])
    return x


@case
def chunk_split_unbind(device):
    x = data(device, 6, 4)
    chunks = x.chunk(3)
    chunks[1].zero_()
    left, right = x.split([1, 3], dim=1)
    right.add_(chunks[0].sum())
    rows = x.unbind(0)
    return x, list(chunks), left, right, list(rows)


@case
def unsafe_chunk_and_hsplit(device):
    x = data(device, 4, 6)
    a, b = torch.hsplit(x, 2)
    c, d = torch.vsplit(x, 2)
    a.mul_(2)
    c.add_(1)
    return a, b, c, d, x, list(torch.tensor_split(x, 4, dim=1))


@case
def select_and_narrow(device):
    x = data(device, 3, 4, 5)
    x.select(1, 2).fill_(7)
    x.narrow(2, 1, 3).add_(x.select(0, 0).narrow(1, 1, 3).clone())
    x.select(-1, -1).neg_()
    return x


@case
def diagonals(device):
    x = data(device, 4, 5)
    x.diagonal().add_(10)
    x.diagonal(1).zero_()
    y = data(device, 2, 3, 3)
    torch.diagonal(y, dim1=-2, dim2=-1).fill_(1)
    return x, x.diagonal(-2), y, torch.diag_embed(y[0])


@case
def unfolds(device):
    x = data(device, 8)
    windows = x.unfold(0, 3, 2)
    y = windows * 2
    x.add_(1)
    return windows, y, x


@case
def unfold_without_overlap_written(device):
    x = data(device, 3, 8)
    x.unfold(1, 2, 4).mul_(5)
    return x


@case
def expand_reads_after_write(device):
    x = data(device, 3, 1)
    wide = x.expand(3, 4)
    x.mul_(2)
    return wide, wide + 1, x.expand(2, 3, 4), x.expand_as(wide)


@case
def expand_inplace_is_an_error(device):
    data(device, 3, 1).expand(3, 4).add_(1)


@case
def inplace_shape_mismatch_is_an_error(device):
    data(device, 3, 1).add_(data(device, 3, 4))


@case
def transposed_writes(device):
    x = data(device, 4, 6)
    x.t().copy_(data(device, 6, 4, seed=1))
    x.transpose(0, 1)[1:3].add_(1)
    y = data(device, 2, 3, 4)
    y.permute(2, 0, 1)[::2].mul_(-1)
    y.movedim(0, -1).add_(1)
    return x, y


@case
def strided_writes(device):
    x = data(device, 5, 8)
    x[::2, 1::3] = 0
    x[1:4:2].add_(data(device, 2, 8, seed=2))
    x[..., -1] = x[..., 0]
    return x


@case
def slice_assignment(device):
    x = data(device, 4, 6)
    x[0] = 1
    x[1] = data(device, 6, seed=1)
    x[:, 2] = data(device, 4, seed=2)
    x[2:, 3:] = data(device, 3, seed=3)
    x[1:3, 1:3] = torch.tensor(5)
    x[3, 5] = -1.5
    x[None, 2] = x[3]
    return x


@case
def slice_assignment_casts(device):
    x = ints(device, 4, 6)
    x[1:] = data(device, 6).mul(10)
    x[0, 0] = True
    y = data(device, 3, dtype=torch.bfloat16)
    y[1:] = data(device, 2, dtype=torch.float64)
    return x, y


@case
def slice_assignment_wrong_shape(device):
    data(device, 4, 6)[1:] = data(device, 5)


@case
def augmented_slice(device):
    x = data(device, 4, 6)
    x[1:3] += 1
    x[:, 0] *= x[:, 1]
    x[0] -= x[1]
    x[2, 3] /= 2
    return x


@case
def self_overlapping_copy(device):
    x = data(device, 8)
    y = x.clone()
    x[:4] = x[4:]
    y[1:].copy_(y[:-1].clone())
    return x, y


@case
def as_strided_reads(device):
    x = data(device, 10)
    windows = x.as_strided((4, 3), (2, 1))
    x[3] = 100
    return windows, x.as_strided((2, 2), (1, 2), 3), torch.as_strided(x, (3,), (0,), 5)


@case
def as_strided_of_a_view_is_of_the_storage(device):
    x = data(device, 4, 6)
    v = x[2:, 1:]
    y = v.as_strided((3,), (2,), 1)
    z = v.as_strided((3,), (2,))
    y.add_(1)
    return x, v, y, z


@case
def as_strided_overlap_written_by_fill(device):
    x = data(device, 10)
    x.as_strided((4, 3), (2, 1)).fill_(3)
    return x


@case
def as_strided_overlap_inplace_is_an_error(device):
    data(device, 10).as_strided((4, 3), (2, 0)).add_(1)


@case
def as_strided_out_of_storage_is_an_error(device):
    return data(device, 10).as_strided((4, 3), (3, 1), 5).sum()


@case
def detach_aliases(device):
    x = data(device, 3, grad=True)
    d = x.detach()
    d.add_(1)
    return x, d, x * 2, x.detach()[1:]


@case
def view_dtype(device):
    x = data(device, 4, 6)
    bits = x.view(torch.int32)
    y = bits + 0
    x.neg_()
    return bits, y, x.view(torch.uint8), x.view(torch.float64), x[1:].view(torch.int32)


@case
def view_dtype_written(device):
    x = data(device, 4, 6)
    x.view(torch.int32).bitwise_and_(-65536)
    y = data(device, 8)
    y[2:6].view(torch.int32).zero_()
    return x, y


@case
def view_dtype_of_other_size_written(device):
    x = data(device, 4, 6)
    x.view(torch.uint8)[:, 3::4] ^= 128
    return x


@case
def view_dtype_not_divisible_is_an_error(device):
    return data(device, 3).view(torch.float64)


@case
def complex_parts(device):
    z = torch.complex(data(device, 3), data(device, 3, seed=1))
    z.real.add_(1)
    z.imag.mul_(2)
    pairs = torch.view_as_real(z)
    pairs[0] = 7
    return z, z.real, z.imag, pairs, torch.view_as_complex(data(device, 3, 2)), z.abs(), z.conj(), (z * z.conj()).real


@case
def identity_changes(device):
    x = data(device, 1, 4, 6)
    y = x[0]
    x.squeeze_()
    x.t_()
    x.unsqueeze_(1)
    x.transpose_(0, 2)
    x.add_(1)
    z = data(device, 2, 3, 4)
    z.swapaxes_(0, 1)
    z.swapdims_(1, 2)
    z.squeeze_(0)
    return x, y, z


@case
def as_strided_inplace(device):
    x = data(device, 4, 6)
    y = x.view(-1)
    x.as_strided_((2, 2), (3, 1), 1)
    x.zero_()
    return x, y


@case
def data_get_and_set(device):
    x = data(device, 3, 4, grad=True)
    x.data.add_(1)
    y = data(device, 3, 4, seed=1)
    old = x.data
    x.data = y
    y.mul_(2)
    x.data = x.data * 1.5
    return x, y, old


@case
def data_set_of_another_shape(device):
    x = data(device, 3, 4)
    x.data = data(device, 5)
    x.data[1:] = 0
    return x


@case
def set_from_tensor(device):
    x, y = data(device, 3), data(device, 4, 5, seed=1)
    x.set_(y)
    x[0] = 9
    return x, y


@case
def set_from_tensor_with_geometry(device):
    x, y = data(device, 3), data(device, 4, 5, seed=1)
    x.set_(y, 2, (2, 3), (5, 1))
    x.add_(1)
    return x, y


@case
def set_to_nothing(device):
    x = data(device, 3)
    x.set_()
    return x


@case
def resizes(device):
    x = data(device, 2, 6)
    x.resize_(3, 2)
    y = data(device, 4)
    y.resize_as_(data(device, 2, 2))
    z = data(device, 2)
    z.resize_(4).fill_(2)
    return x, y, z


@case
def resize_of_a_shared_storage(device):
    x = data(device, 8)
    y = x[:6]
    y.resize_(2, 2)
    y.fill_(1)
    return x, y


@case
def resize_with_grad_is_an_error(device):
    data(device, 3, grad=True).resize_(5)


@case
def swap_tensors(device):
    x, y = data(device, 3), data(device, 4, 2, seed=1)
    torch.utils.swap_tensors(x, y)
    x.add_(1)
    return x, y


@case
def versions(device):
    x = data(device, 3, 4)
    v = x[1:]
    d = x.detach()
    seen = [x._version]
    x.add_(1)
    v.mul_(2)
    seen += [x._version, v._version, d._version]
    x.data.add_(1)
    seen += [x._version, v._version]
    x[0] = 1
    x.zero_()
    seen += [x._version, v._version, d._version]
    return seen, x


@case
def bases(device):
    x = data(device, 3, 4)
    v = x[1:].t()
    y = data(device, 3, grad=True)
    w = y.view(3, 1)
    with torch.no_grad():
        u = y[1:]
    return v._base is x, x._base is None, w._base is y, w.is_leaf, v._is_view(), u.requires_grad, (v + 1)._base is None


@case
def leaf_flags(device):
    x = data(device, 3, grad=True)
    y = x * 2
    return x.is_leaf, y.is_leaf, y.detach().is_leaf, y.requires_grad, y.retains_grad, x


@case
def modified_in_place_error(device):
    x = data(device, 3, grad=True)
    y = x.exp()
    z = y * y
    y.add_(1)
    z.sum().backward()


@case
def leaf_in_place_error(device):
    data(device, 3, grad=True).add_(1)


@case
def view_of_leaf_in_place_error(device):
    data(device, 3, grad=True)[0].add_(1)


@case
def unbind_in_place_error(device):
    x = data(device, 3, 2, grad=True) * 1
    x.unbind(0)[0].add_(1)


@case
def gradients_through_in_place_views(device):
    x = data(device, 4, 6, grad=True)
    y = x * 2
    y[1:3].mul_(3)
    y[:, 0] = x[:, 1]
    y.t()[2].add_(y[0, 0])
    (y * y).sum().backward()
    return x.grad + 0, y


@case
def gradients_accumulate_in_place(device):
    x = data(device, 4, grad=True)
    (x * 2).sum().backward()
    grad = x.grad
    (x * x).sum().backward()
    kept = grad is x.grad
    x.grad.zero_()
    return kept, grad, x.grad


@case
def reshape_views_and_copies(device):
    x = data(device, 4, 6)
    a, b = x.reshape(2, 12), x.t().reshape(-1)
    a.add_(1)
    b.zero_()
    return a, b, x, x.flatten(), x.ravel(), x.view(2, 2, 6).flatten(1), x.unflatten(1, (2, 3)), x.view_as(x)


@case.ignoring("storage_offset")
def operators_that_hand_out_their_operand(device):
    y = torch.ops.aten._unsafe_view(data(device, 4, 6)[1:], [18])
    v, w = y[2:8], y[::3]
    y[0] = 5
    v.mul_(2)
    return v, w, y + 1


@case
def contiguous_aliases(device):
    x = data(device, 4, 6)
    y, z = x.contiguous(), x.t().contiguous()
    y.add_(1)
    z.zero_()
    return x, y, z, y is x


@case
def view_of_incompatible_strides_is_an_error(device):
    return data(device, 4, 6).t().view(-1)


@case
def alias_of_an_argument(device):
    x = data(device, 4, 6)
    y = x.to(torch.float32)
    z = x.float()
    w = x.type_as(y)
    y.add_(1)
    return y is x, z is x, w is x, x


@case
def empty_tensors(device):
    x = data(device, 0, 3)
    x.add_(1)
    y = data(device, 4, 6)[4:]
    y.mul_(2)
    return x, y, x.sum(), x.t(), torch.cat([x, data(device, 2, 3)]), x.view(3, 0), y.reshape(-1)


@case
def zero_dim(device):
    x = data(device)
    y = x.view(1, 1)
    y.add_(1)
    z = x.expand(3)
    x.mul_(2)
    x[...] = x + 1
    return x, y, z, x.unsqueeze(0)[0], x.squeeze()


def test_writes_beside_each_other_cut_nothing(tier):
    torchlazy.reset_metrics()
    x = columns_of_one_storage("lazy")
    assert torchlazy.metrics()["cuts"] == {}
    assert x.shape == (4, 6)


@pytest.mark.parametrize("seed", range(300))
def test_overlap_is_certain_where_it_says_no(seed):
    r = random.Random(seed)
    memory = torch.arange(60)

    def window():
        x = memory.view(r.choice([(60,), (6, 10), (3, 4, 5)]))
        for d in range(x.dim()):
            start = r.randrange(x.shape[d])
            x = x[(slice(None),) * d + (slice(start, r.randint(start + 1, x.shape[d]), r.randint(1, 3)),)]
        if x.dim() > 1 and r.random() < 0.5:
            x = x.select(r.randrange(x.dim()), 0)
        return x

    a, b = window(), window()
    touches = bool(set(a.flatten().tolist()) & set(b.flatten().tolist()))
    said = overlap(*(geometry_like(x, torch.device("cpu"), "cpu") for x in (a, b)))
    assert said or not touches


TURNS = {
    "t_": lambda y: y.t_(), "transpose_": lambda y: y.transpose_(0, 1), "unsqueeze_": lambda y: y.unsqueeze_(0),
    "as_strided_": lambda y: y.as_strided_((2, 2), (3, 1)),
}  # fmt: skip


@pytest.mark.usefixtures("device_in_python")
@pytest.mark.parametrize("name", TURNS)
def test_a_shape_changed_in_place_under_a_view_that_is_differentiated_is_refused(name, tier):
    """Torch repeats a view on its base here; of a square matrix the gradient would silently be another one."""
    weight = torch.randn(3, 3, device="lazy", requires_grad=True)
    y = weight * 2
    row = y[0]
    with pytest.raises(RuntimeError, match="views of it are alive"):
        TURNS[name](y)
    row.sum().backward()
    assert weight.grad.tolist() == [[2.0] * 3, [0.0] * 3, [0.0] * 3]


@pytest.mark.parametrize("name", TURNS)
def test_a_shape_changed_in_place_is_differentiated(name, tier):
    def step(device):
        weight = data(device, 3, 3).requires_grad_()
        y = weight * 2
        kept = y * y  # holds y for its backward, as a view does
        TURNS[name](y)
        y[0].mul_(3)  # a view made afterwards
        (y * y).sum().backward()
        return y, kept, weight.grad

    check(step)


@pytest.mark.usefixtures("device_in_python")
@pytest.mark.parametrize("name", TURNS)
@pytest.mark.parametrize("written", ["view", "turned view"])
def test_a_gradient_written_through_a_view_of_an_older_shape_is_refused(name, written, tier):
    """The base has no gradient when it is turned; the write would bring one, repeated on the new shape."""
    weight = torch.randn(3, device="lazy", requires_grad=True)
    base = torch.zeros(3, 3, device="lazy")
    view = base[0] if written == "view" else base[:]
    TURNS[name](base if written == "view" else view)
    view.mul_(2)  # without a gradient all is well
    with torch.no_grad():
        view.mul_(weight.sum())
    with pytest.raises(RuntimeError, match="A view was created in no_grad mode"):
        view.mul_(weight.sum())
    assert not base.requires_grad


def _random_chain(chance: random.Random) -> tuple[list[int], list[tuple[str, int, int]], list[int]]:
    """Sizes, the views to take of a tensor of these sizes, and the shape to ask of the last one."""
    sizes = [chance.choice([1, 1, 2, 3, 4, 6]) for _ in range(chance.randint(1, 4))] + [2]
    steps = [
        (chance.choice(["transpose", "unsqueeze", "squeeze", "half"]), chance.randrange(8), chance.randrange(8))
        for _ in range(chance.randint(0, 4))
    ]
    left = _viewed(torch.empty(sizes, device="meta"), steps).numel()
    shape = []
    while left > 1:
        shape.append(chance.choice([n for n in range(2, left + 1) if left % n == 0]))
        left //= shape[-1]
    while chance.random() < 0.4:
        shape.insert(chance.randint(0, len(shape)), 1)
    return sizes, steps, shape


def _viewed(x: torch.Tensor, steps: list[tuple[str, int, int]]) -> torch.Tensor:
    for kind, a, b in steps:
        if kind == "transpose":
            x = x.transpose(a % x.dim(), b % x.dim())
        elif kind == "unsqueeze":
            x = x.unsqueeze(a % (x.dim() + 1))
        elif kind == "squeeze" and x.dim() > 1:
            x = x.squeeze(a % x.dim())
        elif kind == "half":
            x = x.narrow(a % x.dim(), 0, max(1, x.shape[a % x.dim()] // 2))
    return x


@pytest.mark.parametrize("way", ["device", "mode", "compiled"])
def test_view_refuses_what_eager_refuses(way: str) -> None:
    """Across dimensions of size 1, too, which torch's fake tensors let pass and give overlapping rows."""
    chance, refused = random.Random(20), 0
    for _ in range(150 if way == "compiled" else 600):
        sizes, steps, shape = _random_chain(chance)
        whole = torch.arange(float(torch.Size(sizes).numel())).view(sizes)

        def seen(x: torch.Tensor, steps: object = steps, shape: object = shape) -> torch.Tensor:
            return _viewed(x, steps).view(shape)  # type: ignore[arg-type]

        expected: torch.Tensor | None = None
        try:
            expected = seen(whole)
        except RuntimeError:
            refused += 1
        call = torchlazy.compile(seen) if way == "compiled" else torchlazy.lazy_mode()(seen) if way == "mode" else seen
        x = whole.to("lazy") if way == "device" else whole
        if expected is None:
            with pytest.raises(RuntimeError, match="view size is not compatible"):
                call(x)
        else:
            found = call(x)
            assert found.stride() == expected.stride() and torch.equal(found.cpu(), expected)
    assert refused > 20
