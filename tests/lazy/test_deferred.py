"""`import torch` imports torchlazy by itself: it must stay light until the lazy device is used."""

from __future__ import annotations

import json
import os
import subprocess
import sys

from torchlazy.lazy.deferred import HEAVY

LOADED = "import json, sys; print(json.dumps([n for n in sys.argv[1:] if n in sys.modules]))"


def loaded_after(program: str, names: tuple[str, ...], environment: dict[str, str] | None = None) -> list[str]:
    """Which of the modules a fresh interpreter holds after running `program`."""
    command = [sys.executable, "-c", f"{program}\n{LOADED}", *names]
    given = os.environ | (environment or {})
    done = subprocess.run(command, env=given, capture_output=True, text=True, check=True, timeout=600)
    return json.loads(done.stdout.splitlines()[-1])


def test_importing_torch_loads_torchlazy_without_its_heavy_parts() -> None:
    torch_alone = loaded_after("import os; os.environ['TORCH_DEVICE_BACKEND_AUTOLOAD'] = '0'; import torch", HEAVY)
    with_ours = loaded_after("import torch", ("torchlazy", *HEAVY))
    assert "torchlazy" in with_ours
    assert set(with_ours) - {"torchlazy"} <= set(torch_alone)


def test_the_first_cut_loads_them() -> None:
    after = loaded_after("import torch; (torch.ones(2, device='lazy') + 1).tolist()", ("torchlazy.lazy.driver",))
    assert after == ["torchlazy.lazy.driver"]


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
    "torchlazy.lazy.pipeline", "torchlazy.inductor.scheduler", "torchlazy.inductor.codegen.cpp", "torchlazy.prims.ops",
    "torchlazy.lazy.debug_text", "numba",
)  # fmt: skip


def test_a_first_step_loads_no_compiler() -> None:
    assert loaded_after(STEP, COMPILER) == []


def test_a_stored_program_loads_no_compiler(tmp_path) -> None:
    environment = {"TORCHLAZY_CACHE_DIR": str(tmp_path), "TORCHLAZY_STORE": "on"}
    assert set(loaded_after(STEP, COMPILER, environment | {"TORCHLAZY_TIERS": "off"})) > {"torchlazy.lazy.pipeline"}
    again = f"{STEP}\nimport torchlazy\ntorchlazy.wait_for_compile()\n{STEP}"
    again += "\nassert torchlazy.metrics()['hits'] and not torchlazy.metrics()['compiles']"
    assert loaded_after(again, COMPILER, environment | {"TORCHLAZY_TIERS": "on"}) == []


def test_importing_torchlazy_first_works() -> None:
    assert loaded_after("import torchlazy, torch; torch.ones(1, device='lazy').item()", ("torchlazy",)) == ["torchlazy"]
