"""Toolchains and the kernel cache: memory, disk, several processes, damage, and sources that do not compile."""

from __future__ import annotations

import logging
import multiprocessing
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from torchlazy.runtime.errors import KernelCompileError, ToolchainMissing, UnknownPrelude
from torchlazy.runtime.program.program import KernelSource
from torchlazy.runtime.toolchains import toolchain_cpp
from torchlazy.runtime.toolchains.kernel_cache import KernelCache, open_cache
from torchlazy.runtime.toolchains.toolchain import LoadedKernel, has_cpp, has_numba, load_kernels

from .tiny_sources import PRELUDES, cpp_broken, cpp_foreach, cpp_gather, cpp_scale, numba_scale

_compile = toolchain_cpp._compile
needs_cpp = pytest.mark.skipif(not has_cpp(), reason="no C++ compiler")
needs_numba = pytest.mark.skipif(not has_numba(), reason="no numba")


@pytest.fixture
def cache(tmp_path: Path) -> KernelCache:
    return open_cache(tmp_path / "cache")


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is loaded must come from memory or disk."""

    def refuse(*args: object) -> None:
        raise AssertionError("the compiler was called")

    monkeypatch.setattr(toolchain_cpp, "_compile", refuse)


def check_scale(kernel: LoadedKernel, factor: float) -> None:
    x, out = torch.randn(7), torch.empty(7)
    assert kernel(x.data_ptr(), out.data_ptr(), 0.5, 7) == 0
    torch.testing.assert_close(out, x * 2 * factor + 0.5)


@needs_cpp
def test_many_sources_each_get_their_own_function(cache: KernelCache) -> None:
    kernels = load_kernels([cpp_scale(factor) for factor in range(10)], cache=cache, preludes=PRELUDES)
    for factor, kernel in enumerate(kernels):
        check_scale(kernel, factor)
    assert len(list((cache.folder / "binaries").glob("*.so"))) <= 3


@needs_cpp
def test_equal_sources_are_one_kernel(cache: KernelCache) -> None:
    first, second = load_kernels([cpp_scale(), cpp_scale()], cache=cache, preludes=PRELUDES)
    assert first is second


@needs_cpp
def test_status_and_foreach_table(cache: KernelCache) -> None:
    gather, foreach = load_kernels([cpp_gather(), cpp_foreach()], cache=cache, preludes=PRELUDES)
    x, out = torch.randn(4), torch.empty(1)
    for index, status in ((3, 0), (-4, 0), (4, 1), (-5, 1)):
        assert gather(x.data_ptr(), torch.tensor([index]).data_ptr(), out.data_ptr(), 1) == status
    alpha = torch.tensor([0.5], dtype=torch.float64).view(torch.int64).item()
    table = torch.tensor([x.data_ptr(), (result := torch.empty(4)).data_ptr(), 4, alpha])
    assert foreach(table.data_ptr(), 1, 2) == 0
    torch.testing.assert_close(result, x * 0.5 + 2)


@needs_cpp
def test_a_second_process_finds_the_kernels_on_disk(cache: KernelCache, no_compiler: None, tmp_path: Path) -> None:
    script(tmp_path, cache, [1, 2])
    for factor, kernel in zip((1, 2), load_kernels([cpp_scale(1), cpp_scale(2)], cache=cache, preludes=PRELUDES)):
        check_scale(kernel, factor)


@needs_cpp
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_four_processes_at_once(cache: KernelCache, no_compiler: None) -> None:
    context = multiprocessing.get_context("fork")
    children = [context.Process(target=load_some, args=(cache.folder, (1, 2, 3 + number))) for number in range(4)]
    for child in children:
        child.start()
    for child in children:
        child.join(600)
    assert [child.exitcode for child in children] == [0] * 4
    sources = [cpp_scale(factor) for factor in range(1, 7)]
    for factor, kernel in enumerate(load_kernels(sources, cache=cache, preludes=PRELUDES), 1):
        check_scale(kernel, factor)
    assert not list(cache.folder.rglob(".tmp-*"))


def load_some(folder: Path, factors: tuple[int, ...]) -> None:
    """In a process that was copied from one that may not compile: load and check some kernels."""
    toolchain_cpp._compile = _compile
    sources = [cpp_scale(factor) for factor in factors]
    for factor, kernel in zip(factors, load_kernels(sources, cache=open_cache(folder), preludes=PRELUDES)):
        check_scale(kernel, factor)


def script(folder: Path, cache: KernelCache, factors: list[int]) -> None:
    """The same in a new process."""
    path = folder / "load_some.py"
    here = Path(__file__).parent
    path.write_text(
        "import importlib.util, sys\n"
        f"spec = importlib.util.spec_from_file_location('checks', {str(here / '__init__.py')!r}, "
        f"submodule_search_locations=[{str(here)!r}])\n"
        "sys.modules['checks'] = importlib.util.module_from_spec(spec)\n"
        "from checks.tiny_sources import PRELUDES, cpp_scale\n"
        "from checks.test_toolchain import check_scale\n"
        "from torchlazy.runtime.toolchains.kernel_cache import open_cache\n"
        "from torchlazy.runtime.toolchains.toolchain import load_kernels\n"
        "factors = [int(text) for text in sys.argv[2:]]\n"
        "sources = [cpp_scale(factor) for factor in factors]\n"
        "for factor, kernel in zip(factors, load_kernels(sources, cache=open_cache(sys.argv[1]), preludes=PRELUDES)):\n"
        "    check_scale(kernel, factor)\n"
        "print('ok')\n"
    )
    command = [sys.executable, str(path), str(cache.folder), *map(str, factors)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "ok", done.stderr


@needs_cpp
def test_another_kernels_entry_is_not_trusted(cache: KernelCache, caplog: pytest.LogCaptureFixture) -> None:
    load_kernels([cpp_scale(1), cpp_scale(2)], cache=cache, preludes=PRELUDES)
    one, other = sorted((cache.folder / "index").rglob("*.json"))
    for name, content in ((one, other.read_text()), (other, one.read_text())):
        name.write_text(content)
    sources = [cpp_scale(1), cpp_scale(2)]
    for factor, kernel in enumerate(load_kernels(sources, cache=open_cache(cache.folder), preludes=PRELUDES), 1):
        check_scale(kernel, factor)
    assert "entry of another kernel" in caplog.text


@needs_cpp
def test_one_wrong_bit_in_a_library_or_its_entry_is_noticed(cache: KernelCache) -> None:
    load_kernels([cpp_scale()], cache=cache, preludes=PRELUDES)
    (library,) = (cache.folder / "binaries").glob("*.so")
    (entry,) = (cache.folder / "index").rglob("*.json")
    sound, told = library.read_bytes(), entry.read_bytes()
    assert open_cache(cache.folder).find_binary(entry.stem) is not None
    for place in range(0, len(sound), len(sound) // 16):
        library.unlink(missing_ok=True)  # a new inode: the library is mapped by this process
        library.write_bytes(wrong_bit(sound, place))
        entry.write_bytes(told)
        assert open_cache(cache.folder).find_binary(entry.stem) is None
        assert not library.exists() and not entry.exists()
    library.write_bytes(sound)
    for place in range(len(told)):
        entry.write_bytes(wrong_bit(told, place))
        assert open_cache(cache.folder).find_binary(entry.stem) is None, (place, told)
        assert not entry.exists() and library.read_bytes() == sound


def test_one_wrong_bit_in_a_source_file_is_repaired(cache: KernelCache) -> None:
    text = "def kernel():\n    return 1\n"
    path = cache.source_file("numba", "0" * 64, text)
    for place in range(len(text)):
        path.write_bytes(wrong_bit(text.encode(), place))
        assert cache.source_file("numba", "0" * 64, text) == path
        assert path.read_text() == text


def wrong_bit(content: bytes, place: int) -> bytes:
    return content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]


@needs_cpp
@pytest.mark.parametrize("damage", ["truncate", "foreign", "delete", "index", "index kind", "symbol"])
def test_damaged_files_are_noted_and_built_again(
    cache: KernelCache, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    load_kernels([cpp_scale()], cache=cache, preludes=PRELUDES)
    (library,) = (cache.folder / "binaries").glob("*.so")
    (entry,) = (cache.folder / "index").rglob("*.json")
    if damage == "truncate":
        # A new inode: the library is mapped by this process.
        content = library.read_bytes()
        library.unlink()
        library.write_bytes(content[: len(content) // 2])
    elif damage == "foreign":
        library.unlink()
        library.write_bytes(b"not a library")
    elif damage == "delete":
        library.unlink()
    elif damage == "index":
        entry.write_text('{"binary": "')
    elif damage == "index kind":
        entry.write_text('{"binary": "../../../etc/passwd", "symbol": "kernel"}')
    else:
        entry.write_text(entry.read_text().replace("kernel_", "colonel_"))
    fresh = open_cache(cache.folder)
    with caplog.at_level(logging.WARNING, logger="torchlazy.runtime"):
        (kernel,) = load_kernels([cpp_scale()], cache=fresh, preludes=PRELUDES)
    check_scale(kernel, 1)
    assert "built again" in caplog.text
    caplog.clear()
    (kernel,) = load_kernels([cpp_scale()], cache=open_cache(cache.folder), preludes=PRELUDES)
    check_scale(kernel, 1)
    assert not caplog.text


@needs_cpp
def test_only_the_broken_kernel_fails(cache: KernelCache, monkeypatch: pytest.MonkeyPatch) -> None:
    sources = [cpp_scale(1), cpp_broken(), cpp_scale(2)]
    with pytest.raises(KernelCompileError, match="no_such_function") as caught:
        load_kernels(sources, cache=cache, preludes=PRELUDES)
    assert caught.value.source == cpp_broken() and "no_such_function" in caught.value.log
    monkeypatch.setattr(toolchain_cpp, "_compile", None)
    for factor, kernel in zip((1, 2), load_kernels([sources[0], sources[2]], cache=cache, preludes=PRELUDES)):
        check_scale(kernel, factor)


@needs_cpp
def test_an_entry_that_is_missing_or_double_is_told(cache: KernelCache) -> None:
    source = KernelSource("cpp", "kernel", "int no_entry_here() { return 0; }\n", ())
    with pytest.raises(KernelCompileError, match="0 times"):
        load_kernels([source], cache=cache)


@needs_cpp
def test_the_key_covers_prelude_flags_and_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = {toolchain_cpp._disk_key(cpp_scale(), prelude) for prelude in ("a", "b")}
    monkeypatch.setattr(toolchain_cpp, "CPP_FLAGS", (*toolchain_cpp.CPP_FLAGS, "-g"))
    keys.add(toolchain_cpp._disk_key(cpp_scale(), "a"))
    monkeypatch.setattr(toolchain_cpp, "processor", lambda: "another")
    keys.add(toolchain_cpp._disk_key(cpp_scale(), "a"))
    monkeypatch.setattr(toolchain_cpp, "MORE_FLAGS", ("-O2", "-g"))
    keys.add(toolchain_cpp._disk_key(cpp_scale(), "a"))
    assert len(keys) == 5


@needs_cpp
def test_more_flags_are_for_kernels_with_a_prelude(cache: KernelCache, monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[list[str]] = []
    run, here = toolchain_cpp._run, threading.get_ident()

    def noted(command: list[str], folder: str) -> subprocess.CompletedProcess[str]:
        if threading.get_ident() == here:  # what earlier tests left to compile is none of this one's
            commands.append(command)
        return run(command, folder)

    monkeypatch.setattr(toolchain_cpp, "MORE_FLAGS", ("-O1", "-DNOBODY_LOOKS_AT"))
    monkeypatch.setattr(toolchain_cpp, "_run", noted)
    source = cpp_scale()
    load_kernels([source], cache=cache, preludes=PRELUDES)
    toolchain_cpp.load([(source, "")], cache)
    given = [[flag for flag in command if flag in ("-O3", "-O1", "-DNOBODY_LOOKS_AT")] for command in commands]
    assert given[0] == ["-O3", "-O1", "-DNOBODY_LOOKS_AT"] and given[-1] == ["-O3"]


def test_no_compiler_is_told_with_the_remedy(cache: KernelCache, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler-anywhere")
    assert not has_cpp()
    with pytest.raises(ToolchainMissing, match="install"):
        load_kernels([cpp_scale()], cache=cache, preludes=PRELUDES)


def test_an_unknown_prelude_is_told(cache: KernelCache) -> None:
    with pytest.raises(UnknownPrelude, match="cpp"):
        load_kernels([cpp_scale()], cache=cache)


def test_units_are_balanced_and_deterministic() -> None:
    jobs = [toolchain_cpp.CppCompileJob(f"{number:064}", cpp_scale(number), "") for number in range(10)]
    assert len(toolchain_cpp.split_into_units(jobs[:3], cores=8)) == 1
    units = toolchain_cpp.split_into_units(jobs, cores=2)
    assert sorted(len(unit) for unit in units) == [5, 5]
    assert units == toolchain_cpp.split_into_units(list(reversed(jobs)), cores=2)
    assert len(toolchain_cpp.split_into_units(jobs, cores=64)) == 3


@pytest.mark.parametrize("mode", [0o770, 0o777, 0o702])
def test_a_folder_that_others_may_write_is_refused(tmp_path: Path, mode: int, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "shared"
    folder.mkdir()
    folder.chmod(mode)
    cache = open_cache(folder)
    assert cache.folder != folder and cache.folder.stat().st_mode & 0o777 == 0o700
    assert "TORCHLAZY_CACHE_DIR" in caplog.text and not list(folder.iterdir())


def test_a_folder_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    assert open_cache(tmp_path).folder != tmp_path


def test_the_folder_is_private_and_comes_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHLAZY_CACHE_DIR", str(tmp_path / "a" / "b"))
    cache = open_cache()
    assert cache.folder == tmp_path / "a" / "b" and cache.folder.stat().st_mode & 0o777 == 0o700


@needs_numba
def test_numba_source_and_no_pickle_on_disk(cache: KernelCache) -> None:
    (kernel,) = load_kernels([numba_scale()], cache=cache, preludes=PRELUDES)
    check_scale(kernel, 1)
    kept = [path.suffix for path in cache.folder.rglob("*") if path.is_file()]
    assert ".py" in kept and not {".nbc", ".nbi", ".pkl", ".pickle"} & set(kept)


@needs_numba
def test_a_broken_numba_source_is_told(cache: KernelCache) -> None:
    source = KernelSource("numba", "kernel", "def kernel(in_ptr0):\n    return no_such_name\n", (torch.float32,))
    with pytest.raises(KernelCompileError, match="no_such_name"):
        load_kernels([source], cache=cache)


def test_a_library_that_another_process_cleared_is_written_again(tmp_path):
    cache = open_cache(tmp_path / "kernels")
    path = cache.store_binary(b"library", ["a" * 64])
    assert cache.find_binary("a" * 64) is not None
    path.unlink()
    assert cache.find_binary("a" * 64) is None
    assert cache.store_binary(b"library", ["a" * 64]).read_bytes() == b"library"


@needs_cpp
def test_a_source_that_needs_the_library_of_cpp_is_linked_with_it(cache: KernelCache) -> None:
    text = """#include <stdexcept>
#include <string>
extern "C" int64_t kernel(int64_t size0) {
  try {
    if (size0 < 0) throw std::runtime_error(std::string("less than nothing"));
  } catch (const std::exception &) {
    return 7;
  }
  return 0;
}
"""
    plain, throwing = cpp_scale(), KernelSource("cpp", "kernel", text, (), (), 1)
    first, second = load_kernels([plain, throwing], cache=cache, preludes=PRELUDES)
    check_scale(first, 1)
    assert (second(3), second(-3)) == (0, 7)


@needs_cpp
def test_kernels_need_no_library_of_cpp(cache: KernelCache) -> None:
    if len(toolchain_cpp._ways_to_link(toolchain_cpp._compiler() or ())) == 1:
        pytest.skip("not a g++ on Linux")
    load_kernels([cpp_scale()], cache=cache, preludes=PRELUDES)
    (library,) = (cache.folder / "binaries").glob("*.so")
    assert b"libstdc++" not in library.read_bytes()
