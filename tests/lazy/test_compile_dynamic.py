"""What `dynamic=` promises: for numbers which calls share a template, for sizes which share a program."""

from __future__ import annotations

import pytest
import torch
import torchlazy

SIZES = (5, 9, 7, 17, 12, 23)  # a size that only grows would be taken for a cache's
RATES = (0.5, 0.25, 0.75, 0.125, 0.375)


def sizes(dynamic):
    before = torchlazy.config.dynamic
    weight = torch.randn(4, 3)
    placed = weight.to("lazy")
    run = torchlazy.compile(lambda x: torch.softmax(x @ placed, -1).sum(0) * 2, dynamic=dynamic, audit=False)
    torchlazy.reset_metrics()
    compiles = []
    for size in SIZES:
        x = torch.randn(size, 4)
        found = run(x.to("lazy"))
        torch.testing.assert_close(found.cpu(), torch.softmax(x @ weight, -1).sum(0) * 2, rtol=1e-4, atol=1e-5)
        compiles.append(torchlazy.metrics()["compiles"])
    for size in SIZES[::-1]:  # each has a template by now
        run(torch.randn(size, 4).to("lazy"))
    report = run.report()
    assert report.replays + report.audits == 2 * len(SIZES) - report.captures, report
    assert report.captures == len(SIZES) if dynamic is False else report.captures <= 3, report
    assert torchlazy.metrics()["compiles"] == compiles[-1]
    assert torchlazy.config.dynamic == before, "the setting of everybody else is as it was"
    return compiles


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize(("dynamic", "most"), [(True, 2), (None, 3)])
def test_sizes_share_a_program(dynamic, most):
    compiles = sizes(dynamic)
    assert compiles[-1] <= most and compiles[most] == compiles[-1]


@pytest.mark.usefixtures("compiled")
def test_sizes_have_programs_of_their_own():
    assert sizes(False) == [*range(1, len(SIZES) + 1)]


@pytest.mark.usefixtures("operator_by_operator")
@pytest.mark.parametrize(("dynamic", "captures"), [(True, 1), (None, 2), (False, len(RATES))])
def test_numbers(dynamic, captures):
    run = torchlazy.compile(lambda x, rate: x * rate + 1, dynamic=dynamic, audit=False)
    for rate in RATES:
        assert run(torch.ones(2).to("lazy"), rate).tolist() == [rate + 1] * 2
    assert run.report().captures == captures, run.report()


@pytest.mark.usefixtures("operator_by_operator")
@pytest.mark.parametrize(("dynamic", "captures"), [(True, 1), (None, 2), (False, len(RATES))])
def test_numbers_of_the_state(dynamic, captures):
    scale = {"rate": 0.5}
    run = torchlazy.compile(lambda x: x * scale["rate"] + 1, dynamic=dynamic, audit=False)
    for rate in RATES:
        scale["rate"] = rate
        assert run(torch.ones(2).to("lazy")).tolist() == [rate + 1] * 2
    if dynamic is True:  # told of arguments and learning rates only
        captures = 2
    assert run.report().captures == captures, run.report()
