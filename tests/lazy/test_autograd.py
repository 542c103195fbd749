"""Autograd over lazy tensors: hooks, higher orders, custom functions, checkpoints, `torch.func`, modes and errors."""

from __future__ import annotations

import warnings

import pytest
import torch
import torchlazy
from torch import nn
from torch.autograd import forward_ad
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from tests.lazy.compare import Cases, check, data
from tests.lazy.models import built, same

case = Cases()
once = Cases()  # what needs no compiler to be told right from wrong


@case.parametrize()
def test_as_in_eager(f, compiled):
    check(f, rtol=1e-4, atol=1e-5, ignore=("version",))


@once.parametrize()
def test_semantics_as_in_eager(f):
    check(f, rtol=1e-4, atol=1e-5, ignore=("version",))


# ---------------------------------------------------------------- hooks


@case
def tensor_hooks(device):
    x = data(device, 3, 4, grad=True)
    seen = []
    y = x * 2
    y.register_hook(lambda g: g * 3)
    x.register_hook(lambda g: seen.append(g.shape))
    handle = x.register_hook(lambda g: g * 100)
    handle.remove()
    z = y.sin()
    z.retain_grad()
    z.sum().backward()
    return x.grad, z.grad, seen


@once
def accumulated_grad_hook(device):
    x = data(device, 3, 4, grad=True)
    seen = []

    def hook(p):
        seen.append(p.grad.sum().item())
        p.data.sub_(p.grad, alpha=0.1)
        p.grad = None

    x.register_post_accumulate_grad_hook(hook)
    (x * x).sum().backward()
    (x * x).sum().backward()
    return x, x.grad, [round(v, 4) for v in seen]


@once
def optimizer_in_backward(device):
    model = built(lambda: nn.Linear(3, 2), device)
    optimizers = {p: torch.optim.SGD([p], 0.1) for p in model.parameters()}

    def step(p):
        optimizers[p].step()
        optimizers[p].zero_grad()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(step)
    for seed in range(2):
        model(data(device, 4, 3, seed=seed)).square().sum().backward()
    return dict(model.state_dict())


@case
def module_hooks(device):
    model = built(lambda: nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)), device)
    order = []
    model[0].register_forward_pre_hook(lambda m, a: (order.append("pre"), (a[0] * 2,))[1])
    model[0].register_forward_hook(lambda m, a, out: (order.append("post"), out + 1)[1])
    model[2].register_full_backward_pre_hook(lambda m, g: (order.append("back pre"), (g[0] * 2,))[1])
    model[2].register_full_backward_hook(lambda m, gi, go: (order.append("back"), (gi[0] * 3,))[1])
    model.register_forward_hook(lambda m, a, k, out: order.append(len(k)), with_kwargs=True)
    x = data(device, 5, 3, grad=True)
    out = model(x)
    out.sum().backward()
    return out, x.grad, [p.grad for p in model.parameters()], order


@once
def global_module_hooks(device):
    names = []
    handles = [
        nn.modules.module.register_module_forward_hook(lambda m, a, out: names.append(type(m).__name__)),
        nn.modules.module.register_module_full_backward_hook(lambda m, gi, go: names.append("back")),
    ]
    try:
        model = built(lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh()), device)
        model(data(device, 2, 3)).sum().backward()
    finally:
        for handle in handles:
            handle.remove()
    return names


@case
def saved_tensor_hooks(device):
    x = data(device, 3, 4, grad=True)
    packed = []

    def pack(t):
        packed.append(tuple(t.shape))
        return t.clone()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t * 1):
        y = (x.exp() * x.sin()).sum()
    y.backward()
    return x.grad, packed


@once
def saved_on_cpu(device):
    x = data(device, 3, 4, grad=True)
    with torch.autograd.graph.save_on_cpu():
        y = (x.exp() * x).sum()
    y.backward()
    return x.grad


@once
def multi_grad_hook_and_graph_nodes(device):
    a, b = data(device, 3, grad=True), data(device, 3, seed=1, grad=True)
    calls = []
    torch.autograd.graph.register_multi_grad_hook((a, b), lambda gs: calls.append([g is not None for g in gs]))
    y = (a * b).sum()
    y.grad_fn.register_hook(lambda gi, go: calls.append(len(gi)))
    y.grad_fn.register_prehook(lambda go: calls.append(len(go)))
    y.backward()
    return a.grad, b.grad, calls, y.grad_fn.name(), type(y.grad_fn.next_functions[0][0]).__name__


