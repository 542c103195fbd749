"""Errors: eager's, at the call; and after one every tensor is readable, with eager's value."""

from __future__ import annotations

import gc
import warnings

import pytest
import torch
import torchlazy

from tests.lazy.compare import Cases, check, data, ints

case = Cases()


@case.parametrize()
def test_raised_at_the_call(f, tier):
    """Eager's exception type, from the call itself: nothing is synchronised."""
    with pytest.raises(Exception) as eager:
        f("cpu")
    with pytest.raises(Exception) as lazy:
        f("lazy")
    assert lazy.type is eager.type, f"lazy: {lazy.value!r}, eager: {eager.value!r}"


@case
def add_of_other_shape(device):
    data(device, 3) + data(device, 4)


@case
def matmul_of_other_shape(device):
    data(device, 3, 4) @ data(device, 3, 4)


@case
def linear_of_other_shape(device):
    torch.nn.Linear(3, 4, device=device)(data(device, 2, 5))


@case
def mm_of_other_dtype(device):
    torch.mm(data(device, 3, 3), data(device, 3, 3, dtype=torch.float64))


@case
def scattered_row_of_another_shape(device):
    torch.select_scatter(data(device, 2, 3, 4), data(device, 3, 4), -1, 0)


@case
def scattered_slice_of_another_shape(device):
    torch.slice_scatter(data(device, 4, 3), data(device, 2, 3), 0, 1, 4)


@case
def scattered_diagonal_of_another_length(device):
    torch.diagonal_scatter(data(device, 3, 4), data(device, 3), 2)


@case
def scattered_window_of_another_shape(device):
    torch.as_strided_scatter(data(device, 3, 4), data(device, 3), (2,), (1,))


@case
def norms_of_integers(device):
    torch._foreach_norm([data(device, 3), ints(device, 3)])


@case
def rounded_truths(device):
    torch._foreach_round_([data(device, 3) > 0])


@case
def integers_between_integers(device):
    torch._foreach_lerp([ints(device, 3)], [ints(device, 3)], 0.5)


@case
def larger_of_complex_numbers(device):
    torch._foreach_maximum([data(device, 3, dtype=torch.complex64)], [data(device, 3, dtype=torch.complex64)])


@case
def view_of_other_size(device):
    data(device, 3, 4).view(5)


@case
def cat_of_other_shape(device):
    torch.cat([data(device, 3, 4), data(device, 3, 5)], 0)


@case
def stack_of_nothing(device):
    torch.stack([])


@case
def bad_dimension(device):
    data(device, 3).sum(2)


@case
def bad_transpose(device):
    data(device, 3).transpose(0, 3)


@case
def bad_select(device):
    data(device, 3).select(0, 5)


@case
def bad_split(device):
    data(device, 3).split([1, 1])


@case
def bad_expand(device):
    data(device, 3).expand(4)


@case
def negative_size(device):
    torch.empty(-1, device=device)


@case
def bad_permute(device):
    data(device, 3, 4).permute(0, 0)


@case
def in_place_result_type(device):
    ints(device, 3).add_(data(device, 3))


@case
def bitwise_on_floats(device):
    data(device, 3) & 1


@case
def integer_softmax(device):
    ints(device, 3).softmax(0)


@case
def mean_of_integers(device):
    ints(device, 3).mean()


@case
def grad_of_integers(device):
    ints(device, 3).requires_grad_()


@case
def backward_of_a_vector(device):
    (data(device, 3, grad=True) * 2).backward()


@case
def backward_twice(device):
    y = (data(device, 3, grad=True) ** 2).sum()
    y.backward()
    y.backward()


@case
def item_of_many(device):
    data(device, 3).item()


@case
def bool_of_many(device):
    bool(data(device, 3))


@case
def int_of_many(device):
    int(data(device, 3))


@case
def length_of_a_scalar(device):
    len(data(device))


@case
def iteration_over_a_scalar(device):
    list(data(device))


@case
def embedding_of_floats(device):
    torch.nn.functional.embedding(data(device, 3), data(device, 3, 2))


