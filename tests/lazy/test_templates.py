"""Templates: what is told where there is none, background compilation, text forms, and the switch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torchlazy
from torch import Tensor
from torchlazy.lazy.api import driver
from torchlazy.lazy.config import Config
from torchlazy.lazy.numbers.matcher import Matcher, UnifiedTrace
from torchlazy.lazy.numbers.unify import CannotUnify, unify
from torchlazy.lazy.run import shape_families
from torchlazy.lazy.trace.skeleton import DecomposedTrace, assemble_trace, decompose_trace
from torchlazy.lazy.trace.trace import CutTrace
from torchlazy.prims.size_expr import python_text
from torchlazy.prims.size_int import SizeSpace
from torchlazy.runtime.toolchains.kernel_cache import open_cache

pytestmark = pytest.mark.usefixtures("device_in_python")


@pytest.fixture(autouse=True)
def _dynamic() -> Iterator[None]:
    kept = torchlazy.config.dynamic
    torchlazy.config.dynamic, torchlazy.config.tiers = "on", "off"
    yield
    torchlazy.config.dynamic = kept


@pytest.fixture
def record(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[CutTrace, DecomposedTrace]]:
    """The trace of one call on the lazy device."""
    traces: list[CutTrace] = []
    look_up = driver.tiers.look_up

    def listening(trace: CutTrace, *args: Any, **kwargs: Any) -> Any:
        traces.append(trace)
        return look_up(trace, *args, **kwargs)

    monkeypatch.setattr(driver.tiers, "look_up", listening)

    def run(function: Callable[..., Tensor], *tensors: Tensor) -> tuple[CutTrace, DecomposedTrace]:
        torchlazy.config.dynamic, torchlazy.config.tiers = "off", "on"
        result = function(*(tensor.to("lazy") for tensor in tensors))
        torchlazy.sync()
        del result
        trace = max(traces, key=lambda found: len(found.entries))
        traces.clear()
        return trace, decompose_trace(trace)

    return run


def softmax_of_join(x: Tensor, y: Tensor) -> Tensor:
    return torch.softmax(torch.cat([x, y], 1)[:, :-1] * 0.5, -1)


def test_a_trace_comes_apart_and_together_again(record: Callable[..., tuple[CutTrace, DecomposedTrace]]) -> None:
    trace, parts = record(softmax_of_join, torch.randn(4, 5), torch.randn(4, 3))
    again = decompose_trace(assemble_trace(trace, parts.ints, parts.floats))
    assert (again.skeleton, again.ints, again.floats) == (parts.skeleton, parts.ints, parts.floats)


def test_unified_numbers_and_their_text(record: Callable[..., tuple[CutTrace, DecomposedTrace]]) -> None:
    samples = [record(softmax_of_join, torch.randn(n, m), torch.randn(n, 3)) for n, m in ((4, 5), (8, 11))]
    assert samples[0][1].skeleton == samples[1][1].skeleton
    unified = unify(samples)
    assert [low for _, low in unified.symbols] == [2, 2]
    texts = {python_text(expr) for expr in unified.exprs}
    assert {"s0", "s1", "s1 + (3)"} <= texts or {"s0", "s1", "(3) + s1"} <= texts
    again = UnifiedTrace.from_json(unified.to_json())
    assert again == unified or again.__dict__ == unified.__dict__

    matcher = Matcher(again)
    _, other = record(softmax_of_join, torch.randn(6, 9), torch.randn(6, 3))
    assert matcher.match(other) == ((6, 9), ()) or matcher.match(other) == ((9, 6), ())
    _, wrong = record(softmax_of_join, torch.randn(6, 9), torch.randn(6, 4))
    assert matcher.match(wrong) is None


def test_complex_numbers_that_moved_are_scalars_and_others_keep_the_signs_of_their_zeros(
    record: Callable[..., tuple[CutTrace, DecomposedTrace]],
) -> None:
    def sample(c: complex, kept: complex = complex(1.5, -0.0)) -> tuple[CutTrace, DecomposedTrace]:
        return record(lambda x: torch.add(x * kept, x, alpha=c), torch.ones(3, dtype=torch.complex64))

    unified = unify([sample(1 + 2j), sample(1 + 3j)])
    again = UnifiedTrace.from_json(unified.to_json())
    assert again.__dict__ == unified.__dict__
    matcher = Matcher(again)
    assert matcher.match(sample(5j)[1]) == ((), (5j,))
    assert matcher.match(sample(5j, complex(1.5, 0.0))[1]) is None
    assert matcher.match(sample(5j, complex(1.5, 1.0))[1]) is None
    trace, parts = sample(7j)
    together = assemble_trace(trace, parts.ints, parts.floats)
    assert together.entries == trace.entries
    kinds = unified.trace_in(SizeSpace(()), trace).scalar_kinds
    assert kinds == (complex,)


def test_a_size_of_one_has_no_template(record: Callable[..., tuple[CutTrace, DecomposedTrace]]) -> None:
    samples = [record(softmax_of_join, torch.randn(n, 5), torch.randn(n, 3)) for n in (1, 4)]
    with pytest.raises(CannotUnify, match="sizes of 0 and 1"):
        unify(samples)


def test_what_cannot_be_generalised_is_told_and_compiled_one_by_one() -> None:
    def function(x: Tensor) -> Tensor:
        return torch.nn.functional.adaptive_avg_pool2d(x, 3) * 2

    for size in (10, 9, 10, 9):
        x = torch.randn(1, 2, size, size)
        torch.testing.assert_close(function(x.to("lazy")).cpu(), function(x))
    counts = torchlazy.metrics()
    assert counts["templates"] == 0 and counts["compiles"] == 2
    (reason,) = counts["not_generalised"]
    for part in ("adaptive_avg_pool2d", "test_templates.py:", "s0 = 10", "compiled one by one"):
        assert part in reason
    assert "adaptive_avg_pool2d" in str(torchlazy.report())


@pytest.mark.parametrize("small", [1, 0])
def test_a_size_of_zero_or_one_is_told_apart(small: int) -> None:
    for rows in (4, 9, small, 12):
        x = torch.randn(rows, 5)
        torch.testing.assert_close((x.to("lazy") * 2).sum(1).cpu(), (x * 2).sum(1))
    counts = torchlazy.metrics()
    assert counts["templates"] == 1 and counts["compiles"] == 3 and counts["generalised"] == 2
    (reason,) = counts["not_generalised"]
    for part in (f"size {small} in dimension 0", "aten.mul.Tensor", "test_templates.py:", "pad such a size to 2"):
        assert part in reason
    assert f"size {small} in dimension 0" in str(torchlazy.report())


@pytest.mark.parametrize("small_first", [True, False])
def test_sizes_beside_one_of_zero_or_one_have_a_template_of_their_own(small_first: bool) -> None:
    """The second step of a decoder reads a cache of length 1, at each length of the prompt."""
    shapes = [(1, n) for n in (5, 7, 9, 12)]
    others = [(4, 6), (3, 8), (7, 5)]
    for cached, length in (*shapes, *others) if small_first else (*others, *shapes):
        cache, prompt = torch.randn(2, cached), torch.randn(length, 2)
        want = torch.cat([cache, cache], 1).sum(1) + (prompt * 2).sum(0)
        cache, prompt = cache.to("lazy"), prompt.to("lazy")
        torch.testing.assert_close((torch.cat([cache, cache], 1).sum(1) + (prompt * 2).sum(0)).cpu(), want)
    counts = torchlazy.metrics()
    assert counts["templates"] == 2 and counts["compiles"] <= 4 and counts["generalised"] == 5, counts


def test_too_many_independent_sizes_are_told_with_the_operator() -> None:
    """Each operand's length moves by itself: there are more of them than a template has symbols for."""

    def function(parts: list[Tensor]) -> Tensor:
        return torch.stack([(part * 2).sum() for part in parts])

    for step in (1, 2, 3):
        parts = [torch.randn(5 + k * 3 + step * k * k) for k in range(1, 41)]
        torch.testing.assert_close(
            function([part.to("lazy") for part in parts]).cpu(), function(parts), rtol=1e-4, atol=1e-4
        )
    counts = torchlazy.metrics()
    assert counts["templates"] == 0
    reason = next(iter(counts["not_generalised"]))
    for part in (
        "change independently",
        "an input's size",
        "keep sizes that belong together in step",
        "test_templates.py:",
    ):
        assert part in reason
    assert "change independently" in str(torchlazy.report())


