"""`explain` and `report`: the causes of cuts, where new traces left the known ones, library calls and fallbacks."""

from __future__ import annotations

import inspect
import json

import pytest
import torch
import torchlazy
from torch.utils.data import DataLoader, TensorDataset
from torchlazy.lazy.api import recorder
from torchlazy.lazy.trace import user_frames
from torchlazy.lazy.trace.diff import REMEDIES, Divergence

from tests.lazy.compare import data

pytestmark = pytest.mark.usefixtures("device_in_python")


def line_of(function: object) -> str:
    return f"test_explain.py:{inspect.getsourcelines(function)[1]}"


def divergence_of(first: object, second: object) -> Divergence:
    """Where `second()`'s trace left that of `first()`, from the account of the process; both end with a flush."""
    kept = [first()]
    torchlazy.flush()
    kept = [second()]
    torchlazy.flush()
    del kept
    return torchlazy.report().divergences[-1]


def test_every_cut_has_its_cause_kind_and_line():
    x = data("lazy", 4, 4)
    lines: list[int] = []

    def fn() -> float:
        y = x.exp()
        torchlazy.flush()
        lines.append(inspect.currentframe().f_lineno - 1)
        value = (y + 1).sum().item()
        lines.append(inspect.currentframe().f_lineno - 1)
        return value

    found = torchlazy.explain(fn)
    assert [(cut.cause, cut.kind) for cut in found.cuts] == [("flush", "flush"), ("item", "sync")]
    assert [cut.frame.rpartition("/")[2] for cut in found.cuts] == [f"test_explain.py:{n}" for n in lines]
    assert [sync.cause for sync in found.syncs] == ["item"]
    assert found.result == pytest.approx((data("cpu", 4, 4).exp() + 1).sum().item(), rel=1e-5)
    assert [cut.operators for cut in found.cuts] == [1, 2]


def test_what_is_left_pending_is_told_and_what_was_pending_before_is_not():
    before = data("lazy", 3) + 1
    found = torchlazy.explain(lambda: data("lazy", 3) * 2)
    assert [cut.cause for cut in found.cuts] == ["explain window closes"]
    assert found.syncs == ()
    torch.testing.assert_close(found.result.cpu(), data("cpu", 3) * 2)
    torch.testing.assert_close(before.cpu(), data("cpu", 3) + 1)


def test_state_changes_happen_once_and_frames_are_kept_only_inside():
    w = torch.nn.Parameter(data("lazy", 3))
    optimizer = torch.optim.SGD([w], lr=0.5)

    def step() -> None:
        (w * w).sum().backward()
        optimizer.step()

    torchlazy.explain(step)
    torch.testing.assert_close(w.detach().cpu(), data("cpu", 3) * 0)
    assert recorder.keep_frames is False
    assert recorder.gate is None


def test_an_exception_comes_through_and_everything_is_closed():
    def fail() -> None:
        data("lazy", 3).exp()
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        torchlazy.explain(fail)
    assert recorder.keep_frames is False
    assert recorder.on_eager.__name__ == "_count_eager"
    assert recorder.gate is None


def test_a_new_size_is_told_with_the_users_line_old_and_new_value():
    w = data("lazy", 6, 5)

    def run(rows: int) -> torch.Tensor:
        x = data("lazy", rows, 6)
        y = x @ w
        return y.relu()

    line = inspect.getsourcelines(run)[1] + 2
    found = divergence_of(lambda: run(128), lambda: run(96))
    assert (found.what, found.old, found.new) == ("size", "128", "96")
    assert (found.op, found.operator) == (0, "aten.mm.default")
    assert found.frame.endswith(f"test_explain.py:{line}")
    assert f"left cut {found.nearest} at op 0" in str(found)
    assert f"test_explain.py:{line}, size 128 -> 96" in str(found)
    assert found.cut == found.nearest + 1
    assert "one program is made for all sizes" in found.remedy
    torchlazy.config.dynamic = "off"
    assert found.remedy == REMEDIES["size"]


def test_another_rank_is_another_program():
    found = divergence_of(lambda: data("lazy", 6, 5).exp(), lambda: data("lazy", 6).exp())
    assert found.what == "size" and found.remedy == "accept one program for each number of dimensions"


