"""The lazy device by the native recorder: tensors of the ordinary classes that are recorded wherever they are used.

Invariant: each case is compared with the same program on the device that computes.
"""

from __future__ import annotations

import contextlib
import copy
import io
import os
import pickle
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torchlazy
from torch import nn
from torch.nn import functional as F
from torchlazy.lazy.native.block import BLOCKS
from torchlazy.runtime.native.recorder_library import LIBRARY

from tests.lazy.models import mean_square_step

LAZY = torch.device("lazy")


@pytest.fixture(autouse=True)
def library() -> Iterator[Any]:
    if torchlazy.config.native != "on" or LIBRARY.wait() is None:
        pytest.skip("no native recorder")
    torchlazy.config.native_device = "on"
    torch.zeros(1, device=LAZY)
    native = BLOCKS.library
    native.forget()
    native.reset_counts()
    native.for_tests(4, False)
    yield native
    native.forget()
    native.for_tests(4, True)
    torchlazy.config.native_device = "off"


def test_tensors_are_of_the_ordinary_class_and_on_the_lazy_device() -> None:
    made = {
        "factory": torch.ones(2, 3, device="lazy"),
        "moved": torch.ones(2, 3).to("lazy"),
        "from data": torch.tensor([[1.0, 2.0]], device=LAZY),
        "computed": torch.ones(3, device=LAZY) * torch.ones(3, device=LAZY),
        "view": torch.ones(2, 3, device=LAZY).t()[1:],
        "like": torch.zeros_like(torch.ones(2, device=LAZY)),
        "new": torch.ones(2, device=LAZY).new_zeros(3),
        "cast": torch.ones(2, device=LAZY).half(),
        "detached": torch.ones(2, device=LAZY, requires_grad=True).detach(),
        "selected": torch.arange(4, device=LAZY)[torch.arange(4, device=LAZY) > 1],
        "to another": torch.ones(2).to(torch.ones(2, device=LAZY)),
    }
    for name, tensor in made.items():
        assert type(tensor) is torch.Tensor and tensor.device == LAZY, name
        assert not tensor.is_cpu and not tensor.is_cuda and torchlazy.is_lazy(tensor), name
    assert "device='lazy'" in repr(made["factory"])


def test_moving_copies_as_between_devices() -> None:
    x = torch.arange(4.0, device=LAZY)
    host = x.cpu()
    moved = x.to("cpu", torch.float64)
    x.add_(1)
    assert host.device.type == "cpu" and not torchlazy.is_lazy(host) and host.tolist() == [0, 1, 2, 3]
    assert moved.device.type == "cpu" and moved.tolist() == [0, 1, 2, 3]
    assert x.to(LAZY) is x and x.to(x.device) is x and x.to(torch.float32) is x
    assert x.to(memory_format=torch.contiguous_format).device == LAZY and x.to(x.double()).device == LAZY
    back = torch.zeros(4).copy_(x)
    assert not torchlazy.is_lazy(back) and back.tolist() == [1, 2, 3, 4]


def test_moving_takes_gradients_along() -> None:
    x = torch.arange(3.0, requires_grad=True)
    y = x.to(LAZY)
    z = (y * y).cpu()
    z.sum().backward()
    assert x.grad is not None and x.grad.tolist() == [0, 2, 4] and not torchlazy.is_lazy(x.grad)


def _net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.GELU(), nn.Dropout(0.25), nn.Linear(8, 3))


def _losses(device: Any, steps: int, kind: Callable[..., torch.optim.Optimizer], **options: Any) -> list[float]:
    model = _net().to(device)
    optimizer = kind(model.parameters(), **options)
    x, y = torch.randn(5, 6).to(device), torch.randint(3, (5,)).to(device)
    found = []
    for _ in range(steps):
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.detach())
    assert all(p.device == torch.device(device) for p in model.parameters())
    return [loss.item() for loss in found]


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_training_is_followed_from_step_to_step(library: Any, kind: Any) -> None:
    expected = _losses("cpu", 12, kind, lr=1e-2)
    for _ in range(3):
        assert _losses("lazy", 12, kind, lr=1e-2) == pytest.approx(expected, rel=1e-5)
        torchlazy.wait_for_compile()
    assert _losses("lazy", 12, kind, lr=1e-2) == pytest.approx(expected, rel=1e-5)
    assert library.counts()["deferred"] > 60, library.counts()


