"""`out=`: the right size, a wrong one, a wrong dtype, and outputs that alias an input."""

from __future__ import annotations

import warnings

import pytest
import torch
import torchlazy

from tests.lazy.compare import Cases, check, compare, data

case = Cases()


@case.parametrize()
def test_as_in_eager(f, tier):
    check(f)


@case
def right_size(device):
    x, y, out = data(device, 3, 4), data(device, 3, 4, seed=1), data(device, 3, 4, seed=2)
    back = torch.add(x, y, out=out)
    torch.mm(x, y.t(), out=out[:, :3])
    return back is out, out, x


@case
def out_of_another_dtype(device):
    x, out = data(device, 3, 4), torch.zeros(3, 4, dtype=torch.float64, device=device)
    torch.mul(x, 2, out=out)
    half = torch.zeros(3, 4, dtype=torch.float16, device=device)
    torch.exp(x, out=half)
    return out, half


@case
def out_of_a_dtype_that_cannot_hold_it(device):
    torch.add(data(device, 3), 1, out=torch.zeros(3, dtype=torch.int64, device=device))


@case
def empty_out_is_resized(device):
    out = torch.empty(0, device=device)
    torch.add(data(device, 3, 4), 1, out=out)
    held = out
    out.mul_(2)
    return out, held


@case
def wrong_size_is_resized(device):
    out = torch.ones(7, device=device)
    torch.add(data(device, 3, 4), 1, out=out)
    total = torch.empty(3, 3, device=device)
    torch.sum(out, dim=0, out=total)
    return out, total


@case
def out_aliases_an_input(device):
    x = data(device, 3, 4)
    torch.add(x, x, out=x)
    torch.mul(x, 3, out=x[:])
    return x


@case
def out_is_a_strided_view(device):
    x = data(device, 4, 6)
    torch.add(data(device, 2, 3), 1, out=x[::2, ::2])
    torch.exp(data(device, 4), out=x[:, 5])
    return x


@case
def out_is_transposed(device):
    x = data(device, 4, 6)
    torch.matmul(data(device, 6, 3), data(device, 3, 4), out=x.t())
    return x


@case
def several_outputs(device):
    values, indices = torch.empty(0, device=device), torch.empty(0, dtype=torch.int64, device=device)
    back = torch.max(data(device, 3, 4), 1, out=(values, indices))
    v2, i2 = torch.empty(3, 2, device=device), torch.empty(3, 2, dtype=torch.int64, device=device)
    torch.topk(data(device, 3, 4), 2, out=(v2, i2))
    return values, indices, list(back), v2, i2


@case
def factories_with_out(device):
    out = torch.ones(6, device=device)
    torch.arange(6, out=out)
    other = torch.ones(2, 3, device=device)
    torch.zeros(2, 3, out=other[:1].expand(1, 3)[0:1])
    torch.cat([data(device, 1, 3), data(device, 1, 3)], out=other)
    return out, other


@case
def reductions_with_out(device):
    x, out = data(device, 3, 4), torch.empty(3, device=device)
    torch.sum(x, 1, out=out)
    total = torch.empty((), device=device)
    torch.linalg.vector_norm(x, out=total)
    mean = torch.empty(1, 4, device=device)
    torch.mean(x, 0, keepdim=True, out=mean)
    return out, total, mean


@case
def integers_are_summed_up_as_integers(device):
    out = torch.zeros(4, dtype=torch.int64, device=device)
    torch.cumsum(data(device, 4) * 3, 0, out=out)
    return out


@case.ignoring("version")
def composed_operators(device):  # eager's kron leaves the version as it was
    rank, product = torch.zeros((), dtype=torch.int64, device=device), torch.zeros(6, 8, device=device)
    back = torch.linalg.matrix_rank(data(device, 3, 3), out=rank)
    torch.kron(data(device, 2, 2), data(device, 3, 4), out=product)
    folded = torch.zeros(3, 4, 5, device=device)
    torch.matmul(data(device, 3, 4, 2), data(device, 2, 5), out=folded)
    torch.matmul(data(device, 3, 4, 2), data(device, 2, 3), out=folded[..., ::2])
    return back is rank, rank, product, folded


@case
def a_list_of_outs(device):
    outs = [torch.zeros(3, device=device), torch.zeros(3, device=device)]
    torch.unbind_copy(data(device, 2, 3), out=outs)
    return outs


@case.ignoring("version")
def a_list_of_outs_of_another_size(device):  # eager counts the resizing too
    outs = [torch.zeros(3, device=device), torch.empty(0, device=device)]
    torch.unbind_copy(data(device, 2, 3), out=outs)
    return outs


@case
def factors_of_another_size(device):
    a, tau = torch.ones(7, device=device), torch.empty(0, device=device)
    torch.geqrf(data(device, 3, 3), out=(a, tau))
    return a, tau


@case
def out_of_another_dtype_where_eager_wants_its_own(device):
    torch.logcumsumexp(data(device, 3), 0, out=torch.zeros(3, dtype=torch.float64, device=device))


@case
def out_that_overlaps_itself_is_an_error(device):
    torch.take(
        data(device, 6), torch.zeros(3, dtype=torch.int64, device=device), out=torch.ones(1, device=device).expand(3)
    )


@case
def out_that_is_an_operand_is_an_error(device):
    x = data(device, 4, 6)
    torch.cat([torch.empty(0, device=device), x], out=x)