# ---------------------------------------------------------------- higher orders, autograd.grad


@case
def double_backward(device):
    x, w = data(device, 3, 4, grad=True), data(device, 4, 2, seed=1, grad=True)
    y = torch.tanh(x @ w).square().sum()
    (gx,) = torch.autograd.grad(y, x, create_graph=True)
    gx.norm().backward()
    return gx, x.grad, w.grad


@case
def third_order(device):
    x = data(device, 4, grad=True)
    y = x.exp() * x.pow(3)
    for _ in range(3):
        (y,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    return y


@case
def gradient_penalty(device):
    model = built(lambda: nn.Sequential(nn.Linear(3, 8), nn.Softplus(), nn.LayerNorm(8), nn.Linear(8, 1)), device)
    x = data(device, 5, 3, grad=True)
    (g,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    (g.norm(dim=1) - 1).square().mean().backward()
    return [p.grad for p in model.parameters()]


@once
def retain_graph_and_second_backward(device):
    x = data(device, 3, grad=True)
    y = (x * x).sum()
    y.backward(retain_graph=True)
    y.backward()
    first = x.grad.clone()
    try:
        y.backward()
    except RuntimeError as error:
        return first, str(error).split(".")[0]


@once
def unused_inputs(device):
    a, b = data(device, 3, grad=True), data(device, 3, seed=1, grad=True)
    y = (a * 2).sum()
    ga, gb = torch.autograd.grad(y, (a, b), allow_unused=True, retain_graph=True)
    zeros = torch.autograd.grad(y, b, allow_unused=True, materialize_grads=True, retain_graph=True)
    try:
        torch.autograd.grad(y, (a, b))
    except RuntimeError as error:
        return ga, gb, zeros, str(error)


@case
def vector_jacobian_and_many_outputs(device):
    x = data(device, 3, 4, grad=True)
    a, b = x.sin(), x.sum(1)
    grads = torch.autograd.grad((a, b), x, (data(device, 3, 4, seed=2), data(device, 3, seed=3)), retain_graph=True)
    batched = torch.autograd.grad(b, x, torch.eye(3, device=device), is_grads_batched=True)
    return grads, batched


@once
def backward_of_a_non_scalar_is_an_error(device):
    data(device, 3, grad=True).sin().backward()


@once
def backward_with_inputs(device):
    a, b = data(device, 3, grad=True), data(device, 3, seed=1, grad=True)
    (a * b).sum().backward(inputs=[a])
    return a.grad, b.grad


@once
def gradient_object_is_kept(device):
    x = data(device, 3, grad=True)
    (x * 2).sum().backward()
    first = x.grad
    (x * 3).sum().backward()
    mine = torch.zeros(3, device=device)
    y = data(device, 3, grad=True)
    y.grad = mine
    (y * 5).sum().backward()
    return x.grad is first, first, y.grad is mine, mine


@once
def gradient_of_wrong_shape_is_an_error(device):
    x = data(device, 3, grad=True)
    x.grad = torch.zeros(4, device=device)


# ---------------------------------------------------------------- custom functions


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, g):
        (x,) = ctx.saved_tensors
        return 2 * x * g


class AddInPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, amount):
        ctx.mark_dirty(x)
        return x.add_(amount)

    @staticmethod
    def backward(ctx, g):
        return g, None


class Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.set_materialize_grads(False)
        index = x.argmax(1)
        ctx.mark_non_differentiable(index)
        return x * 2, x * 3, index

    @staticmethod
    def backward(ctx, a, b, index):
        assert b is None
        return a * 2


class NewStyle(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x, y):
        return x * y, x.exp()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs, output[1])
        ctx.save_for_forward(*inputs, output[1])

    @staticmethod
    def backward(ctx, a, b):
        x, y, e = ctx.saved_tensors
        return a * y + b * e, a * x

    @staticmethod
    def jvp(ctx, tx, ty):
        x, y, e = ctx.saved_tensors
        return tx * y + ty * x, tx * e


