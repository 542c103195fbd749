"""Where kernels are kept: folders that cannot be used or filled, and what takes their place."""

import errno
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torchlazy import cache
from torchlazy.runtime.toolchains import kernel_cache
from torchlazy.runtime.toolchains.kernel_cache import KernelCache, default_folder, open_cache
from torchlazy.runtime.toolchains.toolchain import load_kernels
from torchlazy.runtime.toolchains.toolchain_cpp import has_cpp

from .tiny_sources import PRELUDES, cpp_scale

needs_cpp = pytest.mark.skipif(not has_cpp(), reason="no C++ compiler")


def test_the_default_folder_is_a_full_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("TORCHLAZY_CACHE_DIR", "~/kernels")
    assert default_folder() == tmp_path / "kernels"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TORCHLAZY_CACHE_DIR", "here")
    assert open_cache().folder == tmp_path / "here"
    monkeypatch.delenv("TORCHLAZY_CACHE_DIR")
    assert default_folder() == tmp_path / ".cache" / "torchlazy"


def test_every_folder_is_the_users_own(tmp_path: Path) -> None:
    before = os.umask(0)  # the least private one
    try:
        opened = open_cache(tmp_path / "kernels")
        opened.store_binary(b"a library", ["0" * 64])
    finally:
        os.umask(before)
    folders = [Path(place) for place, _, _ in os.walk(tmp_path / "kernels")]
    assert len(folders) == 4
    assert {f"{folder.stat().st_mode & 0o777:o}" for folder in folders} == {"700"}


def test_one_private_folder_takes_the_place_of_a_shared_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    with caplog.at_level(logging.WARNING, "torchlazy.runtime"):
        first, second = open_cache(shared), open_cache(shared)
    assert first.folder == second.folder != shared
    assert first.folder.stat().st_mode & 0o777 == 0o700
    assert [r.message for r in caplog.records if "others may write to it (mode 0777)" in r.message] == [
        caplog.records[0].message
    ]
    assert cache.main(["stats", "--folder", str(shared)]) == 0
    assert "(not used: others may write to it (mode 0777))" in capsys.readouterr().out


@needs_cpp
def test_a_full_disk_costs_no_program_its_kernels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    full = tmp_path / "full"
    write = kernel_cache.write_atomically

    def write_elsewhere(path: Path, content: bytes) -> None:
        if full in path.parents:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(path, content)

    monkeypatch.setattr(kernel_cache, "write_atomically", write_elsewhere)
    opened = open_cache(full)
    with caplog.at_level(logging.WARNING, "torchlazy.runtime"):
        (kernel,) = load_kernels([cpp_scale(3.0)], cache=opened, preludes=PRELUDES)
    assert "it takes no more" in caplog.text and "No space left" in caplog.text
    x, out = torch.tensor([1.0, 2.0]), torch.empty(2)
    kernel(x.data_ptr(), out.data_ptr(), 0.5, 2)
    assert out.tolist() == [6.5, 12.5]
    (again,) = load_kernels([cpp_scale(3.0)], cache=opened, preludes=PRELUDES)
    assert again.function is kernel.function  # in memory from now on


def test_a_forked_child_leaves_its_parents_folder(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    text = (
        "import os, sys\n"
        "from pathlib import Path\n"
        "from torchlazy.runtime.toolchains.kernel_cache import open_cache\n"
        f"opened = open_cache({str(shared)!r})\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    sys.exit(0)\n"
        "os.waitpid(child, 0)\n"
        "print(opened.folder, opened.folder.is_dir())\n"
    )
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=600, check=True)
    folder, is_there = done.stdout.split()
    assert is_there == "True" and not Path(folder).exists()  # gone at the parent's own end


def test_an_untouched_cache_finds_nothing(tmp_path: Path) -> None:
    assert KernelCache(tmp_path / "none").find_binary("0" * 64) is None
