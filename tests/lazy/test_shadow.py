"""`shadow`: right programs pass, a wrong one is found down to its kernel, operator and line, and its script runs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torchlazy
from torchlazy.inductor import lowering
from torchlazy.lazy.api import driver, recorder
from torchlazy.lazy.inspect.compare import compare
from torchlazy.lazy.inspect.shadow import ShadowWarning
from torchlazy.lazy.plan import pipeline
from torchlazy.prims.builder import RULES

from tests.lazy.compare import data
from tests.lazy.wrong_exp import GENERATORS, wrong_pointwise

ROOT = Path(__file__).parents[2]
aten = torch.ops.aten


@pytest.fixture
def wrong_exp(monkeypatch: pytest.MonkeyPatch) -> None:
    for generator, method in GENERATORS:
        monkeypatch.setattr(generator, method, wrong_pointwise(getattr(generator, method)))


def here() -> int:
    return sys._getframe(1).f_lineno


def run_script(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command], cwd=ROOT, capture_output=True, text=True, timeout=300, env={**os.environ}
    )


def test_a_training_step_agrees_and_goes_on_as_in_eager(tmp_path):
    def losses(device: str) -> list[float]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(
            torch.nn.Linear(6, 8), torch.nn.GELU(), torch.nn.LayerNorm(8), torch.nn.Linear(8, 3)
        )
        model.to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        found = []
        for _ in range(3):
            loss = model(data(device, 5, 6)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        return found

    with torchlazy.shadow(tmp_path) as window:
        lazy = losses("lazy")
    assert lazy == pytest.approx(losses("cpu"), rel=1e-6)
    assert window.differences == []
    assert window.cuts >= 3
    assert torchlazy.metrics()["fallbacks"] == {}
    assert list(tmp_path.iterdir()) == []


def test_random_numbers_and_memory_that_nobody_wrote_are_no_differences(tmp_path):
    x = data("lazy", 64, 8)
    with torchlazy.shadow(tmp_path) as window:
        y = torch.nn.functional.dropout(x, 0.5) + torch.randn(64, 8, device="lazy")
        z = torch.empty(1000, device="lazy")
        torchlazy.flush()
    assert window.cuts == 1
    assert window.differences == []
    assert y.shape == x.shape and z.shape == (1000,)


def test_a_wrong_emitter_is_found_and_its_script_shows_it(tmp_path, wrong_exp):
    x, w = data("lazy", 6, 8), data("lazy", 8, 5)
    with pytest.warns(ShadowWarning) as warned, torchlazy.shadow(tmp_path) as window:
        a = (x @ w).sin() * 2
        line = here() + 1
        b = torch.exp(a)
        c = (b.sum(0) + 1).tanh()
        torchlazy.flush()
    (found,) = window.differences
    assert (found.stage, found.operator) == ("code generation", "aten.exp.default")
    assert found.frame.endswith(f"test_shadow.py:{line}")
    assert found.kernel is not None
    assert f"test_shadow.py:{line}" in str(warned[0].message)
    assert str(found.script) in str(warned[0].message)
    # The program goes on with the right values.
    eager = torch.exp((data("cpu", 6, 8) @ data("cpu", 8, 5)).sin() * 2)
    torch.testing.assert_close(b.cpu(), eager)
    torch.testing.assert_close(c.cpu(), (eager.sum(0) + 1).tanh())

    text = found.script.read_text()
    assert "aten.exp.default" in text
    assert "aten.mm.default(" not in text  # the smallest piece: one operator
    assert "pickle" not in text
    shown = run_script("-m", "tests.lazy.wrong_exp", str(found.script))
    assert shown.returncode == 1, shown.stderr
    assert "of 30 elements differ" in shown.stdout
    fixed = run_script(str(found.script))
    assert fixed.returncode == 0, fixed.stderr + fixed.stdout
    assert "0 outputs differ" in fixed.stdout


def test_a_wrong_kernel_of_equal_layers_is_found_at_its_line(tmp_path, wrong_exp, monkeypatch):
    by_layers = []
    plan = pipeline.plan_by_layers
    monkeypatch.setattr(pipeline, "plan_by_layers", lambda *of: (by_layers.append(plan(*of)), by_layers[-1])[1])
    x, w = data("lazy", 6, 6), data("lazy", 6, 6)
    with pytest.warns(ShadowWarning), torchlazy.shadow(tmp_path) as window:
        line = here() + 1
        x = ((x @ w).sin() * 2).exp().tanh() - 1
        x = ((x @ w).sin() * 2).exp().tanh() - 1
        x = ((x @ w).sin() * 2).exp().tanh() - 1
        x = ((x @ w).sin() * 2).exp().tanh() - 1
        torchlazy.flush()
    assert by_layers[0] is not None
    (found,) = window.differences
    assert (found.stage, found.operator) == ("code generation", "aten.exp.default")
    assert found.frame.endswith(f"test_shadow.py:{line}")
    shown = {origin.rpartition(":")[2] for node in by_layers[0].loops.nodes for origin in node.origins}
    assert shown == {str(line + number) for number in range(4)}  # of equal layers each has its own line


def test_a_cut_is_judged_once_and_every_run_of_it_is_compared(tmp_path, wrong_exp):
    x = data("lazy", 4)
    with pytest.warns(ShadowWarning), torchlazy.shadow(tmp_path) as window:
        for _ in range(3):
            (x * 2).exp().tolist()
    assert len(window.differences) == 1
    assert window.cuts == 3


def test_a_wrong_decomposition_is_found(tmp_path, monkeypatch):
    right = RULES[aten.sigmoid.default]
    monkeypatch.setitem(RULES, aten.sigmoid.default, lambda b, x: right(b, right(b, x)))
    x = data("lazy", 4, 3)
    with pytest.warns(ShadowWarning), torchlazy.shadow(tmp_path) as window:
        line = here() + 1
        y = (x + 1).sigmoid()
        z = y * 3
        torchlazy.flush()
    (found,) = window.differences
    assert (found.stage, found.operator) == ("decomposition", "aten.sigmoid.default")
    assert found.frame.endswith(f"test_shadow.py:{line}")
    assert found.kernel is not None
    torch.testing.assert_close(z.cpu(), (data("cpu", 4, 3) + 1).sigmoid() * 3)


def test_a_wrong_lowering_rule_is_found(tmp_path, monkeypatch):
    monkeypatch.setitem(lowering.RULES, "maximum", lowering.RULES["minimum"])
    right = lowering.RULES["sin"]

    def wrong(context, node, operands):
        return right(context, node, (right(context, node, operands),))

    monkeypatch.setitem(lowering.RULES, "sin", wrong)
    x = data("lazy", 4, 3)
    with pytest.warns(ShadowWarning), torchlazy.shadow(tmp_path) as window:
        line = here() + 1
        y = (x + 1).sin()
        torchlazy.flush()
    (found,) = window.differences
    assert (found.stage, found.operator) == ("lowering", "aten.sin.default")
    assert found.frame.endswith(f"test_shadow.py:{line}")
    torch.testing.assert_close(y.cpu(), (data("cpu", 4, 3) + 1).sin())


def test_a_program_that_belongs_to_another_trace_is_found(tmp_path, compiled):
    x = data("lazy", 4)
    (x + 1).sin().tolist()
    one = next(iter(driver.tiers._known.values()))
    (x + 1).cos().tolist()
    other = list(driver.tiers._known.values())[-1]
    assert one is not other
    other.compiled = one.compiled
    with pytest.warns(ShadowWarning), torchlazy.shadow(tmp_path) as window:
        values = (x + 1).cos().tolist()
    assert values == (data("cpu", 4) + 1).cos().tolist()
    (found,) = window.differences
    assert found.stage == "another program"
    assert found.kernel is None


def test_donated_inputs_are_overwritten_once(tmp_path):
    x = data("lazy", 5)
    address = x.data_ptr()
    with torchlazy.shadow(tmp_path) as window:
        for _ in range(3):
            x.mul_(2).add_(1)
            torchlazy.flush()
    assert window.cuts == 3
    assert window.differences == []
    assert x.data_ptr() == address
    torch.testing.assert_close(x.cpu(), data("cpu", 5) * 8 + 7)


def test_a_wrong_in_place_update_has_a_script_too(tmp_path, wrong_exp):
    x = data("lazy", 5)
    with pytest.warns(ShadowWarning), torchlazy.shadow(tmp_path) as window:
        x.exp_()
        torchlazy.flush()
    torch.testing.assert_close(x.cpu(), data("cpu", 5).exp())
    assert run_script("-m", "tests.lazy.wrong_exp", str(window.differences[0].script)).returncode == 1


def test_errors_of_the_program_come_through_and_the_window_closes(tmp_path):
    table, index = data("lazy", 4, 3), torch.tensor([1, 9]).to("lazy")
    with pytest.raises(IndexError), torchlazy.shadow(tmp_path):
        torch.nn.functional.embedding(index, table).tolist()
    assert driver.shadow is None
    assert recorder.keep_frames is False
    assert torchlazy.config.tiers == "on"
    with torchlazy.shadow(tmp_path), pytest.raises(RuntimeError, match="open already"), torchlazy.shadow(tmp_path):
        pass
    assert driver.shadow is None


def test_rounding_is_no_difference(tmp_path):
    torch.manual_seed(3)
    x = (torch.rand(64, 512) * 1000).to("lazy")
    with torchlazy.shadow(tmp_path) as window:
        y = x
        for _ in range(3):
            y = y - y.mean(1, keepdim=True)
            y = y * (y.std(1, keepdim=True) + 1).reciprocal() * 1000
        y.sum(0).tolist()
    assert window.differences == []


def test_compare_counts_and_names_the_worst():
    a = torch.tensor([[1.0, 2.0], [float("nan"), 4.0]])
    assert compare(a, a.clone()) is None
    b = a.clone()
    b[0, 1], b[1, 1] = 2.5, 4.1
    found = compare(b, a)
    assert (found.differing, found.numel, found.index) == (2, 4, (0, 1))
    assert "2.5 compiled, 2.0 operator by operator" in str(found)
    assert compare(torch.tensor([1, 2]), torch.tensor([1, 3])).index == (1,)
    assert compare(torch.ones(2), torch.ones(3)).distance == float("inf")
    b = a.clone()
    b[1, 0] = 0.0
    assert compare(b, a).index == (1, 0)


def test_a_compiled_callable_is_compared(tmp_path, wrong_exp):
    @torchlazy.compile
    def run(x: torch.Tensor) -> torch.Tensor:
        return (x * 2).exp()

    x = data("lazy", 4)
    with pytest.warns(ShadowWarning), torchlazy.shadow(tmp_path) as window:
        y = run(x)
        torchlazy.flush()
    assert [found.operator for found in window.differences] == ["aten.exp.default"]
    torch.testing.assert_close(y.cpu(), (data("cpu", 4) * 2).exp())
    assert recorder.gate is None