@case
def conv_of_other_channels(device):
    torch.nn.functional.conv2d(data(device, 1, 2, 4, 4), data(device, 3, 5, 2, 2))


@case
def cross_entropy_of_other_batch(device):
    torch.nn.functional.cross_entropy(data(device, 2, 3), ints(device, 4, high=3))


@case
def cholesky_of_an_indefinite_matrix(device):
    torch.linalg.cholesky(-torch.eye(2, device=device)).sum().item()


@case
def max_of_nothing(device):
    data(device, 0).max()


@case
def scatter_of_other_dtype(device):
    data(device, 3).scatter_(0, ints(device, 2), ints(device, 2))


@case
def normal_of_negative_std(device):
    data(device, 3).normal_(0, -1)


@case
def probability_out_of_range(device):
    torch.nn.functional.dropout(data(device, 3), 1.5)


MIXED = {
    "add": lambda lazy, host: lazy + host,
    "add from the host": lambda lazy, host: host + lazy,
    "matmul": lambda lazy, host: lazy @ host,
    "in place": lambda lazy, host: lazy.add_(host),
    "in place on the host": lambda lazy, host: host.add_(lazy),
    "cat": lambda lazy, host: torch.cat([lazy, host]),
    "where": lambda lazy, host: torch.where(lazy > 0, lazy, host),
    "linear": lambda lazy, host: torch.nn.functional.linear(lazy, host),
    "loss": lambda lazy, host: torch.nn.functional.mse_loss(lazy, host),
    "out": lambda lazy, host: torch.add(lazy, lazy, out=host),
    "stack": lambda lazy, host: torch.stack([host, lazy]),
    "view as": lambda lazy, host: torch.lerp(lazy, lazy, host),
}


@pytest.mark.usefixtures("device_in_python")
@pytest.mark.parametrize("name", MIXED)
def test_mixed_devices(name):
    lazy, host = data("lazy", 3, 3), data("cpu", 3, 3, seed=1)
    with pytest.raises(RuntimeError, match=r"device|backend"):
        MIXED[name](lazy, host)
    assert host.tolist() == data("cpu", 3, 3, seed=1).tolist()
    assert lazy.tolist() == data("cpu", 3, 3).tolist()


def test_host_scalars_mix(tier):
    check(
        lambda device: (
            data(device, 3) * torch.tensor(2.0),
            torch.tensor(3) + data(device, 3),
            data(device, 3) > torch.tensor(0),
        )
    )


