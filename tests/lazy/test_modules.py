"""Modules on the lazy device: moved, made there, saved, copied, and run forward and backward as on the CPU."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
import torchlazy
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize

from tests.lazy.compare import Cases, check, data, ints
from tests.lazy.models import Tied, built, devices, forward_backward, host, mlp, same

case = Cases()


@case.parametrize()
def test_as_in_eager(f, compiled):
    check(f, rtol=1e-4, atol=1e-5, ignore=("version",))


# ---------------------------------------------------------------- layers


@case
def linear_and_activations(device):
    model = built(
        lambda: nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 6), nn.SiLU(), nn.Linear(6, 2)), device
    )
    return forward_backward(model, data(device, 3, 4, grad=True))


@case
def bilinear(device):
    model = built(lambda: nn.Bilinear(3, 4, 5), device)
    return forward_backward(model, data(device, 2, 3, grad=True), data(device, 2, 4, seed=1, grad=True))


@case
def conv_batchnorm_train(device):
    model = built(lambda: nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU()), device)
    return forward_backward(model, data(device, 2, 2, 5, 5, grad=True))


@case
def batchnorm_eval_and_without_statistics(device):
    kept = built(lambda: nn.BatchNorm1d(4), device)
    kept(data(device, 6, 4))
    kept.eval()
    free = built(lambda: nn.BatchNorm1d(4, track_running_stats=False, affine=False), device)
    x = data(device, 6, 4, seed=3, grad=True)
    return forward_backward(nn.Sequential(kept, free), x)


@case
def batchnorm_momentum_none(device):
    model = built(lambda: nn.BatchNorm1d(3, momentum=None), device)
    for seed in range(3):
        model(data(device, 5, 3, seed=seed))
    return dict(model.state_dict())


@case
def conv_kinds(device):
    model = built(
        lambda: nn.Sequential(
            nn.Conv1d(4, 6, 3, groups=2, padding="same"), nn.ReLU(), nn.ConvTranspose1d(6, 2, 4, stride=2, padding=1)
        ),
        device,
    )
    return forward_backward(model, data(device, 2, 4, 8, grad=True))


@case
def pools(device):
    x = data(device, 2, 3, 8, 8, grad=True)
    model = nn.Sequential(nn.MaxPool2d(2), nn.AvgPool2d(3, stride=1, padding=1), nn.AdaptiveAvgPool2d(2), nn.Flatten())
    return forward_backward(model, x)


@case
def group_and_instance_norm(device):
    model = built(lambda: nn.Sequential(nn.GroupNorm(2, 4), nn.InstanceNorm1d(4, affine=True)), device)
    return forward_backward(model, data(device, 2, 4, 6, grad=True))


@case
def instance_norm_with_statistics(device):
    model = built(lambda: nn.InstanceNorm2d(3, track_running_stats=True), device)
    return forward_backward(model, data(device, 2, 3, 4, 4, grad=True))


@case
def layer_and_rms_norm(device):
    model = built(lambda: nn.Sequential(nn.LayerNorm(6), nn.RMSNorm(6)), device)
    return forward_backward(model, data(device, 3, 6, grad=True))


@case
def embedding(device):
    model = built(lambda: nn.Embedding(10, 4, padding_idx=0), device)
    return forward_backward(model, ints(device, 2, 5))


@case
def embedding_max_norm(device):
    model = built(lambda: nn.Embedding(10, 4, max_norm=1.0), device)
    out = model(ints(device, 6))
    return out, model.weight


@case
def embedding_sparse(device):
    model = built(lambda: nn.Embedding(10, 4, sparse=True), device)
    optimizers = [torch.optim.SGD(model.parameters(), 0.1), torch.optim.SparseAdam(model.parameters(), 0.1)]
    for optimizer in optimizers:
        model(torch.tensor([1, 3, 3], device=device)).sum().backward()
        sparse = model.weight.grad.is_sparse
        optimizer.step()
        optimizer.zero_grad()
    return sparse, model.weight


@case
def embedding_bag(device):
    model = built(lambda: nn.EmbeddingBag(10, 4, mode="mean"), device)
    out = model(ints(device, 7), torch.tensor([0, 3, 4], device=device))
    out.square().sum().backward()
    return out, model.weight.grad


@case
def lstm(device):
    model = built(lambda: nn.LSTM(3, 4, num_layers=2, bidirectional=True, batch_first=True), device)
    out, (h, c) = model(data(device, 2, 5, 3))
    (out.sum() + h.sum() + c.sum()).backward()
    return out, h, c, {n: p.grad for n, p in model.named_parameters()}


@case
def gru_and_cells(device):
    gru = built(lambda: nn.GRU(3, 4), device)
    out, h = gru(data(device, 5, 2, 3))
    cell, plain = built(lambda: nn.LSTMCell(3, 4), device), built(lambda: nn.RNNCell(3, 4), device)
    a = cell(data(device, 2, 3))
    b = plain(data(device, 2, 3))
    (out.sum() + a[0].sum() + b.sum()).backward()
    return out, h, a, b, [p.grad for m in (gru, cell, plain) for p in m.parameters()]


@case
def packed_sequence(device):
    model = built(lambda: nn.GRU(3, 4, batch_first=True), device)
    x = data(device, 3, 5, 3, grad=True)
    packed = nn.utils.rnn.pack_padded_sequence(x, torch.tensor([5, 3, 2]), batch_first=True)
    out, h = model(packed)
    padded, lengths = nn.utils.rnn.pad_packed_sequence(out, batch_first=True)
    (padded.sum() + h.sum()).backward()
    return padded, lengths, h, x.grad


@case
def multihead_attention(device):
    model = built(lambda: nn.MultiheadAttention(8, 2, batch_first=True), device)
    x = data(device, 2, 5, 8, grad=True)
    out, weights = model(x, x, x)
    plain, _ = model(x, x, x, need_weights=False, key_padding_mask=torch.zeros(2, 5, dtype=torch.bool, device=device))
    (out.sum() + plain.square().sum()).backward()
    return out, weights, plain, x.grad, [p.grad for p in model.parameters()]


@case
def transformer_encoder_train(device):
    model = built(lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), device)
    return forward_backward(model, data(device, 2, 5, 8, grad=True))


@case
def transformer_encoder_eval_fast_path(device):
    model = built(lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), device).eval()
    with torch.no_grad():
        return model(data(device, 2, 5, 8))


@case
def transformer_decoder_causal(device):
    model = built(lambda: nn.TransformerDecoderLayer(8, 2, 16, dropout=0.0, batch_first=True), device)
    mask = nn.Transformer.generate_square_subsequent_mask(4, device=device)
    x, memory = data(device, 2, 4, 8, grad=True), data(device, 2, 6, 8, seed=1)
    out = model(x, memory, tgt_mask=mask, tgt_is_causal=True)
    out.square().sum().backward()
    return out, x.grad


@case
def upsample_and_pixel_shuffle(device):
    model = nn.Sequential(
        nn.Upsample(scale_factor=2, mode="bilinear", align_corners=False), nn.PixelShuffle(2), nn.ReflectionPad2d(1)
    )
    return forward_backward(model, data(device, 1, 4, 3, 3, grad=True))


@case
def losses_of_classes(device):
    logits, labels = data(device, 6, 4, grad=True), ints(device, 6, high=4)
    out = [
        F.cross_entropy(logits, labels),
        F.cross_entropy(logits, labels, weight=data(device, 4).abs(), ignore_index=1, label_smoothing=0.1),
        F.cross_entropy(logits, data(device, 6, 4, seed=2).softmax(1)),
        F.nll_loss(logits.log_softmax(1), labels, reduction="sum"),
        F.multi_margin_loss(logits, labels),
        F.kl_div(logits.log_softmax(1), data(device, 6, 4, seed=3).softmax(1), reduction="batchmean"),
    ]
    sum(out).backward()
    return out, logits.grad


@case
def losses_of_values(device):
    x, y = data(device, 6, 4, grad=True), data(device, 6, 4, seed=1)
    sign = torch.tensor([1.0, -1.0, 1.0, -1.0, 1.0, 1.0], device=device)
    out = [
        F.mse_loss(x, y),
        F.l1_loss(x, y),
        F.smooth_l1_loss(x, y, beta=0.5),
        F.huber_loss(x, y),
        F.binary_cross_entropy_with_logits(x, (y > 0).float(), pos_weight=torch.full((4,), 2.0, device=device)),
        F.binary_cross_entropy(x.sigmoid(), (y > 0).float()),
        F.gaussian_nll_loss(x, y, torch.ones_like(y)),
        F.poisson_nll_loss(x, y.abs()),
        F.soft_margin_loss(x, y.sign()),
        F.cosine_embedding_loss(x, y, sign),
        F.triplet_margin_loss(x, y, y.flip(0)),
        F.margin_ranking_loss(x[:, 0], x[:, 1], sign),
        F.hinge_embedding_loss(x, y.sign()),
    ]
    sum(out).backward()
    return out, x.grad


@case
def ctc_loss(device):
    logits = data(device, 8, 2, 5, grad=True)
    targets = torch.tensor([[1, 2, 3], [2, 4, 0]])
    loss = F.ctc_loss(logits.log_softmax(2), targets.to(device), torch.tensor([8, 7]), torch.tensor([3, 2]))
    loss.backward()
    return loss, logits.grad


# ---------------------------------------------------------------- parametrizations and helpers


@case
def weight_norm_parametrization(device):
    model = built(lambda: parametrizations.weight_norm(nn.Linear(4, 3)), device)
    return forward_backward(model, data(device, 2, 4, grad=True))


@case
def spectral_norm_parametrization(device):
    model = built(lambda: parametrizations.spectral_norm(nn.Linear(4, 3)), device)
    model(data(device, 2, 4))
    return forward_backward(model, data(device, 2, 4, grad=True))


@case
def old_weight_and_spectral_norm(device):
    model = built(
        lambda: nn.Sequential(nn.utils.weight_norm(nn.Linear(4, 4)), nn.utils.spectral_norm(nn.Linear(4, 3))), device
    )
    return forward_backward(model, data(device, 2, 4, grad=True))


@case
def own_parametrization_set_and_removed(device):
    class Symmetric(nn.Module):
        def forward(self, x):
            return x.triu() + x.triu(1).transpose(-1, -2)

        def right_inverse(self, x):
            return x.triu()

    model = built(lambda: nn.Linear(3, 3), device)
    parametrize.register_parametrization(model, "weight", Symmetric())
    model.weight = data(device, 3, 3)
    before = model.weight.clone()
    parametrize.remove_parametrizations(model, "weight")
    return before, model.weight


@case
def clipping(device):
    model = built(lambda: nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2)), device)
    norms = []
    for kind in ("norm", "inf", "value", "single"):
        model.zero_grad()
        (model(data(device, 3, 4)) * 10).square().sum().backward()
        if kind == "value":
            nn.utils.clip_grad_value_(model.parameters(), 0.5)
        else:
            norm_type = float("inf") if kind == "inf" else 2.0
            foreach = False if kind == "single" else None
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), 1.0, norm_type=norm_type, foreach=foreach))
        norms.append([p.grad.clone() for p in model.parameters()])
    return norms


@case
def vectors_of_parameters(device):
    model = built(lambda: nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2)), device)
    vector = nn.utils.parameters_to_vector(model.parameters())
    nn.utils.vector_to_parameters(vector * 2, model.parameters())
    return vector, list(model.parameters()), model(data(device, 2, 4))


@case
def initializers(device):
    w = torch.empty(4, 3, device=device)
    return [
        nn.init.constant_(w.clone(), 2.0),
        nn.init.eye_(w.clone()),
        nn.init.dirac_(torch.empty(2, 2, 3, device=device)),
        nn.init.ones_(w.clone()),
    ]


@case
def stacked_functional_call(device):
    models = [built(lambda seed=seed: nn.Linear(3, 2), device) for seed in range(3)]
    for number, model in enumerate(models):
        nn.init.constant_(model.bias, float(number))
    params, buffers = torch.func.stack_module_state(models)
    x = data(device, 4, 3)
    out = torch.func.vmap(lambda p, b: torch.func.functional_call(models[0], (p, b), (x,)))(params, buffers)
    return out


@case
def fused_conv_bn(device):
    conv, bn = built(lambda: nn.Conv2d(2, 3, 3), device), built(lambda: nn.BatchNorm2d(3), device)
    bn(conv(data(device, 2, 2, 5, 5)))
    fused = nn.utils.fuse_conv_bn_eval(conv.eval(), bn.eval())
    return fused(data(device, 2, 2, 5, 5, seed=2))


@case
def module_lists_and_dicts(device):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleDict({"a": nn.Linear(3, 3), "b": nn.Linear(3, 3)})
            self.scales = nn.ParameterList([nn.Parameter(torch.ones(3)) for _ in range(2)])
            self.register_buffer("shift", torch.arange(3.0))
            self.register_buffer("hidden", torch.ones(3), persistent=False)

        def forward(self, x):
            for layer, scale in zip(self.layers.values(), self.scales, strict=True):
                x = layer(x) * scale + self.shift - self.hidden
            return x

    model = built(Net, device)
    return forward_backward(model, data(device, 2, 3, grad=True)), list(model.state_dict())


# ---------------------------------------------------------------- dropout


@pytest.mark.parametrize(
    "make",
    [nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.AlphaDropout, nn.FeatureAlphaDropout],
    ids=lambda m: m.__name__,
)
def test_dropout_masks_are_random_and_backward_uses_the_same(make, compiled):
    layer = make(0.5)
    x = torch.ones(16, 32, 4, device="lazy", requires_grad=True)
    if make is nn.Dropout2d:
        x = torch.ones(16, 32, 4, 4, device="lazy", requires_grad=True)
    a, b = layer(x), layer(x)
    a.sum().backward()
    a, b, gradient = a.detach().cpu(), b.detach().cpu(), x.grad.cpu()
    assert not torch.equal(a, b)
    low, high = a.min(), a.max()
    assert set(a.unique().tolist()) == {low.item(), high.item()}
    assert torch.equal(gradient > 0, a == high)  # the mask of the forward, not a new one
    assert 0.3 < (a == low).float().mean() < 0.7
    assert torch.equal(layer.eval()(x).cpu(), x.detach().cpu())


def test_dropout_edge_rates(compiled):
    x = data("lazy", 4, 4)
    assert torch.equal(F.dropout(x, 0.0).cpu(), x.cpu())
    assert torch.equal(F.dropout(x, 1.0).cpu(), torch.zeros(4, 4))
    y = x.clone()
    F.dropout(y, 0.5, inplace=True)
    assert set((y.cpu() / x.cpu()).unique().tolist()) <= {0.0, 2.0}


# ---------------------------------------------------------------- moving


def test_to_lazy_and_back_keeps_parameters_and_ties():
    model = Tied()
    weight = model.embed.weight
    for device in ("lazy", "cpu", "lazy"):
        assert model.to(device) is model
        assert devices(model) == {device}
        assert model.embed.weight is weight and model.head.weight is weight
        assert torchlazy.is_lazy(weight) == (device == "lazy")
        assert isinstance(weight, nn.Parameter) and weight.requires_grad and weight.is_leaf
        assert len(list(model.parameters())) == 1


@pytest.mark.parametrize("make", [lambda p: torch.optim.SGD(p, 0.1, momentum=0.9), torch.optim.AdamW])
def test_optimizer_made_before_the_move_stays_valid(make, compiled):
    def run(moves):
        model = mlp()
        optimizer = make(model.parameters())
        for step, device in enumerate(moves):
            model.to(device)
            if step:  # torch moves a model's gradients with it, an optimizer's state never
                for state in optimizer.state.values():
                    for name, value in state.items():
                        if isinstance(value, torch.Tensor) and value.dim():
                            state[name] = value.to(device)
            model(data(device, 5, 4, seed=step)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return {name: value.cpu() for name, value in model.state_dict().items()}

    same(run(("lazy", "lazy", "cpu", "lazy")), run(("cpu",) * 4), rtol=1e-4, atol=1e-5)


def test_gradients_move_with_their_parameters():
    model = mlp()
    model(data("cpu", 5, 4)).sum().backward()
    want = [p.grad.clone() for p in model.parameters()]
    model.to("lazy")
    assert all(p.grad.device.type == "lazy" for p in model.parameters())
    same([p.grad.cpu() for p in model.parameters()], want)
    model.to("cpu")
    same([p.grad for p in model.parameters()], want)


def test_frozen_parameters_and_dtypes():
    model = mlp()
    model[0].requires_grad_(False)
    model.to("lazy", torch.float64)
    assert [p.requires_grad for p in model.parameters()] == [False, True, True, True, True]
    assert {p.dtype for p in model.parameters()} == {torch.float64}
    model.to(torch.bfloat16)
    assert model[1].running_mean.dtype == torch.bfloat16 and model[1].num_batches_tracked.dtype == torch.int64
    model.half().float()
    assert devices(model) == {"lazy"} and model[0].weight.dtype == torch.float32


def test_made_on_the_device():
    model = nn.Linear(3, 2, device="lazy")
    with torch.device("lazy"):
        other = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.LSTM(3, 4))
    assert devices(model) == devices(other) == {"lazy"}
    bound = 1 / 3**0.5
    assert model.weight.abs().max().item() <= bound and model.weight.std().item() > 0
    assert (
        model(torch.ones(1, 3, device="lazy")).cpu() - model.weight.cpu().sum(1) - model.bias.cpu()
    ).abs().max() < 1e-6


def test_to_empty_and_meta_init():
    source = mlp()
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 8, bias=False), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 2))
    model.to_empty(device="lazy")
    assert devices(model) == {"lazy"}
    model.load_state_dict(source.state_dict())
    x = data("cpu", 5, 4)
    same(model(x.to("lazy")).cpu(), source(x), rtol=1e-5, atol=1e-6)
    with torch.device("meta"):
        assigned = nn.Linear(4, 8, bias=False)
    assigned.load_state_dict({n: t.to("lazy") for n, t in source[0].state_dict().items()}, assign=True)
    assert devices(assigned) == {"lazy"}
    same(assigned(x.to("lazy")).cpu(), source[0](x), rtol=1e-5, atol=1e-6)


def test_module_cpu_and_to_like():
    model = mlp().to("lazy")
    model.to(torch.zeros(1))  # .to(tensor): its device and dtype
    assert devices(model) == {"cpu"}
    model.to(torch.zeros(1, device="lazy"))
    assert devices(model) == {"lazy"}
    assert devices(model.cpu()) == {"cpu"}


# ---------------------------------------------------------------- state dicts and copies


@pytest.mark.parametrize("source", ["cpu", "lazy"])
@pytest.mark.parametrize("target", ["cpu", "lazy"])
def test_load_state_dict(source, target):
    a, b = mlp().to(source), mlp().to(target)
    with torch.no_grad():
        for p in a.parameters():
            p.add_(1)
        a[1].running_mean.fill_(3)
    before = [id(p) for p in b.parameters()]
    assert str(b.load_state_dict(a.state_dict())) == "<All keys matched successfully>"
    assert [id(p) for p in b.parameters()] == before and devices(b) == {target}
    same(b.state_dict(), a.state_dict())


def test_load_state_dict_strict():
    model = mlp().to("lazy")
    state = model.state_dict()
    del state["3.bias"]
    state["extra"] = torch.zeros(1)
    with pytest.raises(RuntimeError, match="Missing key"):
        model.load_state_dict(state)
    result = model.load_state_dict(state, strict=False)
    assert result.missing_keys == ["3.bias"] and result.unexpected_keys == ["extra"]
    with pytest.raises(RuntimeError, match="size mismatch"):
        model.load_state_dict({**mlp().state_dict(), "3.bias": torch.zeros(3)})


def test_state_dict_is_a_window_on_the_parameters():
    model = mlp().to("lazy")
    state = model.state_dict()
    assert not any(t.requires_grad for t in state.values())
    with torch.no_grad():
        model[0].weight.zero_()
    assert state["0.weight"].abs().sum().item() == 0
    kept = {n: t.clone() for n, t in state.items()}
    with torch.no_grad():
        model[0].weight.fill_(1)
    assert kept["0.weight"].sum().item() == 0


def test_deepcopy_of_module_keeps_ties():
    model = Tied().to("lazy")
    model(ints("lazy", 2, 3)).sum().backward()
    twin = copy.deepcopy(model)
    assert twin.head.weight is twin.embed.weight and twin.embed.weight is not model.embed.weight
    assert isinstance(twin.embed.weight, nn.Parameter) and devices(twin) == {"lazy"}
    assert twin.embed.weight.grad is None and model.embed.weight.grad is not None  # as eager's copies of parameters
    with torch.no_grad():
        twin.embed.weight.zero_()
    assert model.embed.weight.abs().sum().item() > 0


def trained(device: str, make=torch.optim.Adam):
    model = mlp().to(device)
    optimizer = make(model.parameters(), lr=0.1)
    for step in range(2):
        optimizer.zero_grad()
        model(data(device, 5, 4, seed=step)).square().sum().backward()
        optimizer.step()
    return model, optimizer


@pytest.mark.parametrize("way", ["deepcopy", "saved", "pickled", "from cpu", "to cpu"])
def test_optimizer_state(way, compiled):
    model, optimizer = trained("cpu" if way == "from cpu" else "lazy")
    state = optimizer.state_dict()
    if way == "saved":
        file = io.BytesIO()
        torch.save(state, file)
        file.seek(0)
        state = torch.load(file, weights_only=True)
    elif way == "pickled":
        state = pickle.loads(pickle.dumps(state))
    else:  # load_state_dict keeps the very step counters that it is given
        state = copy.deepcopy(state)
    device = "cpu" if way == "to cpu" else "lazy"
    other = mlp().to(device)
    other.load_state_dict(model.state_dict())
    loaded = torch.optim.Adam(other.parameters(), lr=0.1)
    loaded.load_state_dict(state)
    for m, o in ((model, optimizer), (other, loaded)):
        o.zero_grad()
        m(data(next(m.parameters()).device.type, 5, 4, seed=7)).square().sum().backward()
        o.step()
    same(other.state_dict(), model.state_dict(), rtol=1e-4, atol=1e-5)
    same(loaded.state_dict(), optimizer.state_dict(), rtol=1e-4, atol=1e-5)


def test_deepcopied_model_and_optimizer_together(compiled):
    pair = trained("lazy")
    model, optimizer = copy.deepcopy(pair)
    assert {id(p) for g in optimizer.param_groups for p in g["params"]} == {id(p) for p in model.parameters()}
    for m, o in ((model, optimizer), pair):
        o.zero_grad()
        m(data("lazy", 5, 4)).square().sum().backward()
        o.step()
    same(model.state_dict(), host(pair[0].state_dict()))


# ---------------------------------------------------------------- files


def round_trip(value, **kwargs):
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, **kwargs)


@pytest.mark.parametrize("saved_on", ["cpu", "lazy"])
@pytest.mark.parametrize("map_location", [None, "cpu", "lazy", torch.device("lazy"), lambda storage, location: storage])
@pytest.mark.parametrize("weights_only", [True, False])
def test_save_and_load(saved_on, map_location, weights_only):
    model = mlp().to(saved_on)
    with torch.no_grad():
        model[0].weight.mul_(2)  # pending when saved
    state = round_trip(model.state_dict(), map_location=map_location, weights_only=weights_only)
    if not callable(map_location):
        want = saved_on if map_location is None else torch.device(map_location).type
        assert {t.device.type for t in state.values()} == {want}
        assert all(torchlazy.is_lazy(t) == (want == "lazy") for t in state.values())
    same(host(state), model.state_dict())


@pytest.mark.parametrize("map_location", [None, "cpu", "lazy"])
def test_save_and_load_whole_module(map_location):
    model = Tied().to("lazy")
    loaded = round_trip(model, map_location=map_location, weights_only=False)
    assert devices(loaded) == {map_location or "lazy"}
    assert loaded.head.weight is loaded.embed.weight
    same(loaded.state_dict(), model.state_dict())


def test_load_mmap_and_into_lazy(tmp_path):
    path = tmp_path / "weights.pt"
    torch.save(mlp().state_dict(), path)
    state = torch.load(path, mmap=True, map_location="cpu")
    model = mlp().to("lazy")
    model.load_state_dict(state)
    same(model.state_dict(), host(state))


def test_saved_views_share_memory_when_loaded():
    x = data("lazy", 4, 6)
    tensor, view, parameter = round_trip([x, x[1:], nn.Parameter(x[0].clone())])
    same(host([tensor, view, parameter]), host([x, x[1:], x[0]]))
    assert isinstance(parameter, nn.Parameter) and parameter.requires_grad


def test_pickle_of_module_and_tensors():
    model = mlp().to("lazy")
    twin = pickle.loads(pickle.dumps(model))
    assert devices(twin) == {"lazy"} and all(isinstance(p, nn.Parameter) for p in twin.parameters())
    same(twin.state_dict(), model.state_dict())
    x = data("lazy", 3, 4).t().requires_grad_()
    y = pickle.loads(pickle.dumps(x))
    assert y.requires_grad and y.is_leaf and y.device.type == "lazy"
    same(host(y), host(x))


# ---------------------------------------------------------------- data loaders


@pytest.mark.parametrize("workers", [0, 2])
def test_data_loader(workers):
    x, y = data("cpu", 10, 4), ints("cpu", 10)
    data_set = torch.utils.data.TensorDataset(x, y)
    pending = torch.ones(3, device="lazy") * 2  # recorded, not run, when the workers fork
    loader = torch.utils.data.DataLoader(data_set, batch_size=4, num_workers=workers)
    got = [(a.to("lazy"), b.to("lazy", non_blocking=True)) for a, b in loader]
    same(torch.cat([a for a, _ in got]).cpu(), x)
    same(torch.cat([b for _, b in got]).cpu(), y)
    assert pending.tolist() == [2, 2, 2]


def test_data_loader_over_lazy_tensors():
    x = data("lazy", 10, 4)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x), batch_size=5, shuffle=True)
    rows = torch.cat([batch for (batch,) in loader])
    assert rows.device.type == "lazy"
    same(rows.cpu().sort(0).values, x.cpu().sort(0).values)


@pytest.mark.usefixtures("device_in_python")
def test_move_with_parameters_in_a_living_graph_says_so():
    model = nn.utils.weight_norm(nn.Linear(3, 2))  # its weight is a product that refers to both parameters
    with pytest.warns(UserWarning, match="still alive"):
        model.to("lazy")
    assert devices(model) == {"lazy"} and model(torch.ones(1, 3, device="lazy")).device.type == "lazy"
