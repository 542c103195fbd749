"""`import torch` imports torchlazy by itself: it must stay light until the lazy device is used."""

from __future__ import annotations

import json
import subprocess
import sys

from torchlazy.lazy.deferred import HEAVY

LOADED = "import json, sys; print(json.dumps([n for n in sys.argv[1:] if n in sys.modules]))"


def loaded_after(program: str, names: tuple[str, ...]) -> list[str]:
    """Which of the modules a fresh interpreter holds after running `program`."""
    done = subprocess.run(
        [sys.executable, "-c", f"{program}\n{LOADED}", *names], capture_output=True, text=True, check=True, timeout=120
    )
    return json.loads(done.stdout.splitlines()[-1])


def test_importing_torch_loads_torchlazy_without_its_heavy_parts() -> None:
    torch_alone = loaded_after("import os; os.environ['TORCH_DEVICE_BACKEND_AUTOLOAD'] = '0'; import torch", HEAVY)
    with_ours = loaded_after("import torch", ("torchlazy", *HEAVY))
    assert "torchlazy" in with_ours
    assert set(with_ours) - {"torchlazy"} <= set(torch_alone)


def test_the_first_cut_loads_them() -> None:
    after = loaded_after("import torch; (torch.ones(2, device='lazy') + 1).tolist()", ("torchlazy.lazy.driver",))
    assert after == ["torchlazy.lazy.driver"]


def test_importing_torchlazy_first_works() -> None:
    assert loaded_after("import torchlazy, torch; torch.ones(1, device='lazy').item()", ("torchlazy",)) == ["torchlazy"]
