"""Stages of a program that are launched before the cut; without a GPU, by stand-ins that check what they are given."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torchlazy
from torch import Tensor, nn
from torch.nn import functional as F
from torchlazy.lazy.native import programs
from torchlazy.lazy.native.graphs import RunsInPython
from torchlazy.runtime.cuda.graph import StageReads, reads_of_stages, room_like
from torchlazy.runtime.native.recorder_library import LIBRARY
from torchlazy.runtime.program import stages
from torchlazy.runtime.program.stages import first_write
from torchlazy.runtime.toolchains.toolchain_cpp import has_cpp

from tests.lazy.test_native_recorder import Attention, Net, _followed, assert_same, by_the_driver

__all__ = ["_followed"]  # the fixture

pytestmark = pytest.mark.skipif(not has_cpp(), reason="needs a C++ compiler")


class Staged(RunsInPython):
    """As `RunsInPython` with graphs in stages. A program that was launched ahead is run twice: in stages, of which none
    sees what only later ones read, and as it is."""

    made: list[Staged] = []  # noqa: RUF012
    loses = 0  # each so many-th time what was launched is lost

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        found, reason = self._driver.program_for_replay(self._trace, self._frame, "stages")
        torchlazy.wait_for_compile()
        found, reason = self._driver.program_for_replay(self._trace, self._frame, "stages")
        assert found is not None, reason
        self.run = found.run.in_stages()
        self.reads: list[StageReads] = reads_of_stages(self.run, len(self._trace.inputs), len(self._trace.scalar_kinds))
        self.seen: list[tuple[Tensor, Tensor]] = []  # inputs of launched stages, and their values then
        self.numbers: dict[int, float] = {}
        self.launched = self.finished = self.whole = 0
        self.made.append(self)

    def stages(self) -> list[Any]:
        return [(part.inputs, part.scalars, part.draws) for part in self.reads[:-1]]

    def launch(self, stage: int, memory: list[Tensor], scalars: list[Any]) -> bool:
        if not stage:
            self.seen, self.numbers = [], {}
        part = self.reads[stage]
        assert len(memory) == len(part.inputs)
        self.seen += [(tensor, tensor.clone()) for tensor in memory]
        self.numbers |= dict(zip(part.scalars, scalars, strict=True))
        self.launched += 1
        return True

    def __call__(self, memory: list[Tensor], scalars: list[Any], launched: int = 0) -> list[Tensor] | None:
        if not launched:
            self.whole += 1
            return super().__call__(memory, scalars)
        self.finished += 1
        if self.loses and self.finished % self.loses == 0:
            return None
        given = {tensor.data_ptr() for tensor in memory}
        for tensor, before in self.seen:
            assert tensor.data_ptr() in given
            assert torch.equal(tensor, before)
        assert all(scalars[n] == value for n, value in self.numbers.items())
        in_stages = self._run_staged(memory, scalars)
        found = super().__call__(memory, scalars)
        assert_same(in_stages, found)
        return found

    def _run_staged(self, memory: list[Tensor], scalars: list[Any]) -> list[Tensor]:
        values = [*memory, *(torch.tensor(value, dtype=meta.dtype) for value, (_, meta) in self._numbers(scalars))]
        rooms = [room_like(value).fill_(float("nan") if value.is_floating_point() else 0) for value in values]
        part = iter(self.reads)
        written = set(dict(self.run.program.donations).values())

        def load() -> None:
            reads = next(part)
            for n in (*reads.inputs, *(n + len(memory) for n in reads.scalars)):
                rooms[n].copy_(values[n])

        def next_stage() -> None:
            for n in written:
                assert rooms[n].isnan().all() or torch.equal(rooms[n], values[n]), "a stage wrote into an input"
            load()

        load()
        self.run.border.then = next_stage
        with torch.no_grad():
            return self.run._function([*rooms], ())  # in C++ it has no stages

    def _numbers(self, scalars: list[Any]) -> Iterator[Any]:
        return zip(scalars, self.run.program.inputs[len(self._trace.inputs) :], strict=True)


@pytest.fixture(autouse=True)
def _in_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    by_the_driver()
    monkeypatch.setattr(programs, "RunsInPython", Staged)
    monkeypatch.setattr(programs, "native_of", lambda run: None)
    monkeypatch.setattr(stages, "LEAST_WORK", 2)
    monkeypatch.setattr(Staged, "made", [])


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.GELU()) for _ in range(6)))
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(x.flatten(1)[:, :8]))


def trained(model: type[nn.Module], is_lazy: bool, *, extra: int = 0, looks: int = 0, steps: int = 14) -> list[Any]:
    """A loss each step; each so many-th has an extra term, and looks at a value in its midst."""
    torch.manual_seed(0)
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
    found: list[Any] = []
    for step in range(steps):
        x, y = torch.randn(6, 2, 6, 6), torch.randint(3, (6,))
        with torchlazy.lazy_mode() if is_lazy else contextlib.nullcontext():
            out = net(x)
            if looks and step % looks == 0:
                found.append(float(out[0, 0]))
            loss = F.cross_entropy(out, y)
            if extra and step % extra == 0:
                loss = loss + 0.1 * out.square().mean()
            loss.backward()
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        schedule.step()
        if is_lazy:
            torchlazy.wait_for_compile()
    return [*found, *(p.detach() for p in net.parameters()), *net.buffers()]


def same(have: list[Any], want: list[Any]) -> None:
    torch.testing.assert_close(have, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("model", [Deep, Attention])
def test_each_stage_has_what_it_reads(model: type[nn.Module]) -> None:
    same(trained(model, True), trained(model, False))
    assert sum(one.launched for one in Staged.made) > 3 * sum(one.finished for one in Staged.made) / 2 > 6
    for one in Staged.made:  # also a trace that writes nothing, where it is cut before the optimizer
        if one.finished:
            ends = [stage.stop for stage in one.run.stages]
            assert first_write(one.run.program, one.run._places.steps) in ends[-2:]


def test_what_writes_into_an_input_early_is_launched_at_the_cut() -> None:
    same(trained(Net, True), trained(Net, False))
    assert sum(one.whole for one in Staged.made) > 6
    for one in Staged.made:  # what is cut behind the statistics may be launched ahead
        write = first_write(one.run.program, one.run._places.steps)
        assert all(stage.stop <= write for stage in one.run.stages[:-1])


@pytest.mark.parametrize("how", [{"extra": 3}, {"looks": 4}, {"extra": 4, "looks": 3}], ids=str)
def test_a_trace_may_go_another_way(how: dict[str, int]) -> None:
    same(trained(Deep, True, **how, steps=40), trained(Deep, False, **how, steps=40))
    assert sum(one.finished for one in Staged.made) > 5


def test_what_is_lost_is_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Staged, "loses", 2)
    same(trained(Deep, True), trained(Deep, False))
    assert sum(one.finished for one in Staged.made) > 5 and LIBRARY.module.counts()["programs"] > 5


@pytest.mark.parametrize("is_lazy", [True, False])
def test_a_stage_reads_what_was_there_before_a_deferred_write(is_lazy: bool) -> None:
    torch.manual_seed(0)
    weight, other = torch.randn(8, 8), torch.randn(8, 8) / 4

    def step(x: Tensor) -> Tensor:
        old = weight.clone()
        y = x @ weight
        weight.mul_(0.75)
        for _ in range(24):
            y = (y @ other).sin() + x
        return y @ old

    for _ in range(12):
        x, before = torch.randn(8, 8), weight.clone()
        with torchlazy.lazy_mode() if is_lazy else contextlib.nullcontext():
            found = step(x)
        y = x @ before
        for _ in range(24):
            y = (y @ other).sin() + x
        torch.testing.assert_close(found, y @ before, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(weight, before * 0.75)
        torchlazy.wait_for_compile()
    assert not is_lazy or sum(one.launched for one in Staged.made) > 5
