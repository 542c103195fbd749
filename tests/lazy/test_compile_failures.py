"""Compiled calls whose replay fails midway: what ran before the failing program stands, the rest is as before."""

from __future__ import annotations

import pytest
import torch
import torchlazy

from tests.lazy.models import mean_square_step

pytestmark = pytest.mark.usefixtures("operator_by_operator")
GOOD, BAD = [0, 1], [0, 99]


def _tensors(device: str, positions: list[int]) -> torch.Tensor:
    return torch.tensor(positions).to(device)


@pytest.mark.parametrize("device", ["lazy", "cpu"])
@pytest.mark.parametrize("failing", [0, 1, 2])
@pytest.mark.parametrize("audit", [False, True])
def test_a_program_fails_at_each_position(device, failing, audit):
    """Three programs (a value is asked for between them), each with a lookup that may be out of range."""

    def play(compiled: bool):
        state = [torch.zeros(3).to(device) for _ in range(3)]
        steps = [torch.zeros(()) for _ in range(3)]  # ordinary single numbers, such as an optimizer's step counts
        kept = {"last": torch.zeros(()).to(device), "calls": 0}
        table = torch.arange(12.0).reshape(4, 3).to(device)

        def call(a, b, c):
            total = 0.0
            for number, (mine, index) in enumerate(zip(state, (a, b, c), strict=True)):
                found = torch.nn.functional.embedding(index, table).sum(0)
                steps[number].add_(1)
                mine.add_(found * steps[number].item())
                total += found.sum().item()
            kept["last"] = found.mean()
            kept["calls"] += 1
            return total

        run = torchlazy.compile(call, audit=audit) if compiled else call
        seen = []
        for turn in range(10):
            fails = turn in (5, 8)
            for count in steps:
                count.fill_(float(turn))
            positions = [BAD if fails and number == failing else GOOD for number in range(3)]
            try:
                seen.append(run(*(_tensors(device, p) for p in positions)))
            except (IndexError, RuntimeError) as error:
                assert "index" in str(error) or "range" in str(error), error
                seen.append("out of range")
            assert (seen[-1] == "out of range") is fails
            seen.append([s.tolist() for s in state])
            seen.append((kept["last"].item(), kept["calls"]))
            now = [count.item() for count in steps]
            assert now[:failing] == [turn + 1] * failing, "programs before the failing one stand"
            assert all(count in ((turn, turn + 1) if fails else (turn + 1,)) for count in now)
            if fails and compiled and not audit:
                assert now[failing:] == [turn] * (3 - failing), "the failing part's counts are as before"
        return seen, run

    wanted, _ = play(False)
    found, run = play(True)
    assert found == wanted
    assert run.report().replays >= (4 if not audit else 1), run.report()


@pytest.mark.parametrize("device", ["lazy", "cpu"])
def test_a_failing_step_leaves_the_optimizer_as_it_was(device):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Embedding(5, 4), torch.nn.Linear(4, 2)).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)

    step = mean_square_step(model, optimizer)

    run = torchlazy.compile(step, audit=False)
    for _ in range(4):
        run(_tensors(device, GOOD))
    before = [p.detach().cpu().clone() for p in model.parameters()]
    state = [value.detach().cpu().clone() for entry in optimizer.state.values() for value in entry.values()]
    replays = run.report().replays
    with pytest.raises((IndexError, RuntimeError), match=r"index|range"):
        run(_tensors(device, BAD))
    assert all(torch.equal(a, b.detach().cpu()) for a, b in zip(before, model.parameters(), strict=True))
    now = [value.detach().cpu() for entry in optimizer.state.values() for value in entry.values()]
    assert all(map(torch.equal, state, now)), "step counts and moments are as before the failing call"
    run(_tensors(device, GOOD))
    assert run.report().replays > replays


@pytest.mark.usefixtures("device_in_python")  # draws as in compiled calls
def test_a_check_midway_leaves_everything_as_it_was():
    """A value read after the first program differs: the replay is given up, and the call runs as it should, once."""

    def play(compiled: bool):
        count, state = torch.zeros(()), torch.zeros(2).to("lazy")
        kept: dict[str, torch.Tensor] = {"last": torch.zeros(2).to("lazy")}

        def call(x):
            count.add_(1)
            noisy = x + torch.rand(2).to("lazy")
            if noisy.sum() > 3:
                noisy = noisy * count.item()
            state.add_(noisy)
            kept["last"] = noisy * 2
            return noisy

        run = torchlazy.compile(call, audit=False) if compiled else call
        torch.manual_seed(0)
        seen = []
        for turn in range(14):
            x = torch.full((2,), float(turn % 3)).to("lazy")
            seen += [run(x).cpu(), state.cpu().clone(), count.clone(), kept["last"].cpu()]
        return torch.cat([s.reshape(-1) for s in seen]), run

    wanted, _ = play(False)
    found, run = play(True)
    torch.testing.assert_close(found, wanted)
    report = run.report()
    assert report.variants >= 2 and report.replays >= 5, report