def test_a_divergence_in_the_middle_of_a_long_trace():
    x = data("lazy", 4, 4)
    lines: list[int] = []

    def run(dim: int) -> torch.Tensor:
        y = x
        for _ in range(40):
            y = (y + x).relu()
        y = y.sum(dim)
        lines.append(inspect.currentframe().f_lineno - 1)
        return y + 1

    run(0), torchlazy.flush()
    found = divergence_of(lambda: run(0), lambda: run(1))
    assert (found.op, found.what, found.old, found.new) == (80, "constant", "0", "1")
    assert found.detail == "argument dim"
    assert found.frame.endswith(f"test_explain.py:{lines[0]}")


CASES = {
    "operator": (lambda x: (x * 2).exp(), lambda x: (x * 2).sin(), "aten.exp.default", "aten.sin.default"),
    "constant": (lambda x: x.pow(2), lambda x: x.pow(3), "2", "3"),
    "length": (lambda x: x.exp(), lambda x: x.exp().sin(), "the cut", "continues with aten.sin.default"),
    "dtype": (lambda x: x.to(torch.float16), lambda x: x.to(torch.bfloat16), "float16", "bfloat16"),
}


@pytest.mark.parametrize("what", CASES)
def test_kinds_of_divergence(what):
    first, second, old, new = CASES[what]
    x = data("lazy", 3, 4)
    found = divergence_of(lambda: first(x), lambda: second(x))
    assert (found.old, found.new) == (old, new)
    assert found.what == ("constant" if what == "dtype" else what)  # a dtype that the program names is a constant
    assert found.frame.endswith(line_of(second))
    assert found.remedy == REMEDIES[found.what]


def test_inputs_of_another_dtype_or_layout():
    a, b = data("lazy", 4, 4), data("lazy", 4, 4).double()
    torchlazy.flush()
    found = divergence_of(lambda: a + 1, lambda: b + 1)
    assert (found.what, found.old, found.new) == ("dtype", "float32", "float64")
    c = data("cpu", 4, 4).t().to("lazy")
    found = divergence_of(lambda: a.exp(), lambda: c.exp())
    assert (found.what, found.old, found.new) == ("layout", "strides (4, 1)", "strides (1, 4)")


def test_tensors_that_stay_alive_are_a_divergence():
    x = data("lazy", 3)

    def both() -> tuple[torch.Tensor, torch.Tensor]:
        y = x.exp()
        return y, y.sin()

    found = divergence_of(lambda: both()[1], both)
    assert (found.what, found.old, found.new) == ("alive", "1 tensors", "2 tensors")
    assert found.operator == "aten.exp.default"


def test_the_nearest_trace_is_the_one_with_the_longest_common_beginning():
    x = data("lazy", 3, 3)

    def run(steps: int, end: int) -> torch.Tensor:
        y = x
        for _ in range(steps):
            y = y.relu() + x
        return y * end if end else y.exp()

    numbers = {}
    for steps in (2, 7, 4):
        kept = run(steps, 0)
        torchlazy.flush()
        numbers[steps] = torchlazy.report().divergences[-1].cut
        del kept
    found = divergence_of(lambda: run(4, 0), lambda: run(7, 5))
    assert found.nearest == numbers[7]
    assert (found.op, found.old, found.new) == (14, "aten.exp.default", "aten.mul.Tensor")


def test_following_takes_no_frames_but_the_cuts_own(monkeypatch):
    x = data("lazy", 3, 3)

    def run() -> None:
        y = (x + 1).relu().exp()
        torchlazy.flush()
        del y

    for _ in range(3):
        run()
    calls: list[str] = []
    monkeypatch.setattr(user_frames, "user_frame", lambda: calls.append("asked") or "here:1")
    run()
    assert len(calls) == 1
    before = len(torchlazy.report().divergences)
    run()
    assert len(torchlazy.report().divergences) == before


def test_library_calls_have_reason_and_line(compiled):
    x, w = data("lazy", 4, 6), data("lazy", 6, 5)
    found = torchlazy.explain(lambda: (x @ w).relu())
    (cut,) = found.cuts
    (use,) = cut.externs
    assert (use.op, use.count, use.by_choice) == ("aten.mm.default", 1, True)
    assert use.reason
    assert use.frame.endswith(line_of(test_library_calls_have_reason_and_line).partition(":")[0] + f":{here() - 5}")
    assert (cut.is_planned, cut.kernels, cut.library_calls, cut.outcome) == (False, 1, 1, "compiled")
    assert cut.bytes > 0
    assert cut.compile_seconds > 0
    uses = torchlazy.report().externs
    assert [(u.op, u.count) for u in uses] == [("aten.mm.default", 1)]


