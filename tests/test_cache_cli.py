"""`python -m torchlazy.cache`: counts, deletes and checks the cache folder, and nothing else."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torchlazy import cache
from torchlazy.prims.meta import TensorMeta
from torchlazy.runtime.native import identity_check, recorder_library
from torchlazy.runtime.native.code import NativeCode
from torchlazy.runtime.program.program import Program
from torchlazy.runtime.program.store import ProgramStore, StoredProgram, program_key
from torchlazy.runtime.toolchains.kernel_cache import KernelCache


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of two programs, and one library that two kernels are in."""
    monkeypatch.setenv("TORCHLAZY_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("TORCHLAZY_CACHE_SIZE", raising=False)
    x = TensorMeta((2,), torch.float32, (1,))
    program = Program((("x", x),), (), (), (), ("x",), (x,))
    for name in ("a", "b"):
        ProgramStore(tmp_path).put(program_key(name), StoredProgram(program))
    KernelCache(tmp_path).store_binary(b"library", ["0" * 64, "1" * 64])
    return tmp_path


def files(folder: Path) -> int:
    return sum(path.is_file() for path in folder.rglob("*"))


def test_stats(folder, capsys):
    assert cache.main(["stats"]) == 0
    lines = {line.split()[0]: line.split()[1] for line in capsys.readouterr().out.splitlines()}
    assert lines["folder"] == str(folder)
    assert (lines["programs"], lines["index"], lines["binaries"], lines["total"]) == ("2", "2", "1", "5")


def test_a_folder_that_is_not_there_is_an_empty_cache(tmp_path, capsys):
    assert cache.main(["stats", "--folder", str(tmp_path / "none")]) == 0
    assert "not there yet" in capsys.readouterr().out
    assert cache.main(["verify", "--folder", str(tmp_path / "none")]) == 0
    assert cache.main(["clear", "--folder", str(tmp_path / "none")]) == 0
    assert not (tmp_path / "none").exists()


def test_clear_leaves_other_files(folder, capsys):
    (folder / "notes.txt").write_text("mine")
    assert cache.main(["clear"]) == 0
    assert "deleted 5 files" in capsys.readouterr().out
    assert [path.name for path in folder.iterdir()] == ["notes.txt"]


def test_verify_finds_nothing_in_a_sound_cache(folder, capsys):
    assert cache.main(["verify"]) == 0
    assert "5 files checked, 0 damaged" in capsys.readouterr().out
    assert files(folder) == 5


def test_verify_deletes_what_is_damaged(folder, capsys):
    (library,) = (folder / "binaries").iterdir()
    library.write_bytes(b"another library")
    program = next((folder / "programs").rglob("*.json"))
    program.write_text(program.read_text()[:50])
    assert cache.main(["verify"]) == 1
    out = capsys.readouterr().out
    assert "another hash than its name" in out
    assert "its library" in out
    assert "4 damaged" in out
    assert files(folder) == 1
    assert cache.main(["verify"]) == 0


def test_verify_deletes_an_entry_that_lies_under_another_name(folder, capsys):
    one, other = sorted((folder / "index").rglob("*.json"))
    other.write_text(one.read_text())
    assert cache.main(["verify"]) == 1
    assert "another kernel's entry" in capsys.readouterr().out
    assert not other.exists()
    assert cache.main(["verify"]) == 0


def test_clear_errors(folder, capsys, monkeypatch):
    file = folder / "file"
    file.write_text("")
    assert cache.main(["stats", "--folder", str(file)]) == 2
    assert "is no folder" in capsys.readouterr().err
    monkeypatch.setenv("TORCHLAZY_CACHE_SIZE", "plenty")
    assert cache.main(["clear"]) == 2
    assert "'plenty'" in capsys.readouterr().err
    assert files(folder) == 6
    with pytest.raises(SystemExit):
        cache.main(["polish"])


def test_as_a_command(folder):
    done = subprocess.run(
        [sys.executable, "-m", "torchlazy.cache", "stats"], env=os.environ, capture_output=True, text=True, check=True
    )
    assert "programs      2 files" in done.stdout


def test_prepared_the_first_lazy_tensor_is_recorded_natively(tmp_path, monkeypatch):
    if recorder_library.LIBRARY.wait() is None:
        pytest.skip("no C++ compiler")
    shutil.copy(recorder_library.find_or_compile(), tmp_path)
    monkeypatch.setenv("TORCHLAZY_CACHE_DIR", str(tmp_path))
    command = [sys.executable, "-m", "torchlazy.cache", "prepare"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=True)
    recorder, *others = done.stdout.splitlines()
    assert recorder == "native_recorder: kept already"
    assert [line.split(" in ")[0] for line in others] == ["identity_check: compiled", "native_launch: compiled"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=True)
    assert [line.split(": ")[1] for line in done.stdout.splitlines()] == ["kept already"] * 3
    first = "import torch; print(type(torch.ones(2, device='lazy')).__name__)"
    done = subprocess.run([sys.executable, "-c", first], capture_output=True, text=True, timeout=600, check=True)
    assert done.stdout == "Tensor\n"


def test_without_a_compiler_prepare_says_why(folder, capsys, monkeypatch):
    monkeypatch.setattr(recorder_library.LIBRARY, "module", None)
    monkeypatch.setattr(recorder_library.LIBRARY, "_thread", None)
    monkeypatch.setattr(recorder_library.LIBRARY, "reason", "RuntimeError: no C++ compiler")
    monkeypatch.setattr(identity_check, "CODE", NativeCode("other", lambda: "no C++", (), "it is done in Python"))
    assert cache.main(["prepare"]) == 1
    assert capsys.readouterr().err.splitlines() == [
        "native_recorder: RuntimeError: no C++ compiler",
        "other: not compiled: it is done in Python",
    ]