@case
def custom_function_twice(device):
    x = data(device, 3, grad=True)
    y = Square.apply(x)
    (g,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    g.square().sum().backward()
    return y, g, x.grad


@case
def custom_function_in_place(device):
    x = data(device, 3, 4, grad=True)
    y = x * 2
    z = AddInPlace.apply(y, 5.0)
    z.sin().sum().backward()
    return z is y, y, x.grad


@once
def custom_function_without_materialized_gradients(device):
    x = data(device, 3, 4, grad=True)
    a, b, index = Split.apply(x)
    a.sum().backward()
    return x.grad, index, index.requires_grad, b.requires_grad


@case
def custom_function_under_func(device):
    x, y = data(device, 4, 3), data(device, 4, 3, seed=1)
    loss = lambda x, y: sum(o.sum() for o in NewStyle.apply(x, y))  # noqa: E731
    return (
        torch.func.grad(loss, (0, 1))(x, y),
        torch.func.vmap(NewStyle.apply)(x, y),
        torch.func.jvp(NewStyle.apply, (x, y), (y, x)),
    )


@once
def saved_tensor_changed_in_place_is_an_error(device):
    x = data(device, 3, grad=True)
    y = x.exp()
    y.mul_(2)
    y.sum().backward()


@once
def leaf_changed_in_place_is_an_error(device):
    data(device, 3, grad=True).add_(1)


@once
def view_of_leaf_changed_in_place_is_an_error(device):
    data(device, 3, grad=True)[0].zero_()


# ---------------------------------------------------------------- views and in-place


@case
def in_place_on_view(device):
    x = data(device, 4, 4, grad=True)
    y = x * 1
    y[1:3].mul_(2)
    y[:, 0] = x[0]
    y.t()[2].exp_()
    y.sin().sum().backward()
    return y, x.grad


@case
def in_place_on_base_changes_view(device):
    x = data(device, 4, 4, grad=True)
    y = x * 1
    v = y[1]
    y.mul_(3)
    v.sum().backward()
    return v, x.grad


@once
def view_facts(device):
    x = data(device, 4, 4, grad=True)
    y = x * 1
    v = y.view(-1)[3:]
    return v._is_view(), v._base is y, x.detach()._is_view(), y._is_view(), x[0]._base is x, v.is_leaf, v.output_nr


@case
def views_of_all_kinds(device):
    x = data(device, 2, 3, 4, grad=True)
    out = [
        x.transpose(0, 2).reshape(4, -1),
        x.expand(2, 2, 3, 4).sum(0),
        x.unfold(2, 2, 1),
        x.as_strided((2, 2), (3, 1), 2),
        x.diagonal(dim1=0, dim2=1),
        torch.stack(x.unbind(1)[::-1]),
        x.movedim(0, 2).squeeze(),
        x.roll(1, 2).flip(0),
        torch.view_as_complex(x.reshape(-1, 2)).abs(),
    ]
    sum((o * (i + 1)).sum() for i, o in enumerate(out)).backward()
    return out, x.grad


@case
def indexing_and_scatter(device):
    x = data(device, 5, 4, grad=True)
    index = torch.tensor([0, 2, 2], device=device)
    out = [
        x[index],
        x[:, index],
        x.gather(1, index.view(1, 3)),
        x.index_select(1, index),
        torch.zeros(5, 4, device=device).index_add(0, index, x[:3]),
        x.scatter_add(1, index.view(1, 3), x[:1, :3]),
        torch.where(x > 0, x, x * 2),
        x.masked_fill(x > 1, 0.0),
        x.cumsum(0),
        x.sort(1).values,
        x.topk(2, 1).values,
        x.max(1).values,
    ]
    sum((o * (i + 1)).sum() for i, o in enumerate(out)).backward()
    return out, x.grad


@case
def copy_and_fill(device):
    x, y = data(device, 3, 4, grad=True), data(device, 3, 4, seed=1, grad=True)
    z = torch.zeros(3, 4, device=device)
    z.copy_(x)
    z[0].fill_(2)
    z[1] = y[1]
    z.sum().backward()
    return z, x.grad, y.grad


# ---------------------------------------------------------------- grad modes, leaves, detach


@once
def grad_modes(device):
    x = data(device, 3, grad=True)
    with torch.no_grad():
        a = x * 2
        with torch.enable_grad():
            b = x * 2
    with torch.set_grad_enabled(False):
        c = x * 2

    @torch.no_grad()
    def f(t):
        return t * 2

    return [t.requires_grad for t in (a, b, c, f(x), x * 2)]


@once
def inference_mode(device):
    x = data(device, 3, grad=True)
    with torch.inference_mode():
        y = x * 2
        y.add_(1)
        z = y[1:]
        z.mul_(2)
        inside = (y.is_inference(), z.is_inference(), x.is_inference(), y.requires_grad)
    return inside, y.clone(), (y + 1).is_inference(), y.tolist() == y.cpu().tolist()


@once
def inference_tensor_saved_for_backward_is_an_error(device):
    with torch.inference_mode():
        y = data(device, 3) * 2
    (y * data(device, 3, grad=True)).sum().backward()


@once
def inference_tensor_changed_outside_is_an_error(device):
    with torch.inference_mode():
        y = data(device, 3) * 2
    y.add_(1)


@once
def requires_grad_flags(device):
    x = data(device, 3)
    y = x.requires_grad_()
    z = (x * 2).detach().requires_grad_()
    w = z.detach()
    w.add_(1)  # detached memory is shared
    errors = []
    for bad in (
        lambda: (x * 2).requires_grad_(False),
        lambda: torch.ones(2, device=device, dtype=torch.int64).requires_grad_(),
    ):
        try:
            bad()
        except RuntimeError as error:
            errors.append(str(error)[:40])
    x.requires_grad = False
    return y is x, z.is_leaf, z, w.requires_grad, errors, x.requires_grad


@once
def detach_in_place(device):
    x = data(device, 3, grad=True)
    y = x * 2
    y.detach_()
    return y.requires_grad, y.grad_fn is None, y.is_leaf, y


@once
def gradients_through_a_move(device):
    x = data("cpu", 3, grad=True)
    y = (x.to(device) * 2).to("cpu").sin()
    y.sum().backward()
    return x.grad, y


@once
def grad_dtype_conversions(device):
    x = data(device, 3, grad=True)
    y = x.double().half().float() * x.to(torch.bfloat16)
    y.sum().backward()
    return x.grad, y.dtype


@once
def anomaly_mode(device):
    x = torch.tensor([-1.0, 4.0], device=device, requires_grad=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with torch.autograd.detect_anomaly():
            (x.sqrt() * 0).sum().backward()


@once
def anomaly_mode_without_an_anomaly(device):
    x = data(device, 3, grad=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with torch.autograd.detect_anomaly():
            x.sin().sum().backward()
    return x.grad


# ---------------------------------------------------------------- checkpoint


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("tiers", ["on", "off"])
def test_checkpoint_replays_dropout(reentrant, tiers):
    torchlazy.config.tiers = tiers
    torchlazy.config.strict = True
    model = built(lambda: nn.Sequential(nn.Linear(6, 32), nn.Dropout(0.5), nn.GELU(), nn.Linear(32, 3)), "lazy")

    def run(wrapped):
        model.zero_grad()
        x = data("lazy", 8, 6, grad=True)
        torch.manual_seed(3)
        out = checkpoint(model, x, use_reentrant=reentrant) if wrapped else model(x)
        after = torch.rand(4, device="lazy")
        out.square().sum().backward()
        return out, after, x.grad, [p.grad for p in model.parameters()]

    same(run(True), run(False), rtol=1e-5, atol=1e-6)


@case
def checkpoint_without_dropout(device):
    model = built(lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh()), device)
    x = data(device, 5, 3, grad=True)
    a = checkpoint(model[:2], x, use_reentrant=False)
    b = checkpoint_sequential(model[2:], 2, a, use_reentrant=False)
    b.sum().backward()
    return b, x.grad, [p.grad for p in model.parameters()]


@once
def selective_checkpoint(device):
    from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

    def policy(ctx, op, *args, **kwargs):
        keep = op is torch.ops.aten.mm.default
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    w = data(device, 3, 3, seed=1, grad=True)
    x = data(device, 2, 3, grad=True)
    f = lambda x: (x @ w).sin().exp()  # noqa: E731
    out = checkpoint(f, x, use_reentrant=False, context_fn=lambda: create_selective_checkpoint_contexts(policy))
    out.sum().backward()
    return out, x.grad, w.grad


# ---------------------------------------------------------------- gradcheck


@pytest.mark.parametrize(
    "f",
    [
        lambda x, y: (x @ y.t()).softmax(1),
        lambda x, y: F.gelu(x) * torch.sigmoid(y),
        lambda x, y: F.layer_norm(x, (3,), y[0], y[1]),
        lambda x, y: torch.logsumexp(x * y, 1),
    ],
    ids=["softmax", "pointwise", "layer_norm", "logsumexp"],
)
def test_gradcheck(f):
    x = data("lazy", 2, 3, dtype=torch.float64, grad=True)
    y = data("lazy", 2, 3, dtype=torch.float64, seed=1, grad=True)
    assert torch.autograd.gradcheck(f, (x, y), fast_mode=True)
    assert torch.autograd.gradgradcheck(f, (x, y), fast_mode=True)


def test_gradcheck_slow_mode():
    x = data("lazy", 3, dtype=torch.float64, grad=True)
    assert torch.autograd.gradcheck(lambda x: x.sin() * x, (x,), check_forward_ad=True)


# ---------------------------------------------------------------- torch.func and forward mode


def _model_of(device):
    return built(lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)), device)


