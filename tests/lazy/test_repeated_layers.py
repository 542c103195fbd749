"""Many equal layers are planned by way of a few of them: the program is that of planning them all, or there is none."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torchlazy
from torch import nn
from torch.nn import functional as F
from torchlazy.lazy.plan import pipeline
from torchlazy.lazy.plan.layers import shorten as layers_shorten
from torchlazy.lazy.plan.layers.detect import find_runs
from torchlazy.lazy.plan.layers.names import NotPeriodic, new_numbers
from torchlazy.lazy.plan.layers.shorten import shorten
from torchlazy.lazy.plan.loaded import CompileOptions
from torchlazy.lazy.trace.trace import CutTrace
from torchlazy.runtime.program import code as program_code
from torchlazy.runtime.program import parts as program_parts
from torchlazy.runtime.program.parts import ProgramPart
from torchlazy.runtime.program.program import Program
from torchlazy.runtime.toolchains.toolchain import LoadedKernel

from tests.lazy.recorded_traces import OPTIONS, assert_same, recorded

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


@pytest.mark.parametrize("language", ["cpp", "triton"])
def test_a_training_step_of_equal_layers_has_the_same_program(transformer_step: CutTrace, language: str) -> None:
    assert_same(transformer_step, language)


@pytest.mark.parametrize("language", ["cpp", "triton"])
def test_numbers_in_memory(transformer_step: CutTrace, language: str) -> None:
    """As CUDA graphs take them; the inputs after all tensors."""
    assert_same(transformer_step, language, scalars="memory")


def test_random_numbers_of_each_layer_in_memory() -> None:
    trace = trace_of(transformer(dropout=0.1), sgd)
    assert len(trace.scalar_kinds) > LAYERS
    assert_same(trace, "triton", scalars="memory")


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


@pytest.mark.parametrize("language", ["cpp", "triton"])
@pytest.mark.parametrize("decoder", [LAYERS, LAYERS - 2])
def test_two_stacks_of_layers(decoder: int, language: str) -> None:
    trace = trace_of(TwoStacks(LAYERS, decoder), None)
    assert_same(trace, language)
    found = next(shorten(trace))
    short = found.short.entries
    assert sum("scaled_dot_product" in str(entry.op) for entry in short) == LAYERS + decoder - 2 * found.left_out


@pytest.mark.parametrize("language", ["cpp", "triton"])
@pytest.mark.parametrize("layers", [LAYERS, 36])
def test_a_sum_over_the_layers_of_the_second_stack(layers: int, language: str) -> None:
    """The gradient of what all layers of the decoder read: kernels with an operand of each layer, as many as one may
    have, which are planned as they are, wherever layers end."""
    assert_same_outside(trace_of(TwoStacks(layers, layers), sgd), language)


def assert_same_outside(trace: CutTrace, language: str) -> None:
    """Planned by a few layers it takes and gives what it does planned whole, by as many steps or nearly so."""
    repeated = pipeline.plan_repeated(trace, OPTIONS[language])
    whole = pipeline.plan_trace(trace, OPTIONS[language]).program
    assert repeated is not None
    assert abs(len(repeated.program.steps) - len(whole.steps)) <= 2
    for field in ("inputs", "scalars", "output_metas", "donations"):
        assert getattr(repeated.program, field) == getattr(whole, field)


def assert_same_but_for_names(a: Program, b: Program) -> None:
    """The same steps in the same order; buffers may be numbered otherwise where a step reads some of every layer."""
    texts = []
    for program in (a, b):
        told: dict[str, str] = {}
        text = repr((program.inputs, program.scalars, program.steps, program.outputs, program.donations))
        texts.append(re.sub(r"buf\d+", partial(_told, told), text))
    assert texts[0] == texts[1]
    assert len(a.kernels) == len(b.kernels)


def _told(told: dict[str, str], match: re.Match[str]) -> str:
    return told.setdefault(match[0], f"b{len(told)}")


def residual(x: torch.Tensor, layer: nn.Module, number: int, before: list[torch.Tensor]) -> torch.Tensor:
    return x + layer(x)


@pytest.mark.parametrize("rows", [1, ROWS])
@pytest.mark.parametrize("amp", [False, True])
@pytest.mark.parametrize("optimize", [sgd, None])
def test_schedules_may_repeat_every_few_layers(
    rows: int, amp: bool, optimize: Callable[..., torch.optim.Optimizer] | None
) -> None:
    """A long sum of layers' results is kept for backward every third layer only; with which layer that begins, and
    so a kernel in the middle of the step, may be chosen otherwise with fewer layers."""
    trace = trace_of(Chain(residual, norm_and_linear, 40), optimize, rows, amp)
    if optimize is None or amp:
        assert_same(trace, "triton")
        return
    repeated = pipeline.plan_repeated(trace, OPTIONS["triton"])
    whole = pipeline.plan_trace(trace, OPTIONS["triton"]).program
    assert repeated is not None
    assert abs(len(repeated.program.steps) - len(whole.steps)) <= 2
    for field in ("inputs", "scalars", "output_metas", "donations"):
        assert getattr(repeated.program, field) == getattr(whole, field)


def test_inference_in_halves_has_the_same_program() -> None:
    assert_same(trace_of(Chain(plain, norm_and_linear, 40), None, amp=True), "cpp")


@pytest.mark.parametrize("amp", [False, True])
def test_sums_in_parts_have_the_same_program(monkeypatch: pytest.MonkeyPatch, amp: bool) -> None:
    """Wide layers of few rows: sums are taken in parts, which other kernels put together."""
    monkeypatch.setitem(globals(), "WIDTH", 64)

    def wide() -> nn.Module:
        return nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))

    assert_same(trace_of(Chain(plain, wide, 24), adamw, rows=16, amp=amp), "triton")


def test_layers_that_draw_random_numbers_have_seeds_of_their_own() -> None:
    trace = trace_of(transformer(dropout=0.1), sgd)
    assert len(trace.scalar_kinds) >= LAYERS
    assert_same(trace, "cpp")


@pytest.mark.parametrize("make", [linear, norm_and_linear])
@pytest.mark.parametrize("optimize", [adamw, None])
def test_chains_of_small_layers_have_the_same_program(
    make: Callable[[], nn.Module], optimize: Callable[..., torch.optim.Optimizer] | None
) -> None:
    model = nn.Sequential(*(make() for _ in range(40)))
    assert_same(trace_of(model, optimize), "cpp")


def test_only_few_layers_are_planned(transformer_step: CutTrace, monkeypatch: pytest.MonkeyPatch) -> None:
    planned: list[int] = []
    plan = pipeline._plan_schedule

    def counted(trace: CutTrace, *rest: Any) -> Any:
        planned.append(len(trace.entries))
        return plan(trace, *rest)

    monkeypatch.setattr(pipeline, "_plan_schedule", counted)
    assert pipeline.plan_repeated(transformer_step, OPTIONS["cpp"]) is not None
    assert len(planned) == 1 and 2 * planned[0] < len(transformer_step.entries)


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


@pytest.mark.parametrize("step", UNUSUAL)
@pytest.mark.parametrize("optimize", [sgd, None])
def test_unusual_chains_have_the_same_program_or_are_planned_whole(
    step: Callable[..., torch.Tensor], optimize: Callable[..., torch.optim.Optimizer] | None
) -> None:
    trace = trace_of(Chain(step, norm_and_linear), optimize)
    repeated = pipeline.plan_repeated(trace, OPTIONS["cpp"])
    if repeated is not None:
        assert_same_but_for_names(repeated.program, pipeline.plan_trace(trace, OPTIONS["cpp"]).program)


def test_one_layer_many_times_is_not_many_layers() -> None:
    layer = norm_and_linear()
    trace = trace_of(nn.Sequential(*([layer] * LAYERS)), sgd)
    repeated = pipeline.plan_repeated(trace, OPTIONS["cpp"])
    if repeated is not None:
        assert_same_but_for_names(repeated.program, pipeline.plan_trace(trace, OPTIONS["cpp"]).program)


def test_an_error_in_it_costs_time_only(
    transformer_step: CutTrace, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: Any) -> None:
        raise KeyError("a mistake")

    monkeypatch.setattr(pipeline, "first_that_repeats", broken)
    assert pipeline._plan_repeated_or_not(transformer_step, OPTIONS["cpp"]) is None
    assert "a mistake" in caplog.text


def test_few_layers_are_planned_whole() -> None:
    assert list(shorten(trace_of(transformer(layers=4), sgd))) == []


@pytest.mark.parametrize("language", ["cpp", "triton"])
@pytest.mark.parametrize("optimize", [adamw, sgd])
def test_a_norm_of_all_layers(language: str, optimize: Callable[..., torch.optim.Optimizer]) -> None:
    """One call reads a value of each layer, those that are left out among them."""
    trace = trace_of(nn.Sequential(*(norm_and_linear() for _ in range(LAYERS))), optimize, clips=True)
    assert_same_outside(trace, language)


@pytest.mark.parametrize("step", ["plain", "residual", "clipped", "two stacks"])
def test_training_by_repeated_layers_is_training(compiled: None, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    repeated: list[bool] = []
    plan = pipeline.plan_repeated

    def watched(trace: CutTrace, options: CompileOptions) -> pipeline.PlannedAhead | None:
        planned = plan(trace, options)
        repeated.append(planned is not None)
        return planned

    monkeypatch.setattr(pipeline, "plan_repeated", watched)
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
    assert any(repeated)
    torch.testing.assert_close(losses["lazy"], losses["cpu"], rtol=1e-4, atol=1e-5)
    assert losses["cpu"][-1] < losses["cpu"][0]


def test_runs_of_equal_periods() -> None:
    found = find_runs("x" + "abcb" * 5 + "ab" + "yy" + "cd" * 4 + "z", 4)
    assert [(run.start, run.period, run.count, run.rest) for run in found] == [(1, 4, 5, 2), (25, 2, 4, 0)]
    assert find_runs("abcabc", 3) == []
    assert [(run.period, run.count) for run in find_runs("aab" * 6, 3)] == [(3, 6)]


def test_names_go_on_as_if_the_layers_had_been_there() -> None:
    # A rising stretch of two names a layer, then a falling one of one name a layer; `c` stands between, `d` behind.
    numbers = {0: 10, 1: 11, 2: 12, 3: 13, 4: 20, 5: 31, 6: 30, 7: 40}
    roles = {0: ("a", 4), 1: ("b", 4), 2: ("a", 5), 3: ("b", 5), 4: None, 5: ("e", 4), 6: ("e", 5), 7: None}
    found = new_numbers(numbers, roles, first=5, more=3)
    assert [found[0, by] for by in range(4)] == [10, 12, 14, 16] and found[2, 0] == 18
    assert [found[1, by] for by in range(4)] == [11, 13, 15, 17] and found[3, 0] == 19
    assert found[4, 0] == 26
    assert found[6, 0] == 36 and [found[5, by] for by in (3, 2, 1, 0)] == [37, 38, 39, 40]
    assert found[7, 0] == 49


def test_two_values_never_get_one_name() -> None:
    with pytest.raises(NotPeriodic):
        new_numbers({0: 10, 1: 12, 2: 11, 3: 14}, {0: ("a", 4), 1: ("a", 5), 2: ("b", 4), 3: ("b", 5)}, 5, 3)


def test_lists_are_one_call_for_each_element() -> None:
    with recorded() as found:
        tensors = [torch.rand(3).to("lazy") for _ in range(4)]
        kept = torch._foreach_mul(tensors, 2.0)
        torchlazy.flush()
    assert len(kept) == 4
    calls = layers_shorten.calls_of(found[-1])
    assert [element for element in calls.element] == [0, 1, 2, 3]
    assert len(set(calls.calls.keys)) == 1


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
