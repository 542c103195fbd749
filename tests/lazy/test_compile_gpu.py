"""`torchlazy.compile` on a GPU: replayed programs and CUDA graphs give what the recorded step gives."""

from __future__ import annotations

import copy

import pytest
import torch
import torchlazy
from torchlazy.lazy.run.segments import watch
from torchlazy.runtime.cuda.graph import GraphedProgram

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]


@pytest.fixture(autouse=True)
def _at_once():
    before = torchlazy.config.tiers
    torchlazy.config.tiers = "off"
    torchlazy.set_target("cuda")
    yield
    torchlazy.config.tiers = before


def _train(mode: str | None, steps: int = 12, dropout: float = 0.1):
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(32, 64), torch.nn.GELU(), torch.nn.LayerNorm(64), torch.nn.Dropout(dropout),
        torch.nn.Linear(64, 8),
    ).to("lazy")  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    batches = torch.randn(steps, 16, 32)
    labels = torch.randint(0, 8, (steps, 16))

    def step(x, y):
        loss = torch.nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    run = step if mode is None else torchlazy.compile(step, mode=mode)
    torch.manual_seed(1)
    losses = []
    for i in range(steps):
        if i == 8:
            optimizer.param_groups[0]["lr"] = 3e-3
        losses.append(run(batches[i].to("lazy"), labels[i].to("lazy")))
    return torch.stack([loss.cpu() for loss in losses]), [p.detach().cpu() for p in model.parameters()], run


@pytest.mark.parametrize("mode", ["default", "reduce-overhead", "max-autotune"])
def test_training_is_what_it_is_without_compile(mode):
    losses, parameters, _ = _train(None)
    torchlazy.reset_metrics()
    found, compiled, run = _train(mode)
    torch.testing.assert_close(found, losses, rtol=1e-5, atol=1e-6)
    for a, b in zip(compiled, parameters, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    assert run.report().replays >= 5, run.report()
    if mode == "reduce-overhead":
        assert torchlazy.metrics()["graph_replays"] >= 4, torchlazy.metrics()["fallbacks"]


def test_a_capture_holds_no_copy_of_the_state(monkeypatch):
    model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(8))).to("lazy")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)
    state = 3 * sum(4 * p.numel() for p in model.parameters())
    held: list[int] = []
    capture = GraphedProgram.capture

    def measured(graph, *args):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        try:
            return capture(graph, *args)
        finally:
            held.append(torch.cuda.max_memory_allocated() - before)

    monkeypatch.setattr(GraphedProgram, "capture", measured)

    def step(x):
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    run = torchlazy.compile(step, mode="reduce-overhead", audit=False)
    x = torch.randn(16, 1024).to("lazy")
    for _ in range(6):
        run(x)
    assert held and max(held) < state, (held, state)  # gradients are a third of it


@pytest.mark.parametrize("kind", ["mlp", "convnet"])
def test_a_step_that_reads_its_loss_is_two_graphs(kind, monkeypatch):
    monkeypatch.setattr(watch, "LEAST_BYTES", 0)

    def train(mode):
        torch.manual_seed(0)
        if kind == "mlp":
            model = torch.nn.Sequential(
                torch.nn.Linear(32, 64), torch.nn.GELU(), torch.nn.LayerNorm(64), torch.nn.Dropout(0.1),
                torch.nn.Linear(64, 8),
            ).to("lazy")  # fmt: skip
        else:
            model = torch.nn.Sequential(
                torch.nn.Unflatten(1, (2, 4, 4)), torch.nn.Conv2d(2, 16, 3, padding=1, bias=False),
                torch.nn.BatchNorm2d(16), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(256, 8),
            ).to("lazy")  # fmt: skip
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True)

        def step(x, y):
            loss = torch.nn.functional.cross_entropy(model(x), y)
            number = loss.item()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return number

        run = step if mode is None else torchlazy.compile(step, mode=mode, audit=False)
        torch.manual_seed(1)
        batches, labels = torch.randn(12, 16, 32), torch.randint(0, 8, (12, 16))
        losses = [run(x.to("lazy"), y.to("lazy")) for x, y in zip(batches, labels, strict=True)]
        return losses, {name: value.cpu() for name, value in model.state_dict().items()}

    wanted = train(None)
    torchlazy.reset_metrics()
    found = train("reduce-overhead")
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    metrics = torchlazy.metrics()
    assert metrics["graph_replays"] >= 12 and not metrics["fallbacks"], metrics["fallbacks"]


def test_results_of_a_graph_are_memory_of_their_own():
    scale = torch.ones(4, device="lazy")
    run = torchlazy.compile(lambda x: x * scale + 1, mode="reduce-overhead", audit=False)
    inputs = [torch.full((4,), float(i)).to("lazy") for i in range(8)]
    results = [run(x) for x in inputs]
    for i, result in enumerate(results):
        assert torch.equal(result.cpu(), torch.full((4,), i + 1.0))
    assert torchlazy.metrics()["graph_replays"] > 0


def test_a_moved_parameter_is_noticed():
    weight = torch.nn.Parameter(torch.ones(4, device="lazy"))
    holder = torch.nn.Module()
    holder.weight = weight
    run = torchlazy.compile(lambda x: (x * holder.weight).detach(), mode="reduce-overhead", audit=False)
    x = torch.full((4,), 2.0).to("lazy")
    for _ in range(5):
        assert torch.equal(run(x).cpu(), torch.full((4,), 2.0))
    with torch.no_grad():
        weight.data = torch.full((4,), 3.0).to("lazy")
    for _ in range(5):
        assert torch.equal(run(x).cpu(), torch.full((4,), 6.0))


def test_module_with_backward_outside():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4)).to("lazy")
    twin = copy.deepcopy(model)
    compiled = torchlazy.compile(model)
    for i in range(6):
        x = torch.randn(5, 8).to("lazy")
        compiled(x).square().sum().backward()
        twin(x).square().sum().backward()
        for a, b in zip(model.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(a.grad.cpu(), b.grad.cpu(), msg=f"call {i}")


@pytest.mark.parametrize("is_masked", [False, True])
@pytest.mark.parametrize("device", ["lazy", "cuda"])
def test_attention_with_dropout_is_replayed(device, is_masked):
    """Its kernel draws from the GPU's generator when the program runs, which is no seeding by the call."""
    torch.manual_seed(0)
    q, k = torch.randn(2, 2, 2, 16, 16, device=device, requires_grad=True).unbind()
    mask = torch.zeros(2, 1, 16, 16, device=device) if is_masked else None

    def call(q, k):
        q = torch.nn.functional.dropout(q, 0.2)
        out = torch.nn.functional.scaled_dot_product_attention(q, k, k, mask, dropout_p=0.3)
        return torch.nn.functional.scaled_dot_product_attention(out, k, k, mask, dropout_p=0.3)

    run = torchlazy.compile(call, audit=False)
    results = [run(q, k).detach().cpu() for _ in range(6)]
    assert run.report().replays >= 3, run.report()
    assert not any(torch.equal(one, other) for one in results[:-1] for other in results[1:] if one is not other)
