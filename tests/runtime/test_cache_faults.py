"""Faults of the cache folder: what stands in the way, what cannot be deleted, and a clock that was set back."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torchlazy import cache as command
from torchlazy.prims.meta import TensorMeta
from torchlazy.runtime import cache_folder
from torchlazy.runtime.program import store as program_store
from torchlazy.runtime.program.program import Program
from torchlazy.runtime.program.store import ProgramStore, StoredProgram, program_key, to_text
from torchlazy.runtime.toolchains import kernel_cache, toolchain_cpp
from torchlazy.runtime.toolchains.kernel_cache import KernelCache, complaint_about, open_cache, write_atomically
from torchlazy.runtime.toolchains.toolchain import LoadedKernel, load_kernels
from torchlazy.runtime.toolchains.toolchain_cpp import has_cpp

from .tiny_sources import PRELUDES, cpp_scale

needs_cpp = pytest.mark.skipif(not has_cpp(), reason="no C++ compiler")

KERNEL, PROGRAM, TEXT = "ab" + "0" * 62, program_key("a"), "def kernel(): pass\n"
_X = TensorMeta((2,), torch.float32, (1,))
STORED = StoredProgram(Program((("x", _X),), (), (), (), ("x",), (_X,)))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A cache with a file of each kind that is read again."""
    ProgramStore(tmp_path).put(PROGRAM, STORED)
    KernelCache(tmp_path).store_binary(b"library", [KERNEL])
    KernelCache(tmp_path).source_file("numba", KERNEL, TEXT)
    return tmp_path


def entry(folder: Path) -> Path:
    return folder / "index" / KERNEL[:2] / f"{KERNEL}.json"


def library(folder: Path) -> Path:
    return next((folder / "binaries").iterdir())


def program(folder: Path) -> Path:
    return folder / "programs" / PROGRAM[:2] / f"{PROGRAM}.json"


def source(folder: Path) -> Path:
    return folder / "sources" / "numba" / f"k{KERNEL}.py"


def put_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()
    (path / "inside").write_text("mine")


def put_loop(path: Path) -> None:
    path.unlink()
    path.symlink_to(path.name)


def put_nesting(path: Path) -> None:
    rest = "[" * 100_000 + "\n{}\n"
    path.write_text(f"{hashlib.sha256(rest.encode()).hexdigest()}\n{rest}" if "programs" in path.parts else rest)


def put_file(path: Path) -> None:
    while path.name not in kernel_cache.FOLDERS:
        path = path.parent
    shutil.rmtree(path)
    path.write_text("in the way")


@pytest.mark.parametrize("put", [put_folder, put_loop, put_nesting, put_file])
@pytest.mark.parametrize("place", [entry, library, program, source])
def test_what_stands_in_the_way_is_no_error(
    folder: Path, place: Callable[[Path], Path], put: Callable[[Path], None]
) -> None:
    put(place(folder))
    found = KernelCache(folder).find_binary(KERNEL)
    assert (found is None) is (place in (entry, library))
    assert KernelCache(folder).store_binary(b"library", [KERNEL]).read_bytes() == b"library"
    assert KernelCache(folder).source_file("numba", KERNEL, TEXT).read_text() == TEXT
    assert ProgramStore(folder).get(PROGRAM) == (None if place is program else STORED)
    ProgramStore(folder).put(PROGRAM, STORED)
    assert command.main(["stats", "--folder", str(folder)]) == 0
    assert command.main(["verify", "--folder", str(folder)]) in (0, 1)
    assert command.main(["verify", "--folder", str(folder)]) == 0
    cache_folder.evict(folder, 1)
    assert command.main(["clear", "--folder", str(folder)]) == 0
    assert cache_folder.list_files(folder) == []


def test_the_folders_of_the_cache_are_named_once() -> None:
    assert sorted(kernel_cache.FOLDERS) == sorted(cache_folder.KINDS)


@pytest.mark.parametrize("name", kernel_cache.FOLDERS)
def test_a_folder_inside_that_others_may_write_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    (tmp_path / name).chmod(0o777)
    assert open_cache(tmp_path).folder != tmp_path
    assert f"its folder {name}" in str(complaint_about(tmp_path))
    (tmp_path / name).chmod(0o700)
    assert open_cache(tmp_path).folder == tmp_path


