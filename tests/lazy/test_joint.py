"""Joint graphs: forward and backward recorded ahead of time, run as two programs, equal to eager."""

from __future__ import annotations

from collections.abc import Callable
from threading import Thread
from typing import Any

import pytest
import torch
import torchlazy
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torchlazy.lazy.api import recorder
from torchlazy.lazy.joint.function import is_batched, one_by_one
from torchlazy.lazy.joint.record import CannotRecordJoint, record_joint

from tests.lazy.joint_path import JointCall

pytestmark = pytest.mark.usefixtures("device_in_python", "tier")


def leaf(*shape: int, seed: int = 0, device: str = "cpu") -> torch.Tensor:
    made = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return made.to(device).requires_grad_()


def host(value: Any) -> Any:
    return value.detach().cpu() if isinstance(value, torch.Tensor) else value


def same(
    function: Callable[..., Any], *shapes: tuple[int, ...], loss: Callable[[Any], torch.Tensor] | None = None
) -> JointCall:
    """Calls `function` eagerly and through its joint, three times each; compares outputs and gradients."""
    loss = loss or (lambda out: sum((o * o).sum() for o in (out if isinstance(out, tuple) else (out,))))
    call = JointCall(function)
    for turn in range(3):
        eager = [leaf(*s, seed=10 * turn + i) for i, s in enumerate(shapes)]
        lazy = [leaf(*s, seed=10 * turn + i, device="lazy") for i, s in enumerate(shapes)]
        wanted, found = function(*eager), call(*lazy)
        for a, b in zip(*((o if isinstance(o, tuple) else (o,)) for o in (wanted, found)), strict=True):
            torch.testing.assert_close(host(b), host(a))
            assert (a.requires_grad, a.stride(), a.storage_offset()) == (
                b.requires_grad,
                b.stride(),
                b.storage_offset(),
            )
        loss(wanted).backward()
        loss(found).backward()
        for a, b in zip(eager, lazy, strict=True):
            assert (a.grad is None) == (b.grad is None)
            if a.grad is not None:
                torch.testing.assert_close(host(b.grad), a.grad)
    return call


def test_products_and_fused_chains() -> None:
    call = same(lambda x, w: torch.tanh(x @ w).exp(), (4, 3), (3, 5))
    assert call.recorded is not None
    saved = [call.recorded.joint.forward.outputs[i][1].shape for i in call.recorded.joint.saved]
    assert saved == [(4, 5)]  # the product; tanh and exp are computed again from it


@pytest.mark.parametrize("n", [2, 3])
def test_max_pooling_without_overlap(n: int) -> None:
    """Its backward's rule looks at the window numbers of its forward's, which no program can hand over: what is held
    is something before them. There was no such cut, and so no joint."""
    conv, pool = ((F.conv2d, F.max_pool2d), (F.conv3d, F.max_pool3d))[n - 2]
    call = same(lambda x, w: pool(F.silu(conv(x, w, padding=1)), 2), (2, 3, *(4,) * n), (4, 3, *(3,) * n))
    assert call.recorded is not None


def test_several_outputs_and_an_integer_one() -> None:
    same(lambda x: (x.sin(), x.argmax(1), (x * 2).detach()), (4, 3), loss=lambda out: out[0].sum())


def test_an_input_without_gradient_gives_none() -> None:
    call = JointCall(lambda x, y: (x * 2, y.detach() * 3))
    x, y = leaf(3, device="lazy"), leaf(3, device="lazy", seed=1)
    first, _ = call(x, y)
    first.sum().backward()
    assert y.grad is None and x.grad is not None
    assert call.recorded is not None and call.recorded.joint.gradients == (0, None)


def test_an_output_that_takes_no_part_leaves_its_gradient_none() -> None:
    call = JointCall(lambda x, y: (x.sin(), y.cos()))
    x, y = leaf(3, device="lazy"), leaf(3, device="lazy", seed=1)
    call(x, y)[0].sum().backward()
    assert y.grad is None
    torch.testing.assert_close(host(x.grad), host(x).cos())