def _looped(turn: Callable[[], torch.Tensor], turns: int, library: Any) -> tuple[torch.Tensor, int]:
    """A loop in which nothing is read, then 20 turns with what was compiled: the last result, and how many operators
    of these turns were deferred."""
    for _ in range(turns):
        y = turn()
    torchlazy.wait_for_compile()
    before = library.counts()["deferred"]
    for _ in range(20):
        y = turn()
    return y, library.counts()["deferred"] - before


def test_a_loop_in_which_nothing_is_read_is_a_trace_for_each_turn(library: Any) -> None:
    model = nn.Sequential(*[nn.Sequential(nn.Linear(4, 4), nn.GELU()) for _ in range(6)])
    x = torch.randn(2, 4)
    expected = model(x)
    model.to(LAZY)
    x = x.to(LAZY)
    with torch.no_grad():
        y, _ = _looped(lambda: model(x), 120, library)
    torch.testing.assert_close(y.cpu(), expected.detach())
    assert (12, 2) in {(entries, state) for entries, _, state, _ in library.traces()}
    assert library.causes()["operators repeat"] == 1


def test_attention_without_dropout_does_not_draw(library: Any) -> None:
    """A turn may begin and end within a model: its attentions then do not depend on one another."""
    layers = [nn.Linear(16, 48) for _ in range(4)]

    def turn(x: torch.Tensor, layers: list[nn.Linear] = layers) -> torch.Tensor:
        for layer in layers:
            query, key, value = (part.unflatten(2, (2, 8)).transpose(1, 2) for part in layer(x).chunk(3, 2))
            mixed = F.scaled_dot_product_attention(query, key, value, dropout_p=0.0, is_causal=True)
            x = x + mixed.transpose(1, 2).flatten(2)
        return x

    x = torch.randn(2, 5, 16)
    with torch.no_grad():
        expected = turn(x)
        for layer in layers:
            layer.to(LAZY)
        x = x.to(LAZY)
        y = turn(x, layers[2:])
        y, deferred = _looped(lambda: turn(x), 120, library)
    torch.testing.assert_close(y.cpu(), expected)
    assert deferred > 0, library.traces()


def test_equal_layers_are_no_turns_of_a_loop(library: Any) -> None:
    layers = [nn.Linear(4, 4) for _ in range(60)]
    x = torch.randn(2, 4)

    def turn(x: torch.Tensor) -> torch.Tensor:
        for layer in layers:
            x = x + (layer(x) * 0.1).sin().tanh()
        return x.mean()

    with torch.no_grad():
        expected = turn(x)
        for layer in layers:
            layer.to(LAZY)
        x = x.to(LAZY)
        y, deferred = _looped(lambda: turn(x), 40, library)
    torch.testing.assert_close(y.cpu(), expected)
    entries = 60 * 5 + 1
    assert (entries, 2) in {(entries, state) for entries, _, state, _ in library.traces()}
    assert deferred >= 18 * entries
    assert library.causes()["operators repeat"] == 1, library.causes()


def test_saved_tensors_come_back_to_the_lazy_device() -> None:
    model = _net().to(LAZY)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    for place, device in ((None, "lazy"), ("cpu", "cpu"), ("lazy", "lazy")):
        file.seek(0)
        loaded = torch.load(file, map_location=place, weights_only=True)
        assert {(type(tensor), tensor.device.type) for tensor in loaded.values()} == {(torch.Tensor, device)}
        assert all(torch.equal(loaded[name].cpu(), t.cpu()) for name, t in model.state_dict().items())
    pickled = pickle.loads(pickle.dumps(model[0].weight))  # type: ignore[union-attr, index]
    assert pickled.device == LAZY and type(pickled) is nn.Parameter and type(pickled.data) is torch.Tensor
    x = torch.arange(4.0, device=LAZY)
    file = io.BytesIO()
    torch.save([x, x[1:3]], file)
    file.seek(0)
    whole, part = torch.load(file)
    whole.add_(1)
    assert part.tolist() == [2, 3] and type(part) is torch.Tensor and part.device == LAZY
    assert copy.deepcopy(model)[0].weight.device == LAZY  # type: ignore[union-attr, index]