def _train(device, fail_at):
    """Two steps of training, the second interrupted; returns whatever state there is."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4, bias=False), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2)).to(
        device
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    x, y = data(device, 5, 3), ints(device, 5, high=2)
    for step in range(2):
        optimizer.zero_grad()
        try:
            out = model(x)
            if step and fail_at == "forward":
                out @ out
            loss = torch.nn.functional.cross_entropy(out, y)
            loss.backward()
            if step and fail_at == "backward":
                loss.backward()
            if step and fail_at == "in place":
                model[0].weight.data.mul_(2)
                model[0].weight.data.add_(data(device, 7))
            optimizer.step()
            if step and fail_at == "after":
                raise KeyError
        except (RuntimeError, KeyError):
            pass
    state = [*model.parameters(), *model.buffers(), loss.detach()]
    state += [s[k] for s in optimizer.state.values() for k in sorted(s)]
    return [t.detach().cpu() + 0 for t in state], [p.grad + 0 for p in model.parameters()]


@pytest.mark.parametrize("place", ["forward", "backward", "in place", "after"])
def test_state_after_an_exception_in_a_step(place, tier):
    check(lambda device: _train(device, place), rtol=1e-4, atol=1e-5)


def test_index_error_at_run_time_spares_parameters(tier):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Embedding(5, 3), torch.nn.Linear(3, 2)).to("lazy")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

    def step(rows):
        optimizer.zero_grad()
        model(torch.tensor(rows, device="lazy")).square().sum().backward()
        optimizer.step()

    step([1, 2])
    step([1, 3])
    before = [p.tolist() for p in model.parameters()]
    state = [s["exp_avg"].tolist() for s in optimizer.state.values()]
    addresses = [p.data_ptr() for p in model.parameters()]
    with pytest.raises(IndexError):
        step([1, 9])
    assert [p.tolist() for p in model.parameters()] == before
    assert [s["exp_avg"].tolist() for s in optimizer.state.values()] == state
    step([1, 4])
    assert [p.tolist() for p in model.parameters()] != before
    assert [p.data_ptr() for p in model.parameters()] == addresses


@pytest.mark.usefixtures("device_in_python")
def test_what_does_not_depend_on_the_error_has_its_value(tier):
    x = data("lazy", 4)
    kept = x.clone()
    torchlazy.sync()
    x.add_(1)
    bad = data("lazy", 3)[torch.tensor([7], device="lazy")]
    worse = bad * 2
    good = kept * 2
    with pytest.raises(IndexError):
        torchlazy.sync()
    torch.testing.assert_close(good.cpu(), data("cpu", 4) * 2)
    torch.testing.assert_close(x.cpu(), data("cpu", 4) + 1)
    for read in (lambda: bad.tolist(), lambda: worse[0].item(), lambda: worse.detach().cpu(), lambda: worse + 1):
        with pytest.raises(IndexError):
            read()


def test_an_error_keeps_no_memory_alive(compiled):
    x = data("lazy", 64)
    bad = x[torch.tensor([70], device="lazy")]
    with pytest.raises(IndexError):
        torchlazy.sync()
    gc.collect()
    step = bad._storage_.poison.__traceback__
    while step is not None:
        assert step.tb_frame.f_code.co_name != "run_entries"
        step = step.tb_next


@pytest.mark.usefixtures("device_in_python")
def test_a_poisoned_tensor_can_be_written_anew(tier):
    bad = data("lazy", 3)[torch.tensor([7], device="lazy")]
    with pytest.raises(IndexError):
        torchlazy.sync()
    bad.copy_(torch.tensor([5.0]))
    assert bad.tolist() == [5.0]


def test_compiler_errors_fall_back_and_warn_once(monkeypatch):
    torchlazy.config.tiers = "off"

    def fail(*args):
        raise ValueError("no such thing")

    monkeypatch.setattr("torchlazy.lazy.plan.pipeline.compile_trace", fail)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            x = data("lazy", 3) + 1
            torchlazy.sync()
            assert x.tolist() == (data("cpu", 3) + 1).tolist()
    assert [w.category for w in caught] == [RuntimeWarning]
    assert "test_errors.py" in str(caught[0].message)
    assert torchlazy.metrics()["fallbacks"] == {"cannot compile: ValueError": 1}


def test_a_strict_compiler_error_loses_no_parameters(monkeypatch, compiled):
    x, y = data("lazy", 3), data("lazy", 3, seed=1)
    torchlazy.sync()

    def fail(*args):
        raise ValueError("no such thing")

    with monkeypatch.context() as patch:
        patch.setattr("torchlazy.lazy.plan.pipeline.compile_trace", fail)
        z = x + y
        x.add_(1)
        with pytest.raises(ValueError, match="no such thing"):
            torchlazy.sync()
    assert x.tolist() == data("cpu", 3).tolist()
    assert y.tolist() == data("cpu", 3, seed=1).tolist()
    with pytest.raises(RuntimeError, match="lost"):
        z.tolist()


@pytest.mark.usefixtures("device_in_python")
def test_an_interrupt_at_a_cut(monkeypatch):
    x = data("lazy", 3)
    torchlazy.sync()

    def interrupted(*args):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("torchlazy.lazy.run.straight_line.run_entries", interrupted)
        x.add_(1)
        with pytest.raises(KeyboardInterrupt):
            torchlazy.sync()
    assert x.tolist() == data("cpu", 3).tolist()
    assert (x + 1).tolist() == (data("cpu", 3) + 1).tolist()