def test_views_of_one_result() -> None:
    def halves(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = x.exp()
        return y[0], y[1:], y

    same(halves, (3, 4))
    call = JointCall(halves)
    first, _, whole = call(leaf(3, 4, device="lazy"))
    with torch.no_grad():
        first.zero_()
    assert float(host(whole)[0].abs().sum()) == 0.0


def test_transposed_and_sliced_results() -> None:
    same(lambda x: (x.sin().t(), x.cos()[:, 1:], x.exp().unsqueeze(0)), (3, 4))


def test_a_view_of_an_input() -> None:
    call = same(lambda x: (x.t(), x * 2), (3, 4))
    x = leaf(3, 4, device="lazy")
    view, _ = call(x)
    with torch.no_grad():
        x.zero_()
    assert float(host(view).abs().sum()) == 0.0


@pytest.mark.parametrize("in_place", [lambda x: x.mul_(2), lambda x: x[0].exp_(), lambda x: x.t().add_(1)])
def test_an_input_that_is_changed_in_place(in_place: Callable[[torch.Tensor], Any]) -> None:
    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        in_place(x)
        return (x * y).sum(0)

    results = []
    for device, wrapper in (("cpu", lambda f: f), ("lazy", JointCall)):
        call = wrapper(function)
        x, y = leaf(3, 4, device=device), leaf(3, 4, seed=1, device=device)
        inner = x * 1
        out = call(inner, y)
        (out.sum() + (inner * inner).sum()).backward()
        results.append([host(t) for t in (out, inner, x.grad, y.grad)])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(b, a)


def test_running_statistics_are_written() -> None:
    torch.manual_seed(0)
    eager = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))
    lazy = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))
    lazy.load_state_dict(eager.state_dict())
    lazy.to("lazy")
    call = JointCall(lazy, [*lazy.parameters(), *lazy.buffers()])
    for turn in range(3):
        x, y = leaf(5, 4, seed=turn), leaf(5, 4, seed=turn, device="lazy")
        eager(x).square().sum().backward()
        call(y).square().sum().backward()
        torch.testing.assert_close(host(y.grad), x.grad, rtol=1e-4, atol=1e-4)
    for (name, a), b in zip(eager.state_dict().items(), lazy.state_dict().values(), strict=True):
        torch.testing.assert_close(host(b), a, msg=name)
    for p, q in zip(eager.parameters(), lazy.parameters(), strict=True):
        torch.testing.assert_close(host(q.grad), p.grad, rtol=1e-4, atol=1e-4)


def test_dropout_uses_one_mask_in_both_halves_and_a_new_one_each_call() -> None:
    call = JointCall(lambda x: F.dropout(x, 0.5))
    masks = []
    for _ in range(3):
        x = torch.ones(200, device="lazy").requires_grad_()
        out = call(x)
        out.sum().backward()
        torch.testing.assert_close(host(x.grad), host(out))
        masks.append(host(out))
    assert not torch.equal(masks[0], masks[1]) and not torch.equal(masks[1], masks[2])


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint_regions_replay_their_random_numbers(reentrant: bool) -> None:
    def region(x: torch.Tensor) -> torch.Tensor:
        return F.dropout(torch.sin(x) * 2, 0.5)

    call = JointCall(lambda x: checkpoint(region, x, use_reentrant=reentrant) * 1.0)
    for _ in range(2):
        x = torch.full((100,), 0.3, device="lazy").requires_grad_()
        out = call(x)
        out.sum().backward()
        kept = host(out) != 0
        expected = torch.where(kept, 4 * torch.cos(torch.tensor(0.3)), 0.0)
        torch.testing.assert_close(host(x.grad), expected)
        assert 20 < int(kept.sum()) < 80