def test_autocast_of_the_lazy_device_is_that_of_the_device_that_computes() -> None:
    x = torch.ones(3, 3, device=LAZY)
    with torch.autocast("lazy", dtype=torch.bfloat16):
        y = x @ x
        assert torch.is_autocast_enabled("lazy") and torch.get_autocast_dtype("lazy") == torch.bfloat16
    assert y.dtype == torch.bfloat16 and y.device == LAZY and not torch.is_autocast_enabled("lazy")


def test_random_numbers_are_those_of_the_device_that_computes() -> None:
    torch.manual_seed(3)
    expected = torch.rand(4), torch.randn(2), torch.randint(9, (3,))
    torch.manual_seed(3)
    have = torch.rand(4, device=LAZY), torch.randn(2, device=LAZY), torch.randint(9, (3,), device=LAZY)
    for a, b in zip(have, expected, strict=True):
        assert torch.equal(a.cpu(), b)


def test_compiled_calls_replay_and_give_lazy_tensors() -> None:
    model, x = _net().eval().to(LAZY), torch.ones(2, 6, device=LAZY)
    run = torchlazy.compile(model)
    expected = model(x).cpu()
    for _ in range(8):
        with torch.no_grad():
            found = run(x)
        assert found.device == LAZY
        torch.testing.assert_close(found.cpu(), expected)
    assert run.report().replays > 3

    def total() -> torch.Tensor:
        return sum(p.square().sum() for p in model.parameters())  # type: ignore[return-value]

    call = torchlazy.compile(total)
    for _ in range(6):
        assert call().device == LAZY and call().item() == pytest.approx(total().item())
    assert call.report().replays > 3


def test_compiled_training_steps_replay() -> None:
    def losses(device: Any) -> list[float]:
        model = _net().eval().to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        x = torch.ones(2, 6, device=device)

        def step(x: torch.Tensor) -> torch.Tensor:
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        run = torchlazy.compile(step)
        found = [run(x) for _ in range(10)]
        assert run.report().replays > 3 and all(loss.device == torch.device(device) for loss in found)
        return [loss.item() for loss in found]

    assert losses("lazy") == pytest.approx(losses("cpu"), rel=1e-5)


def test_inside_a_mode_block_what_lazy_tensors_give_is_lazy() -> None:
    x = torch.ones(3, device=LAZY)
    with torchlazy.lazy_mode():
        y, z = x * 2 + torch.ones(3), torch.ones(3) * 2
        made = torch.zeros(2, device=LAZY)
    assert y.device == LAZY and y.tolist() == [3, 3, 3] and not torchlazy.is_lazy(z) and torchlazy.is_lazy(made)


def test_transforms_and_checkpoints() -> None:
    x = torch.ones(3, device=LAZY)
    assert torch.func.grad(lambda x: (x**2).sum())(x).tolist() == [2, 2, 2]
    assert torch.func.vmap(lambda a: a * 2)(x).device == LAZY
    model, given = nn.Linear(3, 3).to(LAZY), torch.ones(2, 3, device=LAZY, requires_grad=True)
    torch.utils.checkpoint.checkpoint(model, given, use_reentrant=False).sum().backward()
    assert given.grad is not None and given.grad.device == LAZY
    torch.testing.assert_close(given.grad.cpu(), model.weight.detach().cpu().sum(0).expand(2, 3))


def test_whoever_looks_at_each_cut_sees_lazy_tensors(tmp_path: Any) -> None:
    model, x = nn.Linear(4, 4).to(LAZY), torch.ones(2, 4, device=LAZY)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step() -> torch.Tensor:
        loss = model(x).square().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    first = step().item()
    found = torchlazy.explain(step)
    assert sum(cut.operators for cut in found.cuts) > 8 and not found.syncs
    with torchlazy.dump(tmp_path / "dump") as dumped:
        step()
    assert dumped.written
    with torchlazy.shadow(tmp_path / "shadow") as shadow:
        step()
    assert shadow.cuts and not shadow.differences
    with pytest.raises(torchlazy.SyncError), torchlazy.no_sync():
        step().item()
    assert step().item() < first and model.weight.device == LAZY
    assert torchlazy.flops(lambda x: model(x), x) is not None


