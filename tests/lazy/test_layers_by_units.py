"""Many equal layers are lowered once and their loops linked: the program is as good as that of planning them all."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torchlazy
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torchlazy.lazy.plan import pipeline
from torchlazy.lazy.plan.join_traces import match_programs
from torchlazy.lazy.plan.layers.rows import by_groups
from torchlazy.lazy.plan.layers.runs import find_runs
from torchlazy.lazy.plan.layers.units import Split, split
from torchlazy.lazy.plan.loaded import CompileOptions
from torchlazy.lazy.run.segments import watch
from torchlazy.lazy.trace.trace import CutTrace, operands, slots_in
from torchlazy.runtime.program import code as program_code
from torchlazy.runtime.program import parts as program_parts
from torchlazy.runtime.program.parts import ProgramPart
from torchlazy.runtime.toolchains.toolchain import LoadedKernel

from tests.lazy.joined_traces import joined_step
from tests.lazy.recorded_traces import OPTIONS, TARGETS, assert_as_good, longest_of, on_lazy, recorded

pytestmark = pytest.mark.usefixtures("device_in_python")

LAYERS = 22
WIDTH = 8
ROWS = 128


class Block(nn.Module):
    """Attention and a perceptron, with residuals."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.mix, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.dropout = dropout

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.mix(self.first(x)).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.out(mixed)
        return x + F.dropout(self.down(F.gelu(self.up(self.second(x)))), self.dropout)


class Chain(nn.Module):
    """`step(x, layer, number, everything before)` for each layer in turn."""

    def __init__(self, step: Callable[..., torch.Tensor], make: Callable[[], nn.Module], layers: int = LAYERS) -> None:
        super().__init__()
        self.layers = nn.ModuleList(make() for _ in range(layers))
        self.step = step

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        before = [x]
        for number, layer in enumerate(self.layers):
            x = self.step(x, layer, number, before)
            before.append(x)
        return x


def linear() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU())


def norm_and_linear() -> nn.Module:
    return nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU())


def adamw(parameters: Iterator[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3, foreach=True)


def sgd(parameters: Iterator[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-2, momentum=0.9, foreach=True)


def trace_of(
    model: nn.Module,
    optimize: Callable[..., torch.optim.Optimizer] | None,
    rows: int = ROWS,
    amp: bool = False,
    clips: bool = False,
) -> CutTrace:
    """A whole training step with optimizer states, or a forward without gradients. `clips`: by the gradients' norm."""
    with recorded() as found:
        model = model.to("lazy")
        x = torch.rand(rows, 16, WIDTH).to("lazy")
        optimizer = optimize(model.parameters()) if optimize else None
        for _ in range(2):
            torchlazy.flush()
            found.clear()
            if optimizer is None:
                with torch.no_grad(), torch.autocast("lazy", torch.bfloat16, enabled=amp):
                    result = model(x)
                torchlazy.flush()
                del result
                continue
            with torch.autocast("lazy", torch.bfloat16, enabled=amp):
                loss = model(x).float().square().mean()
            loss.backward()
            if clips:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            torchlazy.flush()
    return max(found, key=lambda trace: len(trace.entries))


def transformer(dropout: float = 0.0, layers: int = LAYERS) -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), *(Block(dropout) for _ in range(layers)), nn.LayerNorm(WIDTH))


@pytest.fixture(scope="module")
def transformer_step() -> CutTrace:
    return trace_of(transformer(), adamw)


def residual(x: torch.Tensor, layer: nn.Module, number: int, before: list[torch.Tensor]) -> torch.Tensor:
    return x + layer(x)


def plain(x: torch.Tensor, layer: nn.Module, number: int, before: list[torch.Tensor]) -> torch.Tensor:
    return layer(x)


def odd_in_the_middle(x: torch.Tensor, layer: nn.Module, number: int, before: list[torch.Tensor]) -> torch.Tensor:
    return layer(x).sin() if number == LAYERS // 2 else layer(x)


