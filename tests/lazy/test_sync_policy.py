"""Syncs and flushes: every cause of a cut is in one table, `no_sync` raises at a sync, `sync_budget` counts them."""

from __future__ import annotations

import ast
import inspect
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torchlazy
from torchlazy.lazy.api import recorder
from torchlazy.lazy.device import mode
from torchlazy.lazy.ops.handlers import CHANGES_THE_TENSOR
from torchlazy.lazy.run.sync_policy import is_named, kind_of

from tests.lazy.compare import data

LAZY = Path(mode.__file__).parents[1]
# Functions that hand a cause on: (name, which argument it is).
TAKES_CAUSE = {"cut": 0, "real": 1, "hand_out": 1}
TAKES_CAUSE_IN_TENSOR = {"_real": 0, "_host": 0, "_shared": 0, "_read_as": 0}
TAKES_REASON = {"NeedsMemory": 0, "CannotInfer": 0, "run_eagerly": -1}
# What stands for the expressions inside an f-string.
SAMPLES = {
    "device": "cuda:0",
    "kind.__name__": "Foo",
    "kind_of(value)": "torch.sparse_coo",
    "kind_of(tensor)": "nested",
    "tensor.device": "meta",
    "getattr(item, 'device', type(item))": "cpu",
    "type(value).__name__": "str",
    "type(error).__name__": "RuntimeError",
    "error": "some text",
    "op": "aten.add.Tensor",
}
# Variables that hold a cause or reason which another call of this list has given.
PASSED_ON = {
    "cause",
    "reason",
    "str(why)",
    "recorder.reading_as or 'item'",
    "_READERS[func]",
    "self.purpose",
    "END",
    "name",
}
OPERATOR_NAME = "func.name().removeprefix('aten::')"