def test_a_program_that_came_from_a_worker_is_told_once():
    torchlazy.reset_metrics()
    x, w = data("lazy", 4, 6), data("lazy", 6, 5)
    for _ in range(2):
        (x @ w).tolist()
    torchlazy.wait_for_compile()
    for _ in range(2):
        (x @ w).tolist()
    assert torchlazy.metrics()["hits"] >= 1
    assert [(use.op, use.count) for use in torchlazy.report().externs] == [("aten.mm.default", 1)]


def here() -> int:
    return inspect.currentframe().f_back.f_lineno


def test_what_ran_operator_by_operator_is_planned(operator_by_operator):
    x, w = data("lazy", 4, 6), data("lazy", 6, 5)
    found = torchlazy.explain(lambda: (x @ w).relu())
    (cut,) = found.cuts
    assert (cut.is_planned, cut.kernels, cut.library_calls) == (True, 1, 1)
    assert cut.outcome == "tier 0: first sight"
    assert "would be 1 kernels and 1 library calls" in str(found)


def test_operators_that_run_at_once_are_told():
    x = data("lazy", 3, 4)
    torchlazy.reset_metrics()
    found = torchlazy.explain(lambda: x.nonzero())
    (use,) = found.eager
    assert (use.op, use.reason, use.count) == ("aten.nonzero.default", "data-dependent shape", 1)
    assert use.frame.endswith(f"test_explain.py:{here() - 3}")
    (same,) = torchlazy.report().eager
    assert same == use
    assert "data-dependent shape" in str(found)


def test_a_report_is_plain_data_and_text():
    x = data("lazy", 3, 4)
    for _ in range(2):
        (x + 1).tolist()
    found = torchlazy.report()
    json.dumps(found.to_dict())
    text = str(found)
    assert "2 x tolist (sync) at" in text
    assert "test_explain.py" in text
    json.dumps(torchlazy.explain(lambda: (x + 1).exp().tolist()).to_dict())
    torchlazy.reset_metrics()
    assert torchlazy.report().cuts == ()
    assert torchlazy.report().divergences == ()


def test_numbers_that_only_the_known_trace_has():
    """Batches of a data loader: the last one is kept on its own, in a trace that makes less."""

    def batches(x: torch.Tensor) -> list[list[torch.Tensor]]:
        return [batch for batch in DataLoader(TensorDataset(x.detach(), torch.arange(3)), batch_size=2)]

    x = data("cpu", 3, 2)
    torchlazy.reset_metrics()
    for _ in range(4):
        with torchlazy.lazy_mode():
            batches(x)
    compiled = torchlazy.compile(batches)
    for _ in range(5):
        found = compiled(x)
    torch.testing.assert_close(found[1][0], x[2:])
    assert torchlazy.metrics()["failed_diagnostics"] == {}


class Unprintable:
    def __init__(self, factor: float) -> None:
        self.factor = factor

    def __repr__(self) -> str:
        raise KeyError("no text")


SETTING = Unprintable(2.0)


def test_diagnostics_that_raise_are_counted_and_the_program_goes_on(monkeypatch):
    def fails(*args: object) -> None:
        raise IndexError("tuple index out of range")

    def scaled(x: torch.Tensor) -> torch.Tensor:
        return x * SETTING.factor + (SETTING is None)

    monkeypatch.setattr("torchlazy.lazy.trace.diff._first_difference", fails)
    monkeypatch.setattr("torchlazy.lazy.run.driver.print_event", fails)
    monkeypatch.setattr(torchlazy.config, "debug", 1)
    torchlazy.reset_metrics()
    x = data("cpu", 3)
    compiled = torchlazy.compile(scaled)
    for factor in (2.0, 2.0, 3.0, 3.0):
        if factor != SETTING.factor:
            monkeypatch.setitem(globals(), "SETTING", Unprintable(factor))
        torch.testing.assert_close(compiled(x).cpu(), x * factor)
    for power in (2, 3):
        with torchlazy.lazy_mode():
            y = data("lazy", 5) ** power
        torch.testing.assert_close(y.cpu(), data("cpu", 5) ** power)
    counted = torchlazy.metrics()["failed_diagnostics"]
    assert set(counted) == {"captured again: KeyError", "debug: IndexError", "divergence: IndexError"}, counted
