"""The programs of `make demo`: every way gives eager's results, and one that does not is told."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


@pytest.mark.slow
def test_every_way_gives_eagers_results() -> None:
    command = [sys.executable, str(EXAMPLES / "workloads.py"), "--only", "network", "physics", "--turns", "1"]
    found = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert found.returncode == 0, found.stdout + found.stderr
    rows = found.stdout.splitlines()
    assert [row.split(",")[0] for row in rows[1:3]] == ["small network at batch 1", "10 steps of 100"]
    assert all(row.count("x (") == 3 for row in rows[1:3]) and rows[3].startswith("geometric mean")


def test_a_way_that_differs_is_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import torch
    import workloads

    def program(placement: object) -> workloads.Step:
        return lambda: torch.tensor(1.0 if placement.way == "eager" else 1.01)  # type: ignore[attr-defined]

    monkeypatch.setattr(workloads, "WORKLOADS", (workloads.Workload("gpt", "numbers", program, 4),))
    monkeypatch.setattr(sys, "argv", ["workloads.py", "--turns", "1"])
    assert workloads.main() == 1
    assert "results DIFFER: 1e-02" in capsys.readouterr().out