@pytest.fixture
def stuck(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The oldest file, which cannot be deleted."""
    path = library(folder)
    os.utime(path, (1000, 1000))
    unlink = Path.unlink

    def refuse(self: Path, missing_ok: bool = False) -> None:
        if self == path:
            raise PermissionError(13, "Permission denied", str(self))
        unlink(self, missing_ok)

    monkeypatch.setattr(Path, "unlink", refuse)
    return path


def test_a_file_that_cannot_be_deleted_keeps_no_other(folder: Path, stuck: Path) -> None:
    gone = cache_folder.evict(folder, 1)
    assert len(gone) == 3
    assert [file.path for file in cache_folder.list_files(folder)] == [stuck]


def test_what_the_command_cannot_delete_is_told(folder: Path, stuck: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stuck.write_bytes(b"another library")
    assert command.main(["verify", "--folder", str(folder)]) == 1
    assert f"Permission denied: '{stuck}'" in capsys.readouterr().out
    assert command.main(["clear", "--folder", str(folder)]) == 1
    assert f"not deleted: [Errno 13] Permission denied: '{stuck}'" in capsys.readouterr().err
    assert [file.path for file in cache_folder.list_files(folder)] == [stuck]


def test_what_was_used_before_the_clock_went_back_goes_first(tmp_path: Path) -> None:
    store = ProgramStore(tmp_path)
    keys = [program_key(str(number)) for number in range(6)]
    for number, key in enumerate(keys):
        store.put(key, STORED)
        if number < 4:
            path = tmp_path / "programs" / key[:2] / f"{key}.json"
            os.utime(path, (4e9 - number, 4e9 - number))  # in the year 2096
    size = path.stat().st_size
    (tmp_path / "programs" / ".tmp-left").write_text("x")
    os.utime(tmp_path / "programs" / ".tmp-left", (4e9, 4e9))
    gone = [file.path.stem for file in cache_folder.evict(tmp_path, 4 * size)]
    assert gone == [".tmp-left", *keys[3:0:-1]]
    assert [store.get(key) is not None for key in keys] == [True, False, False, False, True, True]


def test_a_program_whose_time_cannot_be_set_is_a_program(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(os, "utime", refuse)
    assert ProgramStore(folder).get(PROGRAM) == STORED
    assert KernelCache(folder).find_binary(KERNEL) is not None


def test_a_program_of_another_version_is_not_damaged(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(program_store, "_FORMAT", "torchlazy program 2")
        text = to_text(PROGRAM, STORED)
    program(folder).write_text(text)
    assert command.main(["verify", "--folder", str(folder)]) == 0
    assert "3 files checked, 0 damaged" in capsys.readouterr().out
    assert ProgramStore(folder).get(PROGRAM) is None  # nor is it used, should anybody name it
    program(folder).write_text(text.replace("model", "nodel") + " ")
    assert command.main(["verify", "--folder", str(folder)]) == 1


def test_a_folder_that_is_cleared_while_a_file_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "programs" / "ab" / "file"
    make, turns = tempfile.mkstemp, []

    def make_and_lose(**where: object) -> tuple[int, str]:
        turns.append(where)
        if len(turns) == 1:
            shutil.rmtree(tmp_path / "programs")
        handle, name = make(**where)  # type: ignore[call-overload]
        if len(turns) == 2:
            cache_folder.clear(tmp_path)
        return handle, name

    monkeypatch.setattr(tempfile, "mkstemp", make_and_lose)
    write_atomically(path, b"content")
    assert path.read_bytes() == b"content"
    assert len(turns) == 3


def test_no_folder_at_all_is_told_and_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog) -> None:
    def refuse(*args: object, **options: object) -> str:
        raise FileNotFoundError(2, "No usable temporary directory found")

    (tmp_path / "file").write_text("")
    monkeypatch.setattr(tempfile, "mkdtemp", refuse)
    opened = open_cache(tmp_path / "file" / "cache")
    assert "No usable temporary directory" in caplog.text
    assert opened.find_binary(KERNEL) is None
    ProgramStore(opened.folder).put(PROGRAM, STORED)
    assert ProgramStore(opened.folder).get(PROGRAM) is None


def test_a_full_disk_is_told_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog) -> None:
    def refuse(path: Path, content: bytes) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(program_store, "write_atomically", refuse)
    store = ProgramStore(tmp_path)
    for name in ("a", "b", "c"):
        store.put(program_key(name), STORED)
    assert caplog.text.count("is not kept") == 1


def check(kernel: LoadedKernel) -> None:
    x, out = torch.randn(7), torch.empty(7)
    assert kernel(x.data_ptr(), out.data_ptr(), 0.5, 7) == 0
    torch.testing.assert_close(out, x * 2 + 0.5)


@needs_cpp
def test_a_library_that_is_gone_at_once_is_built_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "cache"
    store = KernelCache._store

    def store_and_lose(self: KernelCache, digest: str, content: bytes, keys: object) -> Path:
        path = store(self, digest, content, keys)  # type: ignore[arg-type]
        if folder in path.parents:
            path.unlink()
        return path

    monkeypatch.setattr(KernelCache, "_store", store_and_lose)
    check(*load_kernels([cpp_scale()], cache=open_cache(folder), preludes=PRELUDES))


@needs_cpp
def test_a_folder_that_nothing_may_be_run_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "cache"
    bind, compiled = toolchain_cpp._bind, []

    def refuse(binary: kernel_cache.CachedBinary, job: toolchain_cpp.CppCompileJob) -> object:
        if folder in binary.path.parents:
            raise OSError("failed to map segment from shared object")
        return bind(binary, job)

    build = toolchain_cpp._compile
    monkeypatch.setattr(toolchain_cpp, "_bind", refuse)
    monkeypatch.setattr(
        toolchain_cpp, "_compile", lambda *given, **more: compiled.append(given) or build(*given, **more)
    )
    for _ in range(2):  # compiled, and found
        check(*load_kernels([cpp_scale()], cache=open_cache(folder), preludes=PRELUDES))
    assert len(compiled) == 1


@needs_cpp
def test_kernels_without_programs_stay_within_the_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHLAZY_CACHE_SIZE", "1")
    check(*load_kernels([cpp_scale()], cache=open_cache(tmp_path / "cache"), preludes=PRELUDES))
    assert cache_folder.list_files(tmp_path / "cache") == []
    monkeypatch.setenv("TORCHLAZY_CACHE_SIZE", "plenty")  # told where programs are kept, not with each kernel
    check(*load_kernels([cpp_scale()], cache=open_cache(tmp_path / "other"), preludes=PRELUDES))
    assert len(cache_folder.list_files(tmp_path / "other")) == 2
