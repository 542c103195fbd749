"""Cuts: each cause has its name, and the user's own line."""

from __future__ import annotations

import inspect

import numpy
import pytest
import torch
import torchlazy
from torchlazy.lazy.api import driver
from torchlazy.lazy.run.driver import CutEvent

from tests.lazy.compare import data


@pytest.fixture
def events():
    """Every cut of the test."""
    found: list[CutEvent] = []
    driver.listeners.append(found.append)
    yield found
    driver.listeners.remove(found.append)


def _pending(*shape: int) -> torch.Tensor:
    return data("lazy", *shape) * 2 + 1


CAUSES = {
    "item": ("item", lambda x: x.sum().item()),
    "bool": ("bool", lambda x: bool(x.sum() > 0)),
    "if": ("bool", lambda x: 1 if x.sum() > 0 else 2),
    "int": ("int", lambda x: int(x.sum())),
    "float": ("float", lambda x: float(x.sum())),
    "index": ("index", lambda x: [1, 2, 3][x.sum().long() * 0]),
    "print": ("print", lambda x: repr(x)),
    "str": ("print", lambda x: str(x)),
    "format": ("format", lambda x: f"{x.sum():.3f}"),
    "cpu": ("cpu", lambda x: x.cpu()),
    "to cpu": ("cpu", lambda x: x.to("cpu")),
    "copy to the host": ("copy_", lambda x: torch.zeros(3, 4).copy_(x)),
    "numpy": ("numpy", lambda x: x.numpy()),
    "array": ("numpy", lambda x: numpy.asarray(x)),
    "tolist": ("tolist", lambda x: x.tolist()),
    "data_ptr": ("data_ptr", lambda x: x.data_ptr()),
    "nonzero": ("nonzero: data-dependent shape", lambda x: x.nonzero()),
    "unique": ("_unique2: data-dependent shape", lambda x: torch.unique(x)),
    "masked_select": ("masked_select: data-dependent shape", lambda x: x.masked_select(x > 0)),
    "boolean index": ("index.Tensor: data-dependent shape", lambda x: x[x > 0]),
    "equal": ("equal: data-dependent shape", lambda x: torch.equal(x, x + 0)),
    "sync": ("sync", lambda x: torchlazy.sync()),
    "flush": ("flush", lambda x: torchlazy.flush()),
    "synchronize": ("synchronize", lambda x: torch.lazy.synchronize()),
}


@pytest.mark.parametrize("name", CAUSES)
def test_cause_and_line(name, events):
    cause, read = CAUSES[name]
    x = _pending(3, 4)
    torchlazy.reset_metrics()
    read(x)
    assert torchlazy.metrics()["cuts"] == {cause: 1}
    assert [event.cause for event in events] == [cause]
    line = inspect.getsourcelines(read)[1]
    assert events[0].frame.endswith(f"test_cuts.py:{line}")


def test_iteration_cuts_nothing_until_a_value_is_read(events):
    x = _pending(3)
    rows = list(x)
    assert events == []
    assert [float(row) for row in rows] == (data("cpu", 3) * 2 + 1).tolist()
    assert [event.cause for event in events] == ["float"]


def test_reading_twice_cuts_once(events):
    x = _pending(3)
    x.tolist()
    x.tolist()
    x.sum().item()
    assert [event.cause for event in events] == ["tolist", "item"]


def test_a_read_of_real_memory_leaves_the_trace_alone(events):
    x = data("lazy", 3)
    y = x + 1
    assert x.tolist() == data("cpu", 3).tolist()
    assert events == []
    assert y.tolist() == (data("cpu", 3) + 1).tolist()


def test_optimizer_step_flushes(events):
    w = torch.nn.Parameter(data("lazy", 3))
    optimizer = torch.optim.SGD([w], lr=0.1)
    (w * w).sum().backward()
    assert events == []
    optimizer.step()
    line = inspect.currentframe().f_lineno - 1
    assert [event.cause for event in events] == ["optimizer step"]
    assert events[0].frame.endswith(f"test_cuts.py:{line}")


def test_leaving_lazy_mode_flushes(events):
    x = torch.ones(3)
    with torchlazy.lazy_mode():
        y = x + 1
        assert events == []
    assert [event.cause for event in events] == ["leaving lazy_mode"]
    assert "test_cuts.py" in events[0].frame
    assert y.tolist() == [2, 2, 2]


def test_long_traces_are_sent_off(events):
    torchlazy.config.max_trace_length = 10
    x = data("lazy", 3)
    for _ in range(25):
        x = x + 1
    assert [event.cause for event in events] == ["trace length limit"] * 2
    torch.testing.assert_close(x.cpu(), data("cpu", 3) + 25)


def test_long_traces_of_writes_are_sent_off_too(events):
    torchlazy.config.max_trace_length = 10
    x = data("lazy", 3)
    for _ in range(25):
        x.add_(1)
    assert {event.cause for event in events} == {"trace length limit"}
    torch.testing.assert_close(x.cpu(), data("cpu", 3) + 25)


def test_an_operator_has_its_own_line_in_a_dump(tmp_path):
    with torchlazy.dump(tmp_path):
        x = data("lazy", 3)
        line = inspect.currentframe().f_lineno + 1
        y = x.exp()
        torchlazy.flush()
    text = "\n".join(p.read_text() for p in sorted(tmp_path.rglob("*")) if p.is_file() and p.suffix != ".dot")
    assert f"test_cuts.py:{line}" in text
    assert y.shape == (3,)


def test_forward_and_backward_are_one_trace(events):
    model = torch.nn.Linear(3, 2).to("lazy")
    model(data("lazy", 4, 3)).sum().backward()
    assert events == []
    torchlazy.flush()
    assert len(events) == 1