@case
def func_grad_and_vjp(device):
    x = data(device, 4)
    f = lambda x: (x.sin() * x).sum()  # noqa: E731
    value, pull = torch.func.vjp(lambda x: x * x.exp(), x)
    return torch.func.grad(f)(x), torch.func.grad_and_value(f)(x), value, pull(torch.ones(4, device=device))


@case
def func_jacobians(device):
    f = lambda x: torch.stack([x.sin().sum(), (x * x).sum(), x[0] * x[1]])  # noqa: E731
    x = data(device, 4)
    return torch.func.jacrev(f)(x), torch.func.jacfwd(f)(x)


@case
def func_hessian(device):
    return torch.func.hessian(lambda x: (x.sin() * x.pow(3)).sum())(data(device, 3))


@case
def autograd_functional(device):
    f = lambda x: (x.exp() * x).sum()  # noqa: E731
    x = data(device, 3)
    return torch.autograd.functional.jacobian(torch.sin, x), torch.autograd.functional.hessian(f, x)


@case
def per_sample_gradients(device):
    model = _model_of(device)
    params = {n: p.detach() for n, p in model.named_parameters()}

    def loss(p, x, y):
        return F.mse_loss(torch.func.functional_call(model, p, (x[None],))[0], y)

    return torch.func.vmap(torch.func.grad(loss), (None, 0, 0))(params, data(device, 5, 3), data(device, 5, 2, seed=1))


