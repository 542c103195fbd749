"""Reads and writes at computed places: advanced indexing, masks, scatters."""

from __future__ import annotations

import torch
import torchlazy

from tests.lazy.compare import Cases, check, data, ints

case = Cases()


@case.parametrize()
def test_as_in_eager(f, tier):
    check(f)


@case
def index_get(device):
    x = data(device, 5, 6, 4)
    i, j = ints(device, 3, high=5), ints(device, 3, high=4, seed=1)
    return x[i], x[:, i], x[i, j], x[i, :, j], x[:, i, j], x[i[:, None], j], x[..., j], x[i][:, 0], x[-i]


@case
def index_get_with_lists_and_slices(device):
    x = data(device, 5, 6, 4)
    return x[[0, 2]], x[[0, 2], 1:3], x[[0, 1], [2, 3]], x[1:3, [0, 5]], x[None, [1]], x[[4], ..., 0]


@case
def index_get_with_host_index(device):
    return data(device, 5, 6)[torch.tensor([0, 3])]


@case
def index_put(device):
    x = data(device, 5, 6)
    i = torch.tensor([0, 3, 1], device=device)
    x[i] = 1
    x[i, torch.tensor([1, 2, 5], device=device)] = data(device, 3, seed=1)
    x[:, i] = data(device, 5, 1, seed=2)
    x[[4, 2]] += 10
    x[i[:2]] = x[i[1:]]
    return x


@case
def index_put_accumulates(device):
    x = data(device, 5, 3)
    i = torch.tensor([0, 0, 2], device=device)
    x.index_put_((i,), data(device, 3, 3, seed=1), accumulate=True)
    y = x.index_put((i,), torch.tensor(1.0, device=device), accumulate=True)
    return x, y


@case
def index_put_through_view(device):
    x = data(device, 6, 4)
    v = x.t()[1:]
    v[torch.tensor([0, 2], device=device)] = 0
    v[v > 1] = -1
    return x, v


@case
def mask_assignment(device):
    x = data(device, 5, 6)
    x[x > 0.5] = 0
    x[x < -0.5] = data(device)
    x[:, 1:3][x[:, 1:3] > 0] *= 2
    return x


@case
def masked_fill_and_scatter(device):
    x = data(device, 4, 6)
    mask = x > 0
    x.masked_fill_(mask, 3.0)
    y = x.masked_fill(~mask, torch.tensor(7.0, device=device))
    x[1:].masked_fill_(mask[1:], -1)
    z = x.masked_scatter(mask, data(device, 24, seed=1))
    x.masked_scatter_(~mask, data(device, 24, seed=2))
    return x, y, z


@case
def index_families(device):
    x = data(device, 4, 6)
    i = torch.tensor([0, 2, 0], device=device)
    x.index_add_(0, i, data(device, 3, 6, seed=1))
    x.index_add_(1, i, data(device, 4, 3, seed=2), alpha=0.5)
    y = x.index_fill(0, i, 9)
    x.index_fill_(1, i[:2], -1)
    x.index_copy_(0, i[:2], data(device, 2, 6, seed=3))
    return x, y, x.index_select(1, i), x.take(i)


@case
def scatters(device):
    x = data(device, 4, 6)
    i = torch.tensor([[0, 1, 3], [2, 0, 1]], device=device)
    src = data(device, 2, 3, seed=1)
    x.scatter_(1, i, src)
    x.scatter_(0, i, 5.0)
    x.scatter_add_(0, i, src)
    y = x.scatter_reduce(1, i, src, reduce="amax")
    z = x.scatter(1, i, src, reduce="multiply")
    return x, y, z, x.gather(1, i), torch.take_along_dim(x, i, dim=1)


@case
def select_and_slice_scatter(device):
    x = data(device, 4, 6)
    return (
        x.select_scatter(data(device, 6, seed=1), 0, 1),
        x.slice_scatter(data(device, 4, 2, seed=2), 1, 2, 4),
        x.diagonal_scatter(data(device, 4, seed=3)),
        x.as_strided_scatter(data(device, 2, seed=4), (2,), (7,), 1),
    )


@case
def put_and_fill_diagonal(device):
    x = data(device, 4, 4)
    x.put_(torch.tensor([1, 5], device=device), torch.tensor([1.0, 2.0], device=device))
    x.fill_diagonal_(8)
    return x, x.tril(), x.triu(1), torch.tril_indices(3, 3, device=device)