class Straight(torch.autograd.Function):
    """Rounds, and lets gradients through tripled."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 3


def test_an_autograd_function_keeps_its_own_backward() -> None:
    same(lambda x: Straight.apply(x * 2), (4,))


def test_hooks_inside_are_part_of_the_backward() -> None:
    def hooked(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        y.register_hook(lambda g: g * 5)
        return y.sin()

    same(hooked, (4,))


def test_hooks_on_the_inputs_run_once_a_call() -> None:
    calls = []
    call = JointCall(lambda x: x * 2)
    x = leaf(3, device="lazy")
    x.register_hook(lambda g: calls.append(1) or g * 10)
    call.record([x])
    assert not calls
    call(x).sum().backward()
    assert len(calls) == 1
    torch.testing.assert_close(host(x.grad), torch.full((3,), 20.0))


def test_hooks_inside_that_keep_something_run_once_a_call() -> None:
    calls: list[int] = []

    def function(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        y.register_hook(lambda g: calls.append(1) or g * 5)
        return y * 3

    run = torchlazy.compile(function)
    for turn in range(8):
        x = leaf(4, seed=turn, device="lazy")
        run(x).sum().backward()
        torch.testing.assert_close(host(x.grad), torch.full((4,), 30.0))
        assert len(calls) == turn + 1


def test_autocast_regions() -> None:
    def function(device: str) -> Callable[..., torch.Tensor]:
        def inner(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            with torch.autocast(device, dtype=torch.bfloat16):
                return F.gelu(x @ w).float().sum(1)

        return inner

    call = JointCall(function("lazy"))
    x, w = leaf(4, 8), leaf(8, 8, seed=1)
    lx, lw = leaf(4, 8, device="lazy"), leaf(8, 8, seed=1, device="lazy")
    function("cpu")(x, w).sum().backward()
    with torch.autocast("lazy", dtype=torch.bfloat16):
        out = call(lx, lw)
    out.sum().backward()
    torch.testing.assert_close(host(lx.grad), x.grad, rtol=0.05, atol=0.05)
    torch.testing.assert_close(host(lw.grad), w.grad, rtol=0.05, atol=0.05)


def test_several_backward_calls() -> None:
    call = JointCall(lambda x: x.exp() * x)
    x = leaf(4, device="lazy")
    out = call(x)
    (first,) = torch.autograd.grad(out.sum(), x, retain_graph=True)
    (second,) = torch.autograd.grad(out.sum(), x)
    torch.testing.assert_close(host(first), host(second))
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(out.sum(), x)


def test_a_saved_input_that_changed_is_refused_as_in_eager() -> None:
    for device, wrapper in (("cpu", lambda f: f), ("lazy", JointCall)):
        call = wrapper(lambda x, w: (x * w).sum())
        x, w = leaf(4, device=device), leaf(4, seed=1, device=device)
        out = call(x, w)
        with torch.no_grad():
            w.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.backward()


def test_an_input_that_eager_does_not_save_may_change_before_backward() -> None:
    results = []
    for device, wrapper in (("cpu", lambda f: f), ("lazy", JointCall)):
        call = wrapper(lambda x: (x * 2 + 1).exp().sin())
        x = leaf(6, device=device)
        inner = x * 1
        out = call(inner)
        with torch.no_grad():
            inner.zero_()
        out.sum().backward()
        results.append(host(x.grad))
    torch.testing.assert_close(results[1], results[0])


def test_an_output_that_eager_does_not_save_may_change_before_backward() -> None:
    results = []
    for device, wrapper in (("cpu", lambda f: f), ("lazy", JointCall)):
        call = wrapper(lambda x: x.sin() * 2)
        x = leaf(6, device=device)
        out = call(x)
        out.mul_(3)
        out.sum().backward()
        results.append(host(x.grad))
    torch.testing.assert_close(results[1], results[0])


def test_the_recorded_call_itself_goes_on_as_if_nothing_had_happened() -> None:
    results = []
    for device in ("cpu", "lazy"):
        x, w = leaf(4, 3, device=device), leaf(3, 3, seed=1, device=device)
        hidden = torch.tanh(x @ w)
        out = hidden.t() @ hidden
        if device == "lazy":
            before = len(recorder.entries)
            record_joint(recorder, [out], [x, w])
            assert len(recorder.entries) == before
        (out.sum() + hidden.sum()).backward()
        results.append([host(t) for t in (out, x.grad, w.grad)])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(b, a)


def test_a_backward_that_reads_a_value_cannot_be_recorded() -> None:
    x = leaf(3, device="lazy")
    y = x * 2
    y.register_hook(lambda g: g * float(g.sum()))
    out = y.sin()
    with pytest.raises(CannotRecordJoint, match=r"float|item|host"):
        record_joint(recorder, [out], [x])
    (g,) = torch.autograd.grad(out.sum(), x)  # the ordinary way still works
    torch.testing.assert_close(host(g), 2 * torch.cos(2 * host(x)) * float(torch.cos(2 * host(x)).sum()))


def test_the_joint_is_data_and_holds_no_memory() -> None:
    x = leaf(3, device="lazy")
    recorded = record_joint(recorder, [x.sin()], [x])
    torchlazy.flush()
    assert all(not isinstance(v, torch.Tensor) for v in vars(recorded.joint).values())


def test_gradients_of_gradients() -> None:
    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return (torch.tanh(x @ w) ** 3).sum(1)

    results = []
    for device, wrapper in (("cpu", lambda f: f), ("lazy", lambda f: JointCall(f, orders=2))):
        call = wrapper(function)
        x, w = leaf(4, 3, device=device), leaf(3, 3, seed=1, device=device)
        out = call(x, w).square().sum()
        gx, gw = torch.autograd.grad(out, (x, w), create_graph=True)
        (gx.square().sum() + gw.sin().sum()).backward()
        results.append([host(t) for t in (out, gx, gw, x.grad, w.grad)])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(b, a)


def test_gradgradcheck_through_both_programs() -> None:
    call = JointCall(lambda x, w: F.gelu(x @ w) * x, orders=2)
    x = torch.randn(2, 3, dtype=torch.float64).to("lazy").requires_grad_()
    w = torch.randn(3, 3, dtype=torch.float64).to("lazy").requires_grad_()
    assert torch.autograd.gradcheck(call, (x, w))
    assert torch.autograd.gradgradcheck(call, (x, w))


def test_gradients_of_gradients_that_were_not_recorded_are_refused() -> None:
    call = JointCall(lambda x: x.sin())
    x = leaf(3, device="lazy")
    with pytest.raises(RuntimeError, match="without a double backward"):
        torch.autograd.grad(call(x).sum(), x, create_graph=True)


def test_an_output_that_an_unrecorded_operator_computed_is_refused() -> None:
    x = leaf(4, device="lazy")
    mask = torch.tensor([True, False, True, True]).to("lazy")
    torchlazy.flush()
    with pytest.raises(CannotRecordJoint, match=r"at once|cut"):
        record_joint(recorder, [torch.masked_select(x, mask)], [x], epoch=recorder.epoch)


def test_an_output_under_another_dtype_is_refused() -> None:
    x = leaf(3, 2, device="lazy")
    with pytest.raises(CannotRecordJoint, match="another dtype"):
        record_joint(recorder, [torch.view_as_complex(x)], [x])


def test_several_results_of_one_operator() -> None:
    same(lambda x, w, b: torch.native_layer_norm(x, (3,), w, b, 1e-5), (2, 3), (3,), (3,))


@pytest.mark.parametrize("levels", [1, 2])
def test_batched_gradients_are_taken_apart_in_another_thread(levels: int) -> None:
    """The engine's thread of a GPU knows nothing of the nesting of `is_grads_batched`: this recursed for ever."""
    values = torch.arange(24.0).reshape(4, 3, 2)[:, : 3 if levels == 2 else 1].squeeze(1)
    batched = values
    for level in range(1, levels + 1):
        batched = torch._add_batch_dim(batched, 0, level)
    found: list[Any] = []

    def backward(tangents: Any) -> Any:
        return one_by_one(backward, tangents) if is_batched(tangents) else [tangents[0] * 2, None]

    thread = Thread(target=lambda: found.extend(backward([batched, None])))
    thread.start()
    thread.join()
    doubled = found[0]
    for level in range(levels, 0, -1):
        doubled = torch._remove_batch_dim(doubled, level, values.shape[level - 1], 0)
    assert found[1] is None and torch.equal(doubled, 2 * values)