def test_a_copy_to_the_host_is_a_read(library: Any) -> None:
    x = torch.ones(3, device=LAZY)
    y = (x + 1) * 2
    torchlazy.reset_metrics()
    assert y.cpu().tolist() == [4, 4, 4]
    assert library.causes() == {"cpu": 1} and torchlazy.metrics()["cuts"] == {"cpu": 1}


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_forks_while_another_thread_records() -> None:
    x, ended = torch.ones(3, device=LAZY), threading.Event()

    def record() -> None:
        y = torch.ones(3, device=LAZY)
        while not ended.is_set():
            y = y * 0.5 + x

    thread = threading.Thread(target=record)
    thread.start()
    try:
        for _ in range(5):
            child = os.fork()
            if not child:
                os._exit(0 if (x * 2 + 1).sum().item() == 9 else 1)
            assert os.waitpid(child, 0)[1] == 0
    finally:
        ended.set()
        thread.join()


def test_what_shares_memory_is_copied_and_lent_as_on_the_device_that_computes() -> None:
    x = torch.arange(6.0, device=LAZY)
    whole, part = copy.deepcopy([x, x[2:4]])
    whole.add_(1)
    assert part.tolist() == [3, 4] and part.device == LAZY and x.tolist() == [0, 1, 2, 3, 4, 5]
    borrowed = torch.from_dlpack(x)
    x.mul_(2)
    assert borrowed.tolist() == [0, 2, 4, 6, 8, 10] and x.new_tensor([1.0]).device == LAZY


def test_a_compiled_call_knows_what_is_on_the_device() -> None:
    """What Python is told in it, and that `cpu` copies, as outside of it."""

    def call(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        host = x.cpu().add_(1)
        there = x.to("cpu").mul_(3).to(LAZY)
        return host, there + (1 if (x + 1).device == LAZY and not x.is_cpu else 0)

    run = torchlazy.compile(call, audit=False)
    x = torch.ones(3, device=LAZY)
    for _ in range(5):
        host, there = run(x)
        assert host.tolist() == [2, 2, 2] and there.tolist() == [4, 4, 4] and x.tolist() == [1, 1, 1]
        assert host.device.type == "cpu" and there.device == LAZY
    assert run.report().replays >= 3, run.report()


def test_state_that_a_compiled_call_makes_is_ordinary_and_on_the_device() -> None:
    """So that a state that is loaded again shares memory as in eager."""

    def losses(device: Any, compile: Callable[[Any], Any]) -> list[float]:
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 2).to(device)
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)

        run, found, kept = compile(mean_square_step(model, optimizer)), [], None
        for i in range(12):
            found.append(run(torch.full((3, 4), 0.3 * i).to(device)).item())
            state = [held["momentum_buffer"] for held in optimizer.state.values()]
            assert all(type(t) is torch.Tensor and t.device == torch.device(device) for t in state)
            if i == 3:
                kept = copy.deepcopy(optimizer.state_dict())
            if i in (3, 7):
                optimizer.load_state_dict(kept)
        return found

    wanted = losses("cpu", lambda function: function)
    assert losses(LAZY, lambda function: torchlazy.compile(function, audit=False)) == pytest.approx(wanted, rel=1e-4)


class Image(torch.Tensor):
    """A class of the user's."""


@pytest.mark.parametrize("kind", [torch.Tensor, Image])
def test_copies_and_files_keep_the_class_and_attributes(library: Any, kind: type[torch.Tensor]) -> None:
    def by_file(tensor: torch.Tensor) -> Any:
        file = io.BytesIO()
        torch.save(tensor, file)
        file.seek(0)
        return torch.load(file, weights_only=False)

    given = torch.ones(3, device="lazy").as_subclass(kind)
    given.note = "mine"  # type: ignore[attr-defined]
    for in_block in (False, True):
        for way in (copy.copy, copy.deepcopy, lambda tensor: pickle.loads(pickle.dumps(tensor)), by_file):
            if way is copy.deepcopy and kind is Image:
                continue  # torch refuses it for subclasses on devices without memory of their own
            with torchlazy.lazy_mode() if in_block else contextlib.nullcontext():
                found = way(given)
            assert type(found) is kind and found.device == LAZY and found.note == "mine" and found.tolist() == [1.0] * 3