@case
def embedding_and_its_gradient(device):
    weight = data(device, 7, 3, grad=True)
    i = ints(device, 4, 2, high=7)
    out = torch.nn.functional.embedding(i, weight)
    (out * out).sum().backward()
    return out, weight.grad


@case
def gradient_through_index_put(device):
    x = data(device, 5, 3, grad=True)
    y = x * 1
    i = torch.tensor([0, 3], device=device)
    y[i] = y[i + 1] * 2
    y[y > 0] = 0.5
    y.pow(2).sum().backward()
    return y, x.grad


@case
def boolean_get_and_counts(device):
    x = data(device, 5, 6)
    mask = x > 0
    i, j = torch.where(mask)
    return (
        x[mask],
        x[mask[:, 0]],
        mask.nonzero(),
        i,
        j,
        x.masked_select(mask),
        torch.unique(ints(device, 8, high=4)),
        x[i, j],
    )


@case
def data_dependent_shapes(device):
    x = ints(device, 10, high=4)
    values, inverse, counts = torch.unique(x, return_inverse=True, return_counts=True)
    return (
        values,
        inverse,
        counts,
        torch.bincount(x),
        torch.unique_consecutive(x),
        x.repeat_interleave(x),
        torch.nonzero(x),
    )


@case
def tensors_as_indices(device):
    x = data(device, 5, 6)
    k = torch.tensor(2, device=device)
    y = x[k]
    x[k] = 0
    return y, x, x[k, k], x[: int(k)], list(range(5))[k]


@case
def index_of_wrong_dtype_is_an_error(device):
    return data(device, 5)[data(device, 2)]


@case
def too_many_indices_is_an_error(device):
    return data(device, 5)[0, 0]


@case
def integer_out_of_range_is_an_error(device):
    return data(device, 5)[7]


@case
def index_value_out_of_range_is_an_error(device):
    return data(device, 5)[torch.tensor([1, 7], device=device)]


@case
def gather_value_out_of_range_is_an_error(device):
    return data(device, 2, 5).gather(1, torch.tensor([[7]], device=device))


@case
def embedding_value_out_of_range_is_an_error(device):
    return torch.nn.functional.embedding(torch.tensor([1, 7], device=device), data(device, 5, 2)) * 2


@case
def scatter_value_out_of_range_is_an_error(device):
    return data(device, 2, 5).scatter_(1, torch.tensor([[7]], device=device), 1.0)


@case
def index_put_value_out_of_range_is_an_error(device):
    data(device, 5)[torch.tensor([1, 7], device=device)] = 0


@case
def a_value_for_each_place_of_a_mask(device):
    x = data(device, 5, 4).requires_grad_()
    holds = x.detach() > 0
    y = x * 1
    y[holds] *= 2
    y[:, 1:][holds[:, 1:]] += torch.arange(float(holds[:, 1:].sum()), device=device)
    y = y.index_put((holds,), x[holds], accumulate=True)
    (grad,) = torch.autograd.grad(y.square().sum() + x[holds].exp().sum(), x)
    return y, grad * 1


@case
def too_many_values_for_the_places_of_a_mask_is_an_error(device):
    x = data(device, 5)
    x[x > 0] = torch.ones(7, device=device)
    return x + 1


@case
def values_of_another_dtype_for_the_places_of_a_mask_is_an_error(device):
    x = data(device, 5)
    x[torch.tensor([True, False, True, False, False], device=device)] = torch.ones(2, device=device).double()


@case
def nll_target_out_of_range_is_an_error(device):
    return torch.nn.functional.cross_entropy(data(device, 2, 5), torch.tensor([1, 7], device=device))


def test_reads_at_integers_cut_nothing(tier):
    x = data("lazy", 5, 6)
    i = ints("lazy", 3, high=5)
    y = x[i, :3] + x[torch.tensor([0, 1, 2])][:, :3] + x[[1, 2, 3], :3]
    x[i] = 0
    assert torchlazy.metrics()["cuts"] == {}
    assert y.shape == (3, 3)


def test_values_for_the_places_of_a_mask_cut_nothing(tier):
    """How many there are only the data tell: the kernel does."""
    x = data("lazy", 5, 6)
    x[torch.arange(30).reshape(5, 6).to("lazy") % 3 == 0] = torch.arange(10.0).to("lazy")
    assert torchlazy.metrics()["cuts"] == {}
    assert x[::3, 0].tolist() == [0.0, 6.0]
