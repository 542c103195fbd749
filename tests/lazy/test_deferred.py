"""`import torch` imports torchlazy by itself: it must stay light until the lazy device is used."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from torchlazy.lazy.deferred import HEAVY

LOADED = "import json, sys; print(json.dumps([n for n in sys.argv[1:] if n in sys.modules]))"


def loaded_after(program: str, names: tuple[str, ...], environment: dict[str, str] | None = None) -> list[str]:
    """Which of the modules a fresh interpreter holds after running `program`."""
    command = [sys.executable, "-c", f"{program}\n{LOADED}", *names]
    given = os.environ | (environment or {})
    done = subprocess.run(command, env=given, capture_output=True, text=True, check=True, timeout=600)
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module", params=["off", "on"])
def stages(request: pytest.FixtureRequest) -> list[set[str]]:
    """Which modules one process holds after it imported torch, after a first step, and after a first cut."""
    environment = os.environ | {"TORCHLAZY_NATIVE_DEVICE": request.param}
    names = ("torchlazy", *HEAVY, *COMPILER, "torchlazy.lazy.run.driver")
    cut = "(torch.ones(2, device='lazy') + 1).tolist()"
    program = "\n".join(("import torch", LOADED, STEP, LOADED, cut, LOADED))
    done = subprocess.run(
        [sys.executable, "-c", program, *names], capture_output=True, text=True, timeout=600, env=environment
    )
    return [set(json.loads(line)) for line in done.stdout.splitlines()[-3:]]


def test_importing_torch_loads_torchlazy_without_its_heavy_parts(stages: list[set[str]]) -> None:
    torch_alone = loaded_after("import os; os.environ['TORCH_DEVICE_BACKEND_AUTOLOAD'] = '0'; import torch", HEAVY)
    assert "torchlazy" in stages[0]
    assert stages[0] & set(HEAVY) <= set(torch_alone)


@pytest.mark.parametrize("stages", ["off"], indirect=True)  # a first native one runs at once
def test_the_first_cut_loads_them(stages: list[set[str]]) -> None:
    assert "torchlazy.lazy.run.driver" in stages[2]


STEP = """
import torch
layer = torch.nn.Linear(4, 4).to("lazy")
optimizer = torch.optim.AdamW(layer.parameters())
for _ in range(1):
    torch.nn.functional.gelu(layer(torch.ones(2, 4, device="lazy"))).sum().backward()
    optimizer.step()
"""
# Triton and SymPy are not among them: torch's own optimizers import them.
COMPILER = (
    "torchlazy.lazy.plan.pipeline", "torchlazy.inductor.scheduler", "torchlazy.inductor.codegen.cpp",
    "torchlazy.prims.ops", "torchlazy.lazy.run.text", "numba",
)  # fmt: skip


def test_a_first_step_loads_no_compiler(stages: list[set[str]]) -> None:
    assert not stages[1] & set(COMPILER)


SAME_PACKAGE = """
import torchlazy
from torchlazy.runtime.toolchains import target_facts
target_facts.package_fingerprint = lambda: "the test's"  # files may be edited while the test runs
"""


def test_a_stored_program_loads_no_compiler(tmp_path) -> None:
    environment = {"TORCHLAZY_CACHE_DIR": str(tmp_path), "TORCHLAZY_STORE": "on", "TORCHLAZY_NATIVE": "off"}
    first = SAME_PACKAGE + STEP
    assert set(loaded_after(first, COMPILER, environment | {"TORCHLAZY_TIERS": "off"})) > {
        "torchlazy.lazy.plan.pipeline"
    }
    again = f"{first}\nimport torchlazy\ntorchlazy.wait_for_compile()\n{STEP}"
    again += "\nassert torchlazy.metrics()['hits'] and not torchlazy.metrics()['compiles']"
    assert loaded_after(again, COMPILER, environment | {"TORCHLAZY_TIERS": "on"}) == []


def test_importing_torchlazy_first_works() -> None:
    assert loaded_after("import torchlazy, torch; torch.ones(1, device='lazy').item()", ("torchlazy",)) == ["torchlazy"]
