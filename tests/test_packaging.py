"""What a user installs: the wheel holds the packages and their data, and nothing of tests, examples or benchmarks."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from torchlazy.runtime.native import recorder_library

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("lazy", "autograd", "prims", "inductor", "runtime")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """The wheel of a copy of the tree: building in place would leave `build/` behind."""
    folder = tmp_path_factory.mktemp("wheel")
    copy = folder / "source"
    skipped = shutil.ignore_patterns(".*", "__pycache__", "build", "dist", "*.egg-info", "torchlazy")
    shutil.copytree(ROOT, copy, ignore=skipped)
    command = [sys.executable, "-m", "pip", "wheel", "--no-build-isolation", "--no-deps", "--no-index", "--quiet"]
    done = subprocess.run(
        [*command, "--wheel-dir", str(folder), str(copy)], capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = folder.glob("*.whl")
    return zipfile.ZipFile(path)


def test_every_product_file_is_in_the_wheel(wheel: zipfile.ZipFile):
    names = set(wheel.namelist())
    expected = {"torchlazy/__init__.py", "torchlazy/py.typed"}
    for package in PACKAGES:
        for pattern in ("*.py", "*.h"):
            for path in (ROOT / package).rglob(pattern):
                expected.add("torchlazy/" + path.relative_to(ROOT).as_posix())
    assert expected - names == set()


def test_every_package_of_the_project_file_has_files():
    named = re.findall(r'^    "torchlazy\.([\w.]+)",$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert len(named) > 20
    assert [name for name in named if not (ROOT / name.replace(".", "/") / "__init__.py").exists()] == []


def test_nothing_else_is_in_the_wheel(wheel: zipfile.ZipFile):
    folders = {name.split("/")[1] for name in wheel.namelist() if name.startswith("torchlazy/") and name.count("/") > 1}
    assert folders == set(PACKAGES)
    tops = {name.split("/")[0] for name in wheel.namelist()}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"torchlazy"}


def test_the_wheel_registers_the_device_and_carries_its_licence(wheel: zipfile.ZipFile):
    (points,) = [name for name in wheel.namelist() if name.endswith("entry_points.txt")]
    assert "[torch.backends]\ntorchlazy = torchlazy:_autoload" in wheel.read(points).decode()
    bridge = "[torch_dynamo_backends]\ntorchlazy = torchlazy.lazy.dynamo.backend:torchlazy_backend"
    assert bridge in wheel.read(points).decode()
    assert any(name.endswith("/LICENSE") for name in wheel.namelist())


def test_a_wheel_of_make_brings_the_native_recorder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    if shutil.which("make") is None or recorder_library.LIBRARY.wait() is None:
        pytest.skip("no make, or no C++ compiler")

    def output(*command: str, folder: Path = tmp_path) -> str:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=600, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    python, place = Path(sys.executable), tmp_path / "installed"
    settings = [f"BIN={python.parent}", f"WHEELS={tmp_path}"]
    output("make", "--old-file", ".venv/.installed", "wheel", *settings, folder=ROOT)
    (path,) = tmp_path.glob("*.whl")
    tag = f"cp{sys.version_info.major}{sys.version_info.minor}"
    assert path.name.split("-")[2] == tag and path.name.split("-")[4] != "any.whl"
    assert "torchlazy/setup.py" not in zipfile.ZipFile(path).namelist()
    output(str(python), "-m", "pip", "install", "--no-deps", "--no-index", "--quiet", "--target", str(place), str(path))

    monkeypatch.setenv("TORCHLAZY_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("PYTHONPATH", str(place))
    code = "import torch; from torchlazy.runtime.native.recorder_library import LIBRARY; "
    code += "print(type(torch.ones(2, device='lazy')).__name__, LIBRARY.module.__file__)"
    kind, library = output(str(python), "-c", code).split()
    assert kind == "Tensor" and Path(library).parent == place / "torchlazy/runtime/native/prebuilt"
    assert not list((tmp_path / "cache").glob("recorder-*"))


def test_importing_torch_alone_registers_the_device():
    code = "import sys, torch; assert 'torchlazy' in sys.modules; print(torch.ones(2, device='lazy').sum().item())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "2.0"