def test_a_worker_makes_the_template_and_later_sizes_compile_nothing() -> None:
    torchlazy.config.tiers = "on"
    for size in (4, 9, 12, 33, 7):
        x = torch.randn(size, 5)
        torch.testing.assert_close(torch.softmax(x.to("lazy") * 2, 0).cpu(), torch.softmax(x * 2, 0))
        torchlazy.wait_for_compile()
    counts = torchlazy.metrics()
    assert counts["templates"] == counts["compiles"] == 1 and counts["generalised"] == 3


def test_sizes_that_came_while_a_template_was_made_for_others_have_one_too() -> None:
    """The first template is made of even sizes; odd ones, which it does not serve, came before it was there."""

    def function(x: Tensor) -> Tensor:
        return (x[: len(x) // 2] * 2).sum(0) + (x[len(x) // 2 :] * 3).sum(0)

    torchlazy.config.tiers = "on"
    for _ in range(4):
        for size in (4, 8, 5, 9, 13, 12, 33, 27):
            x = torch.randn(size, 5)
            torch.testing.assert_close(function(x.to("lazy")).cpu(), function(x))
        torchlazy.wait_for_compile()
    counts = torchlazy.metrics()
    assert counts["compiles"] == counts["templates"] == 2, counts
    assert not counts["not_generalised"], counts


def test_traces_of_fixed_sizes_are_not_taken_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """What programs for all sizes need is looked at once a second trace has the same operators."""
    looked: list[CutTrace] = []

    def counted(trace: CutTrace) -> DecomposedTrace:
        looked.append(trace)
        return decompose_trace(trace)

    monkeypatch.setattr(shape_families, "decompose_trace", counted)
    x = torch.randn(7, 5)
    for _ in range(3):
        (x.to("lazy") * 2).sum(1).cpu()
        (x.to("lazy") * 2).exp().cpu()
    assert looked == []
    (x[:4].to("lazy") * 2).sum(1).cpu()
    assert [trace.inputs[0][1].shape for trace in looked] == [(7, 5), (4, 5)]


def test_a_stored_template_serves_the_next_process(tmp_path: Path) -> None:
    """By worker and in the foreground: new sizes compile nothing there; other skeletons of those operators do. In the
    background the first one has the template loaded, and is mostly too early to be served by it."""
    torchlazy.config.store = "on"
    for tiers in ("on", "off"):
        torchlazy.config.tiers = tiers
        kept, driver.tiers._cache, driver.tiers._store = driver.tiers._cache, open_cache(tmp_path / tiers), None
        try:
            for start in (3, 30):
                driver.forget()
                torchlazy.reset_metrics()
                for size in range(start, start + 4):
                    x = torch.randn(size, 5)
                    torch.testing.assert_close((x.to("lazy") * 2).softmax(0).cpu(), (x * 2).softmax(0))
                    torchlazy.wait_for_compile()
            counts = torchlazy.metrics()
            assert counts["compiles"] == 0 and counts["generalised"] in ((3, 4) if tiers == "on" else (4,))
            x = torch.randn(6, 5)
            torch.testing.assert_close((x.to("lazy") * 2).softmax(1).cpu(), (x * 2).softmax(1))
        finally:
            driver.tiers._cache, driver.tiers._store = kept, None


def test_off_compiles_each_size() -> None:
    torchlazy.config.dynamic = "off"
    for size in (4, 9, 12):
        (torch.randn(size, device="lazy") * 3).sum().item()
    counts = torchlazy.metrics()
    assert counts["templates"] == 0 and counts["generalised"] == 0 and counts["compiles"] >= 3


@pytest.mark.parametrize(("text", "wanted"), [(None, "on"), ("0", "off"), ("off", "off"), ("1", "on"), ("on", "on")])
def test_the_environment_switches_it(monkeypatch: pytest.MonkeyPatch, text: str | None, wanted: str) -> None:
    if text is None:
        monkeypatch.delenv("TORCHLAZY_DYNAMIC", raising=False)
    else:
        monkeypatch.setenv("TORCHLAZY_DYNAMIC", text)
    assert Config().dynamic == wanted