def reads_the_first(x: torch.Tensor, layer: nn.Module, number: int, before: list[torch.Tensor]) -> torch.Tensor:
    return layer(x) + before[1 if number else 0]


def skips_layers(x: torch.Tensor, layer: nn.Module, number: int, before: list[torch.Tensor]) -> torch.Tensor:
    return layer(x) + before[max(0, number - 2)]


def reads_one_from_afar(x: torch.Tensor, layer: nn.Module, number: int, before: list[torch.Tensor]) -> torch.Tensor:
    return layer(x) + before[3 if number == LAYERS - 4 else number]


def reads_all(x: torch.Tensor, layer: nn.Module, number: int, before: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack(before).sum(0) if number == LAYERS - 1 else layer(x)


def reads_layers_crosswise(x: torch.Tensor, layer: nn.Module, number: int, before: list[torch.Tensor]) -> torch.Tensor:
    return layer(x) + before[number // 2]


UNUSUAL = (
    odd_in_the_middle, reads_the_first, skips_layers, reads_one_from_afar, reads_all, reads_layers_crosswise,
)  # fmt: skip


class Reader(nn.Module):
    """A perceptron after attention to what another stack of layers made."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.query, self.both, self.out = (nn.Linear(WIDTH, n * WIDTH) for n in (1, 2, 1))
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
        q = self.query(self.first(x)).unflatten(-1, (2, -1)).transpose(1, 2)
        k, v = self.both(memory).unflatten(-1, (2, 2, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.second(x))))


class TwoStacks(nn.Module):
    """Layers, and other layers that all read what the former made."""

    def __init__(self, encoder: int, decoder: int) -> None:
        super().__init__()
        self.encoder = transformer(layers=encoder)
        self.decoder = nn.ModuleList(Reader() for _ in range(decoder))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        memory = self.encoder(x)
        for layer in self.decoder:
            x = layer(x, memory)
        return x


class RootNorm(nn.Module):
    """As Llama's: computed in float32, given in the dtype that came."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        return self.weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


class GatedBlock(nn.Module):
    """Attention and a gated perceptron after norms by the root of the mean square, without biases."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = RootNorm(), RootNorm()
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(WIDTH, 2 * WIDTH, bias=False) for _ in range(2))
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = self.first(x)
        q, k, v = (part(normed).unflatten(-1, (2, -1)).transpose(1, 2) for part in (self.q, self.k, self.v))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        normed = self.second(x)
        return x + self.down(F.silu(self.gate(normed)) * self.up(normed))


class Decoder(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(96, WIDTH)
        self.blocks = nn.Sequential(*(GatedBlock() for _ in range(layers)))
        self.norm, self.head = RootNorm(), nn.Linear(WIDTH, 96, bias=False)

    def forward(self, codes: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.blocks(self.tokens(codes))))


def checkpointed(x: torch.Tensor, layer: nn.Module, number: int, before: list[torch.Tensor]) -> torch.Tensor:
    return checkpoint(layer, x, use_reentrant=False)  # type: ignore[no-any-return]


def decoder_step(target: str) -> CutTrace:
    """A training step of the decoder under autocast."""
    with recorded(target) as found:
        model, codes = on_lazy(lambda: (Decoder(24), torch.zeros(4, 32, dtype=torch.int64)))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)

        def step() -> torch.Tensor:
            with torch.autocast("lazy", torch.bfloat16):
                loss = F.cross_entropy(model(codes).flatten(0, 1).float(), codes.flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        return longest_of(step, found)


@pytest.mark.parametrize("language", ["cpp", "triton"])
@pytest.mark.parametrize("scalars", ["arguments", "memory"])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_a_training_step(language: str, scalars: str, dropout: float, transformer_step: CutTrace) -> None:
    trace = trace_of(transformer(dropout), sgd) if dropout else transformer_step
    assert dropout == 0.0 or len(trace.scalar_kinds) >= LAYERS  # each layer draws by a seed of its own
    assert_as_good(trace, language, scalars=scalars)


@pytest.mark.parametrize("target", TARGETS)
def test_a_decoder_under_autocast(target: str) -> None:
    assert_as_good(decoder_step(target), TARGETS[target])


@pytest.mark.parametrize("language", ["cpp", "triton"])
@pytest.mark.parametrize("optimize", [sgd, None])
def test_two_stacks_of_layers(language: str, optimize: Callable[..., torch.optim.Optimizer] | None) -> None:
    """The gradient of what all layers of the decoder read is a sum over them."""
    trace = trace_of(TwoStacks(LAYERS, LAYERS - 2), optimize)
    assert_as_good(trace, language)
    found = split(trace)
    assert isinstance(found, Split)
    assert 2 * len({unit.key() for unit in found.units}) < len(found.units)


@pytest.mark.parametrize("amp", [False, True])
@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize("optimize", [adamw, sgd])
def test_chains_with_a_norm_of_all_gradients(
    amp: bool, clips: bool, optimize: Callable[..., torch.optim.Optimizer]
) -> None:
    assert_as_good(trace_of(Chain(residual, norm_and_linear, 30), optimize, amp=amp, clips=clips), "triton")


@pytest.mark.parametrize("make", [linear, norm_and_linear])
@pytest.mark.parametrize("optimize", [adamw, None])
def test_chains_of_small_layers(
    make: Callable[[], nn.Module], optimize: Callable[..., torch.optim.Optimizer] | None
) -> None:
    """Periods of few operators are planned whole where they hold nothing else."""
    trace = trace_of(nn.Sequential(*(make() for _ in range(40))), optimize)
    if isinstance(split(trace), Split):
        assert_as_good(trace, "cpp")
    else:
        assert optimize is None


@pytest.mark.parametrize("step", [*UNUSUAL, checkpointed])
@pytest.mark.parametrize("optimize", [sgd, None])
def test_unusual_chains(
    step: Callable[..., torch.Tensor], optimize: Callable[..., torch.optim.Optimizer] | None
) -> None:
    trace = trace_of(Chain(step, norm_and_linear), optimize)
    if pipeline.plan_by_layers(trace, OPTIONS["cpp"]) is not None:
        assert_as_good(trace, "cpp")


def test_results_that_other_layers_read_are_not_copied() -> None:
    """On a GPU a copy would read the seeds of attention, which lie on the host whatever their geometry says."""
    layers = nn.ModuleList(norm_and_linear() for _ in range(8))

    def run(given: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
        results = []
        for layer in layers:
            x = x + layer(x)
            results.append(x)
        return results

    with recorded() as found, torch.no_grad():
        model, x = on_lazy(lambda: (layers, torch.zeros(ROWS, 16, WIDTH)))
        trace = longest_of(lambda: run(model, x), found)
    assert len(trace.outputs) == 8
    assert_as_good(trace, "triton")
    programs = pipeline.plan_by_layers(trace, OPTIONS["triton"]), pipeline.plan_trace(trace, OPTIONS["triton"])
    launches = [sum(hasattr(step, "kernel") for step in planned.program.steps) for planned in programs if planned]
    assert launches[0] <= launches[1]


def test_one_layer_many_times_is_not_many_layers() -> None:
    layer = norm_and_linear()
    trace = trace_of(nn.Sequential(*([layer] * LAYERS)), sgd)
    if pipeline.plan_by_layers(trace, OPTIONS["cpp"]) is not None:
        assert_as_good(trace, "cpp")


def test_each_distinct_unit_is_lowered_once(transformer_step: CutTrace, monkeypatch: pytest.MonkeyPatch) -> None:
    lowered: list[int] = []
    lower = pipeline._lower

    def counted(trace: CutTrace, *rest: Any) -> Any:
        lowered.append(len(trace.entries))
        return lower(trace, *rest)

    monkeypatch.setattr(pipeline, "_lower", counted)
    assert pipeline.plan_by_layers(transformer_step, OPTIONS["cpp"]) is not None
    once = lowered.copy()
    assert len(once) <= 8 and 3 * sum(once) < len(transformer_step.entries)
    lowered.clear()
    assert pipeline.plan_by_layers(trace_of(transformer(layers=2 * LAYERS), adamw), OPTIONS["cpp"]) is not None
    assert lowered == once


def test_units_are_layers_with_their_backward(transformer_step: CutTrace) -> None:
    found = split(transformer_step)
    assert isinstance(found, Split) and found.cut is None
    pairs = [unit for unit in found.units if len(unit.at) == 2]
    assert len(pairs) >= LAYERS
    attention = [sum("scaled_dot_product" in str(e.op) for e in unit.trace.entries) for unit in pairs]
    assert attention.count(2) >= LAYERS - 1  # forward and backward of one layer
    covered = sum(len(unit.trace.entries) for unit in found.units)
    assert covered >= len(transformer_step.needed)


def test_an_error_in_it_costs_time_only(
    transformer_step: CutTrace, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: Any) -> None:
        raise KeyError("a mistake")

    monkeypatch.setattr(pipeline, "link", broken)
    planned = pipeline._plan_by_layers_or_not(transformer_step, OPTIONS["cpp"])
    assert planned.program == pipeline.plan_trace(transformer_step, OPTIONS["cpp"]).program
    assert "a mistake" in caplog.text


def test_what_is_planned_whole() -> None:
    assert split(trace_of(transformer(layers=2), sgd)) == "no equal layers"
    block = (nn.Conv2d, nn.BatchNorm2d, nn.GELU, nn.Conv2d, nn.BatchNorm2d, nn.Sigmoid, nn.Tanh, nn.ReLU)
    given = {nn.Conv2d: (4, 4, 1), nn.BatchNorm2d: (4,)}
    images = [nn.Sequential(*(make(*given.get(make, ())) for make in block)) for _ in range(6)]
    with recorded() as found:
        model, x = on_lazy(lambda: (nn.Sequential(*images), torch.zeros(2, 4, 8, 8)))
        trace = longest_of(lambda: model(x), found)
    assert split(trace) == "the layout of convolutions is chosen for all of them"


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("amp", [False, True])
@pytest.mark.parametrize("scalars", ["arguments", "memory"])
def test_forward_and_backward_in_two_programs(target: str, amp: bool, scalars: str) -> None:
    joined = joined_step(lambda: transformer(layers=8), (ROWS, 16, WIDTH), target, adamw, amp=amp)
    options = replace(OPTIONS[TARGETS[target]], scalars=scalars)
    first, second = (pipeline.plan_by_layers(trace, options) for trace in (joined.first, joined.second))
    assert first is not None and second is not None
    assert "link" in first.timings and "link" not in second.timings  # what one half was planned with is kept
    for trace in (joined.first, joined.second):
        assert_as_good(trace, TARGETS[target], scalars=scalars)
    found = match_programs(joined, first.program, second.program)
    assert found is not None and len(found.inputs) == len(second.program.inputs)
    renamed = replace(first.program, outputs=tuple(f"{name}0" for name in first.program.outputs))
    assert match_programs(joined, renamed, second.program) is None


def test_what_one_half_was_planned_with_is_there_for_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    joined = joined_step(lambda: transformer(layers=2), (ROWS, 16, WIDTH), "cpu", sgd)
    decomposed: list[int] = []
    decompose = pipeline.decompose
    monkeypatch.setattr(pipeline, "decompose", lambda *a, **k: (decomposed.append(1), decompose(*a, **k))[1])
    pipeline._kept.clear()
    alone = []
    for trace in (joined.second, joined.first):
        alone.append(pipeline.plan_trace(trace, OPTIONS["cpp"]))
        pipeline._kept.clear()
    assert len(decomposed) == 2
    shared = [pipeline.plan_trace(trace, OPTIONS["cpp"]) for trace in (joined.second, joined.first)]
    assert len(decomposed) == 3 and not pipeline._kept
    assert [one.program for one in shared] == [one.program for one in alone]
    pipeline.plan_trace(joined.first, OPTIONS["cpp"])
    pipeline.plan_trace(joined.first, OPTIONS["cpp"])  # the same half again is planned again
    assert len(decomposed) == 5


@pytest.mark.parametrize("step", ["plain", "two stacks"])
def test_training_by_both_halves_is_training(compiled: None, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    monkeypatch.setattr(watch, "LEAST_BYTES", 0)
    monkeypatch.setattr(torchlazy.config, "dynamic", "off")
    linked = planned_by_layers(monkeypatch)
    losses: dict[str, list[float]] = {}
    for device in ("cpu", "lazy"):
        torch.manual_seed(1)
        model = (transformer(layers=8) if step == "plain" else TwoStacks(6, 6)).to(device)
        x = torch.rand(ROWS, 16, WIDTH).to(device)
        optimizer = adamw(model.parameters())
        losses[device] = []
        for _ in range(5):
            loss = (model(x) - 0.5).square().mean()
            losses[device].append(loss.item())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    assert [found for half, found in linked if half] == [True, True]
    torch.testing.assert_close(losses["lazy"], losses["cpu"], rtol=1e-4, atol=1e-5)
    assert losses["cpu"][-1] < losses["cpu"][0]


def planned_by_layers(monkeypatch: pytest.MonkeyPatch) -> list[tuple[bool, bool]]:
    """Of each trace planned from now on: whether it is a half, and whether it was planned by layers."""
    found: list[tuple[bool, bool]] = []
    plan = pipeline.plan_by_layers

    def watched(trace: CutTrace, options: CompileOptions) -> pipeline.PlannedByLayers | None:
        planned = plan(trace, options)
        found.append((trace.half is not None, planned is not None))
        return planned

    monkeypatch.setattr(pipeline, "plan_by_layers", watched)
    return found


@pytest.mark.parametrize("step", ["plain", "residual", "clipped", "two stacks"])
def test_training_by_layers_is_training(compiled: None, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    linked = planned_by_layers(monkeypatch)
    losses: dict[str, list[float]] = {}
    for device in ("cpu", "lazy"):
        torch.manual_seed(1)
        chain = Chain(residual, norm_and_linear, 40) if step == "residual" else Chain(plain, norm_and_linear)
        model = (TwoStacks(LAYERS, LAYERS) if step == "two stacks" else chain).to(device)
        x = torch.rand(ROWS, 16, WIDTH).to(device)
        optimizer = adamw(model.parameters())
        losses[device] = []
        for _ in range(3):
            loss = (model(x) - 0.5).square().mean()
            loss.backward()
            if step == "clipped":
                nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
            optimizer.step()
            optimizer.zero_grad()
            losses[device].append(loss.item())
    assert any(found for _, found in linked)
    torch.testing.assert_close(losses["lazy"], losses["cpu"], rtol=1e-4, atol=1e-5)
    assert losses["cpu"][-1] < losses["cpu"][0]


def test_runs_of_equal_periods() -> None:
    found = find_runs("x" + "abcb" * 5 + "ab" + "yy" + "cd" * 4 + "z", 4)
    assert [(run.start, run.period, run.count, run.rest) for run in found] == [(1, 4, 5, 2), (25, 2, 4, 0)]
    assert find_runs("abcabc", 3) == []
    assert [(run.period, run.count) for run in find_runs("aab" * 6, 3)] == [(3, 6)]


@pytest.mark.parametrize("fused", [False, True])
def test_rows_of_an_update_by_what_made_them(fused: bool) -> None:
    with recorded() as found:
        model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4))).to("lazy")
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=not fused, fused=fused)

        def step() -> None:
            model(torch.ones(2, 4, device="lazy")).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

        trace = longest_of(step, found)
    positions = sorted(trace.needed)
    maker = {made.number: at for at, p in enumerate(positions) for made in slots_in(trace.entries[p].outputs)}
    of_layer = {number: at // 3 for number, at in maker.items()}
    short, borders, _ = by_groups(trace, positions, of_layer, 3)
    assert len(borders) >= 4
    seen = {number.number for number, _ in short.inputs}
    for entry in short.entries:  # each slot is made once, before it is read
        assert all(read.number in seen for read in operands(entry))
        made = [one.number for one in slots_in(entry.outputs)]
        assert seen.isdisjoint(made)
        seen.update(made)
    assert seen == {n.number for n, _ in trace.inputs} | set(maker)
    assert by_groups(trace, positions, of_layer, 99)[1] == []


def test_a_row_that_reads_another_ends_a_stretch() -> None:
    with recorded() as found:
        tensors = [torch.rand(3).to("lazy") for _ in range(4)]
        first = torch._foreach_mul(tensors, 2.0)
        second = torch._foreach_sin(torch._foreach_neg(first))
        kept = torch._foreach_add(second, second[::-1])
        torchlazy.flush()
    trace = found[-1]
    positions = sorted(trace.needed)
    short, borders, _ = by_groups(trace, positions, {n.number: at for at, (n, _) in enumerate(trace.inputs)}, 3)
    assert len(kept) == 4 and borders
    seen = {number.number for number, _ in short.inputs}
    for entry in short.entries:
        assert all(read.number in seen for read in operands(entry))
        seen.update(one.number for one in slots_in(entry.outputs))


def test_code_that_layers_share_is_what_each_would_have(
    transformer_step: CutTrace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The function of a part that was written before, against the one written for this part: equal up to names."""
    monkeypatch.setattr(program_parts, "LEAST_STEPS", 0)
    program = pipeline.plan_trace(transformer_step, OPTIONS["cpp"]).program
    shared: list[str] = []
    original = program_code._CodeWriter._part

    def part_and_its_own(self: program_code._CodeWriter, part: ProgramPart) -> None:
        fresh = deepcopy_of_state(self)
        exact = not part.made.isdisjoint(self.in_place)
        states = [self._state(name, part, exact) for name in part.names]
        before = dict(self.parts)
        own = fresh._write_part(part)
        own_lines = own.function_lines([f"v{n}" for n in range(len(part.names))], [])
        original(self, part)
        written = [code for kind, code in self.parts.items() if kind not in before]
        if not written:
            code = next(code for kind, code in before.items() if kind[0] == part.key and kind[1] == tuple(states))
            shared.append(code.name)
            assert code.function_lines([f"v{n}" for n in range(len(part.names))], [])[1:] == own_lines[1:]
            assert (code.given, code.takes, code.gives, code.same) == (own.given, own.takes, own.gives, own.same)
            assert bool(code.name) == bool(own.name)
            if code.name:
                assert canonical(self.part_lines, code.name) == canonical(fresh.part_lines, own.name)
            assert {name: self.has_tensor.get(name) for name in part.names} == {
                name: fresh.has_tensor.get(name) for name in part.names
            }

    monkeypatch.setattr(program_code._CodeWriter, "_part", part_and_its_own)
    program_code.emit_run(program, [LoadedKernel(source, lambda *_: 0) for source in program.kernels])
    assert len(shared) > LAYERS


def deepcopy_of_state(writer: program_code._CodeWriter) -> program_code._CodeWriter:
    """A writer that knows what this one knows, and changes nothing of it."""
    copied = copy.copy(writer)
    for name, value in vars(writer).items():
        if isinstance(value, dict | set | list):
            setattr(copied, name, copy.copy(value))
    return copied


def canonical(lines: list[str], name: str) -> list[str]:
    """A function of a part, with its variables numbered in the order in which they come."""
    start = next(place for place, line in enumerate(lines) if line.startswith(f"def {name}("))
    stop = next((place for place in range(start + 1, len(lines)) if lines[place].startswith("def ")), len(lines))
    numbers: dict[str, int] = {}

    def number(match: re.Match[str]) -> str:
        return f"v{numbers.setdefault(match[1], len(numbers))}"

    return [re.sub(r"\b((?:buf|in|scalar)\d+)(?=\b|_p\b)", number, line) for line in lines[start + 1 : stop]]