@case
def vmap_of_many_forms(device):
    x, y = data(device, 4, 3), data(device, 3, 4, seed=1)
    return [
        torch.func.vmap(torch.dot, (0, 1))(x, y),
        torch.func.vmap(lambda a: a.sum(), 1)(x),
        torch.func.vmap(lambda a, b: a @ b, (0, None))(x, y),
        torch.func.vmap(lambda a: torch.where(a > 0, a, -a), out_dims=1)(x),
        torch.func.vmap(torch.func.vmap(torch.sin))(x),
        torch.func.vmap(lambda a: a.softmax(0), chunk_size=2)(x),
    ]


@once
def vmap_randomness(device):
    x = torch.zeros(3, 100, device=device)
    rows = torch.func.vmap(lambda a: a + torch.rand_like(a), randomness="different")(x)
    equal = torch.func.vmap(lambda a: a + torch.rand_like(a), randomness="same")(x)
    return bool((rows[0] != rows[1]).any()), bool((equal[0] == equal[1]).all())


@case
def functional_call_and_linearize(device):
    model = _model_of(device)
    params = {n: p * 2 for n, p in model.named_parameters()}
    x = data(device, 2, 3)
    out = torch.func.functional_call(model, params, (x,))
    out.sum().backward()
    return out, [p.grad for p in model.parameters()]


@case
def func_jvp(device):
    x, t = data(device, 4), data(device, 4, seed=1)
    return torch.func.jvp(lambda x: x.sin() * x, (x,), (t,))


@case
def dual_tensors(device):
    x, t = data(device, 3, 4), data(device, 3, 4, seed=1)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, t)
        y = F.layer_norm(dual.exp() @ dual.t(), (3,))
        value, tangent = forward_ad.unpack_dual(y)
        return value.clone(), tangent.clone()


@once
def functionalize(device):
    def f(x):
        y = x.clone()
        y[0].add_(1)
        return y

    return torch.func.functionalize(f)(data(device, 3, 4))