@case
def out_that_a_product_is_added_to(device):
    """Chunks of a loss add up their gradients so."""
    total, x = data(device, 5, 3), data(device, 3, 3, seed=1)
    torch.addmm(total[1:4], x, x, alpha=0.5, out=total[1:4])
    square, row, batch = data(device, 3, 3), data(device, 3), data(device, 2, 3, 3)
    torch.addmm(square, square, x, out=square)  # here it is a factor as well
    torch.addmv(row, x, x[0], beta=2, out=row)
    torch.baddbmm(batch, batch + 1, x.expand(2, 3, 3), out=batch)
    torch.addr(square, row, x[1], out=square)
    return total, square, row, batch


def test_a_product_that_is_added_to_its_out_is_recorded():
    total, x = data("lazy", 5, 3), data("lazy", 3, 3, seed=1)
    torch.addmm(total[1:4], x, x, out=total[1:4])
    torch.addmv(total[0], x, x[0], out=total[0])
    torchlazy.sync()
    assert not torchlazy.metrics()["fallbacks"]


@case
def a_composed_operator_has_no_gradient_through_out(device):
    torch.kron(data(device, 2, 2, grad=True), data(device, 2, 2), out=data(device, 4, 4))


@case
def out_that_requires_grad_is_an_error(device):
    torch.add(data(device, 3, grad=True), 1, out=data(device, 3))


@case
def out_on_another_device_is_an_error(device):
    other = "lazy" if device == "cpu" else "cpu"
    torch.add(data(device, 3), 1, out=torch.zeros(3, device=other))


@pytest.mark.parametrize("device", ["cpu", "lazy"])
@pytest.mark.parametrize("call", [lambda x, out: torch.add(x, 1, out=out), lambda x, out: torch.kron(x, x, out=out)])
def test_wrong_size_warns(device, call):
    out = torch.ones(7, device=device)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call(data(device, 2, 2), out)
    assert sum("was resized" in str(w.message) for w in caught) == 1
    assert out.dim() == 2


@pytest.mark.parametrize("device", ["cpu", "lazy"])
def test_right_size_does_not_warn(device):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.diag(data(device, 3, 3), out=torch.ones(3, device=device))
        with pytest.raises(RuntimeError):
            data(device, 3, 1).copysign_(data(device, 4))


def test_inference_mode_composes_the_same():
    with torch.inference_mode():
        rank = torch.zeros((), dtype=torch.int64, device="lazy")
        torch.linalg.matrix_rank(torch.eye(3, device="lazy"), out=rank)
        assert rank.item() == 3


@pytest.mark.parametrize("made", ["inside", "outside"])
def test_lazy_mode_gives_ordinary_tensors_the_size_of_what_is_written(made, tier):
    def tensors() -> list[torch.Tensor]:
        return [torch.tensor(1.5), torch.empty(0), torch.ones(3), torch.ones(2, 4), torch.ones(4, 4)[1:3, 1:]]

    def written(x: torch.Tensor, outs: list[torch.Tensor]) -> list[object]:
        seen: list[object] = []
        for out in outs:
            alias = out.detach()
            for result in (torch.eq(x, x, out=out), torch.sum(x, 0, out=out), torch.matmul(x, x.T, out=out)):
                seen += [result is out, out.clone(), out.stride(), alias.shape, out * 2]
        return seen

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        x, outs = data("cpu", 2, 4), tensors()
        want = written(x, tensors())
        with torchlazy.lazy_mode():
            have = written(x, tensors() if made == "inside" else outs)
    compare(have, want)


@case.ignoring("version")
def sizes_change_under_inference_mode(device):
    """Of ordinary tensors, which stay ordinary ones."""
    seen = []
    for change in (
        lambda x: torch.sum(data(device, 2, 4), 0, out=x),
        lambda x: torch.add(data(device, 3, 3), 1, out=x),
        lambda x: x.resize_(1, 4),
        lambda x: x.set_(data(device, 3)),
        lambda x: x.resize_as_(data(device, 3)),
    ):
        x = data(device, 2, 4)
        with torch.inference_mode():
            change(x)
            y = x * 2
        x.mul_(3)
        seen += [x, y.clone(), x.is_inference(), y.is_inference()]
        seen.append(torch.autograd.grad((x.requires_grad_() ** 2).sum(), x)[0])
    return seen


SIZES_OF_THEIR_OWN = {
    "arange": lambda out: torch.arange(4, out=out),
    "linspace": lambda out: torch.linspace(0, 1, 3, out=out),
    "eye": lambda out: torch.eye(2, out=out),
    "zeros": lambda out: torch.zeros(0, 2, out=out),
    "full": lambda out: torch.full((3, 5), 2.0, out=out),
    "rand": lambda out: torch.rand(3, out=out).zero_(),
    "masked_select": lambda out: torch.masked_select(torch.arange(5.0), torch.arange(5) > 2, out=out),
}


@pytest.mark.parametrize("name", SIZES_OF_THEIR_OWN)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_lazy_mode_gives_ordinary_tensors_the_size_of_what_is_made(name, operator_by_operator):
    def run() -> list[torch.Tensor]:
        out = torch.ones(2, 4)
        flat = out.view(-1)
        SIZES_OF_THEIR_OWN[name](out)
        return [out, flat, out * 2]

    made = torch.ones(2, 4)
    flat = made.view(-1)
    with torchlazy.lazy_mode():
        SIZES_OF_THEIR_OWN[name](made)
        twice = made * 2
    compare([made, flat, twice], run(), ignore=("version", "is_contiguous"))