def texts_of(node: ast.expr) -> Iterator[str]:
    """The texts that an argument may be; an expression as "<source>"."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    elif isinstance(node, ast.IfExp):
        yield from (*texts_of(node.body), *texts_of(node.orelse))
    elif isinstance(node, ast.JoinedStr):
        parts = []
        for part in node.values:
            if isinstance(part, ast.Constant):
                parts.append(str(part.value))
            else:
                assert isinstance(part, ast.FormattedValue)
                parts.append(SAMPLES[ast.unparse(part.value)])
        yield "".join(parts)
    else:
        yield f"<{ast.unparse(node)}>"


def causes_in(path: Path) -> Iterator[tuple[int, str]]:
    """(line, cause) for every cause or reason in a file, a reason as the cause that it becomes."""
    takes_cause = TAKES_CAUSE | (TAKES_CAUSE_IN_TENSOR if path.name == "tensor.py" else {})
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.Call) or not node.args:
            continue
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if name == "build" and isinstance(node.args[0], ast.Constant) and node.args[0].value in ("eager", "composite"):
            for text in texts_of(node.args[-1]):
                yield node.lineno, f"op: {text}"
        elif name in takes_cause and isinstance(node.func, ast.Attribute) and len(node.args) == takes_cause[name] + 1:
            yield from ((node.lineno, text) for text in texts_of(node.args[takes_cause[name]]))
        elif name in TAKES_REASON:
            for text in texts_of(node.args[TAKES_REASON[name]]):
                yield node.lineno, text if text.startswith("<") else f"op: {text}"


def test_every_cause_in_the_code_base_is_in_the_table():
    found = 0
    missing = []
    for path in sorted(LAZY.rglob("*.py")):
        for line, cause in causes_in(path):
            if cause.startswith("<"):
                expression = cause[1:-1].replace('"', "'")
                known = expression in PASSED_ON or expression == OPERATOR_NAME
            else:
                known = is_named(cause)
                found += 1
            if not known:
                missing.append(f"{path.name}:{line}: {cause}")
    assert not missing, "causes that lazy/run/sync_policy.py does not name:\n" + "\n".join(missing)
    assert found > 40


def test_calls_on_ordinary_tensors_are_in_the_table():
    names = [*mode._READERS.values(), *(op.name().removeprefix("aten::") for op in CHANGES_THE_TENSOR)]
    assert [name for name in names if not is_named(name)] == []


SYNCS = {
    "item": lambda x: x.sum().item(),
    "bool": lambda x: bool(x.sum() > 0),
    "int": lambda x: int(x.sum()),
    "float": lambda x: float(x.sum()),
    "index": lambda x: [1, 2, 3][x.sum().long() * 0],
    "print": lambda x: repr(x),
    "format": lambda x: f"{x.sum():.3f}",
    "cpu": lambda x: x.cpu(),
    "copy_": lambda x: torch.zeros(3, 4).copy_(x),
    "numpy": lambda x: x.numpy(),
    "tolist": lambda x: x.tolist(),
    "nonzero: data-dependent shape": lambda x: x.nonzero(),
    "index.Tensor: data-dependent shape": lambda x: x[x > 0],
    "equal: data-dependent shape": lambda x: torch.equal(x, x + 0),
    "sync": lambda x: torchlazy.sync(),
}
# As the native recorder names it: it sees the operator below the method.
NATIVE_NAMES = {
    **dict.fromkeys(("bool", "int", "float", "index", "format"), "item"),
    "copy_": "copy_: its result is not on the lazy device",
}
FLUSHES = {
    "flush": lambda x: torchlazy.flush(),
    "data_ptr": lambda x: x.data_ptr(),
    "extern": lambda x: torch.unique_consecutive if False else x.exp().sort(),
}


def pending() -> torch.Tensor:
    return data("lazy", 3, 4) * 2 + 1


def named(cause: str) -> str:
    return NATIVE_NAMES.get(cause, cause) if torchlazy.config.native_device == "on" else cause


@pytest.mark.parametrize("cause", SYNCS)
def test_no_sync_raises_at_the_users_line_and_nothing_has_happened(cause):
    read = SYNCS[cause]
    x = pending()
    torchlazy.reset_metrics()
    with pytest.raises(torchlazy.SyncError) as raised, torchlazy.no_sync():
        read(x)
    line = inspect.getsourcelines(read)[1]
    assert f"test_sync_policy.py:{line} needs a value on the host ({named(cause)})" in str(raised.value)
    assert torchlazy.metrics()["cuts"] == {}
    assert kind_of(cause) == kind_of(named(cause)) == "sync"
    read(x)  # outside the block it is allowed, and the value is right
    torch.testing.assert_close(x.cpu(), data("cpu", 3, 4) * 2 + 1)


@pytest.mark.parametrize("cause", FLUSHES)
def test_no_sync_lets_flushes_pass(cause):
    x = pending()
    with torchlazy.no_sync():
        FLUSHES[cause](x)
    torch.testing.assert_close(x.cpu(), data("cpu", 3, 4) * 2 + 1)


def test_a_training_step_without_a_read_passes_and_the_printed_loss_does_not():
    model = torch.nn.Linear(3, 2).to("lazy")
    optimizer = torch.optim.AdamW(model.parameters())
    x = data("lazy", 4, 3)

    @torchlazy.no_sync()
    def step(read: bool) -> torch.Tensor:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if read:
            loss.item()
        return loss

    for _ in range(3):
        step(False)
    with pytest.raises(torchlazy.SyncError, match="item"):
        step(True)
    assert step(False).item() > 0


def test_a_read_of_a_value_that_is_there_is_a_sync_too():
    x = pending()
    torchlazy.flush()
    with pytest.raises(torchlazy.SyncError, match="tolist"), torchlazy.no_sync():
        x.tolist()


def test_an_operator_with_several_tensors_is_one_sync():
    x = pending()
    mask = x > 0
    torchlazy.flush()
    with torchlazy.sync_budget(5) as budget:
        x[mask]
    assert [sync.cause for sync in budget.syncs] == ["index.Tensor: data-dependent shape"]


def test_budget_counts_and_names_each():
    x = pending()
    with pytest.warns(torchlazy.SyncBudgetWarning) as warned, torchlazy.sync_budget(2) as budget:
        for _ in range(3):
            bool((x + 1).sum() > 0)
        line = inspect.currentframe().f_lineno - 1
        x.tolist()
    text = str(warned[0].message)
    assert "4 syncs inside torchlazy.sync_budget(2)" in text
    assert f"3 x {named('bool')} at tests/lazy/test_sync_policy.py:{line}" in text.replace("\\", "/")
    assert f"1 x tolist at tests/lazy/test_sync_policy.py:{line + 2}" in text.replace("\\", "/")
    assert [sync.cause for sync in budget.syncs] == [*[named("bool")] * 3, "tolist"]
    assert warned[0].filename == __file__


def test_a_budget_that_is_kept_is_silent_and_a_decorated_function_has_one_a_call():
    x = pending()

    @torchlazy.sync_budget(1)
    def read() -> float:
        return (x + 1).sum().item()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert read() == read()
    with pytest.raises(ValueError, match="-1"):
        torchlazy.sync_budget(-1)


def test_windows_stand_inside_each_other_and_are_closed_by_exceptions():
    x = pending()
    with torchlazy.sync_budget(9) as outer:
        with pytest.raises(KeyError), torchlazy.sync_budget(9) as inner:
            x.tolist()
            raise KeyError
        with pytest.raises(torchlazy.SyncError), torchlazy.no_sync():
            x.tolist()
        x.tolist()
    assert len(inner.syncs) == 1
    assert len(outer.syncs) == 2  # the refused read never happened
    assert recorder.gate is None
    window = torchlazy.no_sync()
    with window, pytest.raises(RuntimeError, match="open already"), window:
        pass


def test_other_threads_may_read():
    x = pending()
    found: list[object] = []

    def read() -> None:
        try:
            found.append(x.tolist())
        except Exception as error:
            found.append(error)

    with torchlazy.no_sync():
        thread = threading.Thread(target=read)
        thread.start()
        thread.join()
    assert found == [(data("cpu", 3, 4) * 2 + 1).tolist()]


@pytest.mark.usefixtures("recorded_in_python")
def test_lazy_mode_reads_are_syncs():
    x = torch.ones(3)
    with pytest.raises(torchlazy.SyncError, match="tolist"), torchlazy.lazy_mode(), torchlazy.no_sync():
        y = x + 1
        y.tolist()
    with torchlazy.lazy_mode():
        y = x + 1
        with pytest.raises(torchlazy.SyncError, match="numpy"), torchlazy.no_sync():
            x.numpy()  # ordinary memory, but work is pending that may write to it
    assert y.tolist() == [2, 2, 2]


def test_a_compiled_callable_reads_at_its_own_line():
    model = torch.nn.Linear(3, 2).to("lazy")

    @torchlazy.compile
    def step(x: torch.Tensor) -> float:
        return model(x).sum().item()

    x = data("lazy", 4, 3)
    wanted = [step(x) for _ in range(4)][-1]
    with pytest.raises(torchlazy.SyncError, match="item") as raised, torchlazy.no_sync():
        step(x)
    assert "test_sync_policy.py" in str(raised.value)
    with torchlazy.sync_budget(9) as budget:
        assert step(x) == pytest.approx(wanted)
    assert [sync.cause for sync in budget.syncs] == ["item"]
