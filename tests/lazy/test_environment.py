"""What users set from outside: TORCHLAZY_DUMP, TORCHLAZY_DEBUG, TORCHLAZY_CPU_BACKEND, TORCHLAZY_TARGET."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torchlazy

PROGRAM = """
import torch, torchlazy
x = torch.arange(6.0, device="lazy").view(2, 3)
print(((x @ x.t()).relu() + 1).softmax(1).sum(0).tolist())
print("languages", torchlazy.metrics()["kernels"] > 0)
"""


def run(program: str = PROGRAM, **environment: str) -> subprocess.CompletedProcess[str]:
    """A fresh interpreter that compiles at first sight, with these variables."""
    given = {**os.environ, "TORCHLAZY_TIERS": "off", "TORCHLAZY_STRICT": "1", "TORCHLAZY_STORE": "off", **environment}
    return subprocess.run([sys.executable, "-c", program], env=given, capture_output=True, text=True, timeout=600)


def expected() -> list[float]:
    x = torch.arange(6.0).view(2, 3)
    return ((x @ x.t()).relu() + 1).softmax(1).sum(0).tolist()


def numbers(text: str) -> torch.Tensor:
    line = next(line for line in text.splitlines() if line.startswith("["))
    return torch.tensor([float(part) for part in line.strip("[]").split(",")])


@pytest.mark.parametrize("backend", ["cpp", "numba"])
def test_each_cpu_back_end_runs_the_whole_way(backend: str, tmp_path: Path) -> None:
    done = run(TORCHLAZY_CPU_BACKEND=backend, TORCHLAZY_DUMP=str(tmp_path))
    assert done.returncode == 0, done.stderr
    torch.testing.assert_close(numbers(done.stdout), torch.tensor(expected()))
    suffix = {"cpp": ".cpp", "numba": ".py"}[backend]
    assert any(path.name.startswith("000_kernel") and path.suffix == suffix for path in tmp_path.rglob("*"))


def test_dump_writes_every_form_of_each_cut(tmp_path: Path) -> None:
    done = run(TORCHLAZY_DUMP=str(tmp_path))
    assert done.returncode == 0, done.stderr
    (folder,) = [path for path in tmp_path.iterdir() if "tolist" in path.name]
    names = {path.name for path in folder.iterdir()}
    assert {"00_cut.txt", "01_trace.txt", "02_aten.py", "03_prims.py", "04_loop_ir.txt", "05_fusion.txt"} <= names
    assert {"06_kernels", "07_program.txt", "08_memory.txt", "graph.dot"} <= names
    assert "aten.mm.default" in (folder / "01_trace.txt").read_text()
    assert "<string>:4" in (folder / "00_cut.txt").read_text()


LEVELS = """
import sys, torch, torchlazy
from torchlazy.lazy.api import driver
print(torchlazy.config.debug)
x = torch.arange(6.0, device="lazy").view(2, 3)
for level in range(6):
    torchlazy.config.debug = level
    driver.forget()  # planned anew; its kernel is there
    print("level", level, file=sys.stderr, flush=True)
    ((x @ x.t()).relu() + 1).softmax(1).sum(0).tolist()
"""


def test_debug_levels_print_more_and_more() -> None:
    done = run(LEVELS, TORCHLAZY_DEBUG="3")
    assert done.returncode == 0 and done.stdout.split() == ["3"], done.stderr
    told = [part.partition("\n")[2] for part in done.stderr.split("level ")[1:]]
    for level, text in enumerate(told):
        assert ("torchlazy: cut" in text) == (level > 0)
        assert ("prelude:" in text) == (level in (4, 5))
    lengths = list(map(len, told))
    assert lengths == sorted(lengths) and len(set(lengths)) == len(lengths) == 6


def test_target_from_outside_and_bad_targets() -> None:
    assert run(TORCHLAZY_TARGET="cpu").returncode == 0
    for wrong, error in (("warp", ValueError), ("meta", ValueError)):
        with pytest.raises(error, match="target"):
            torchlazy.set_target(wrong)
    if not torch.cuda.is_available():
        with pytest.raises(RuntimeError, match="no CUDA device"):
            torchlazy.set_target("cuda:1")
    torchlazy.set_target("cpu")
    assert (torch.ones(2, device="lazy") + 1).tolist() == [2, 2]


def test_without_docstrings_and_assertions() -> None:
    """`python -OO` takes both away: nothing may depend on them."""
    given = {**os.environ, "TORCHLAZY_TIERS": "off", "TORCHLAZY_STRICT": "1", "TORCHLAZY_STORE": "off"}
    done = subprocess.run(
        [sys.executable, "-OO", "-c", PROGRAM], env=given, capture_output=True, text=True, timeout=600
    )
    assert "languages True" in done.stdout, done.stderr


def test_without_a_compiler_numba_serves_and_it_is_told_once(tmp_path: Path) -> None:
    pytest.importorskip("numba")
    (tmp_path / "bin").mkdir()
    done = run(PROGRAM * 2, PATH=str(tmp_path / "bin"), CXX="", TORCHLAZY_CACHE_DIR=str(tmp_path / "cache"))
    assert "languages True" in done.stdout, done.stderr
    assert done.stderr.count("no C++ compiler is here, so CPU kernels are compiled by Numba") == 1
