"""Audited calls of a step that is a CUDA graph: what they record is run by the graph, whose memory is there already."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torchlazy
from torchlazy.lazy.api import driver

from tests.lazy.cpu_graphs import cpu_graphs
from tests.lazy.models import mean_square_step

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="the lazy device is a GPU: its graphs are no pretended ones"
)


def _train(mode: str | None, steps: int, moves: int = -1) -> tuple[list[Any], list[Any], Any]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Dropout(0.1), torch.nn.Linear(16, 3))
    model.to("lazy")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=True)

    step = mean_square_step(model, optimizer)
    run = step if mode is None else torchlazy.compile(step, mode=mode)
    torch.manual_seed(1)
    losses = []
    for number, x in enumerate(torch.randn(steps, 5, 6)):
        if number == moves:
            with torch.no_grad():
                model[3].weight.data = model[3].weight.detach() * 0.5
        losses.append(run(x.to("lazy")).cpu())
    return losses, [p.detach().cpu() for p in model.parameters()], run


@pytest.mark.parametrize("moves", [-1, 14])
def test_an_audited_call_runs_by_the_graph(moves: int, compiled: None, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = 30
    wanted = _train(None, steps, moves)[:2]
    device = cpu_graphs(monkeypatch)
    ran: list[int] = []
    by_graph = type(driver.real()).by_graph  # type: ignore[attr-defined]

    def counted(self: Any, *cut: Any) -> Any:
        values = by_graph(self, *cut)
        ran.append(values is not None)
        return values

    monkeypatch.setattr(type(driver.real()), "by_graph", counted)  # type: ignore[attr-defined]
    torchlazy.reset_metrics()
    *found, run = _train("reduce-overhead", steps, moves)
    torch.testing.assert_close(found, list(wanted), rtol=1e-4, atol=1e-5)
    assert not torchlazy.metrics()["fallbacks"] and device.captures == (1 if moves < 0 else 2)
    assert run.report().audits >= 4, run.report()
    assert sum(ran) >= 2, ran  # the audits since the capture
    assert torchlazy.metrics()["graph_replays"] + device.captures == device.replays  # a capture runs once
