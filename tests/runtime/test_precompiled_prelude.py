"""Headers of the prelude of C++ kernels: when they are made, that units compiled with them are the same bytes, and what
happens where the compiler cannot use one."""

from __future__ import annotations

from pathlib import Path

import pytest
from torchlazy.runtime.toolchains import precompiled_prelude, toolchain_cpp
from torchlazy.runtime.toolchains.kernel_cache import CachedBinary, KernelCache, open_cache
from torchlazy.runtime.toolchains.toolchain import load_kernels

from .test_toolchain import check_scale, needs_cpp
from .tiny_sources import PRELUDES, cpp_scale

pytestmark = [
    needs_cpp,
    pytest.mark.skipif(not toolchain_cpp._is_gnu(toolchain_cpp._compiler() or ()), reason="another compiler than g++"),
]
LONG = {name: text + "\n// parsed, and parsed again" * 600 for name, text in PRELUDES.items()}


@pytest.fixture
def cache(tmp_path: Path) -> KernelCache:
    return open_cache(tmp_path / "cache")


@pytest.fixture(autouse=True)
def units(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The texts of the units that are compiled, as by a new process."""
    texts: list[str] = []
    inner = toolchain_cpp._compile_text
    monkeypatch.setattr(toolchain_cpp, "_compile_text", lambda text, *rest: (texts.append(text), inner(text, *rest))[1])
    precompiled_prelude._builds.clear()
    precompiled_prelude._refused.clear()
    return texts


def build(factor: int, cache: KernelCache, preludes: dict[str, str] = LONG) -> None:
    (kernel,) = load_kernels([cpp_scale(factor)], cache=cache, preludes=preludes)
    check_scale(kernel, factor)


def with_header(units: list[str]) -> list[bool]:
    return [precompiled_prelude.NAME in text for text in units]


def test_it_is_made_after_a_few_builds_and_serves_the_next(cache: KernelCache, units: list[str]) -> None:
    for factor in range(5):
        build(factor, cache)
    assert with_header(units) == [False, False, False, True, True]
    precompiled_prelude._builds.clear()
    build(5, open_cache(cache.folder))  # another process
    assert with_header(units)[-1]


def test_a_short_prelude_is_parsed(cache: KernelCache, units: list[str]) -> None:
    for factor in range(5):
        build(factor, cache, PRELUDES)
    assert not any(with_header(units)) and not precompiled_prelude._builds


def test_a_small_folder_keeps_kernels_in_its_place(cache: KernelCache, units: list[str], monkeypatch) -> None:
    monkeypatch.setenv("TORCHLAZY_CACHE_SIZE", "50M")
    for factor in range(5):
        build(factor, cache)
    assert not any(with_header(units))


def test_units_are_the_same_with_and_without_it(cache: KernelCache, tmp_path: Path, units: list[str]) -> None:
    for factor in range(4):
        build(factor, cache)
    plain = open_cache(tmp_path / "plain")
    build(3, plain)
    (library,) = (plain.folder / "binaries").glob("*.so")
    assert with_header(units)[-2:] == [True, False] and (cache.folder / "binaries" / library.name).exists()


@pytest.mark.parametrize("damage", ["wrong bit", "gone"])
def test_damage_is_noticed(cache: KernelCache, units: list[str], damage: str) -> None:
    for factor in range(3):
        build(factor, cache)
    header = max((cache.folder / "binaries").glob("*.so"), key=lambda path: path.stat().st_size)
    content = bytearray(header.read_bytes())
    header.unlink()
    if damage == "wrong bit":
        content[len(content) // 2] ^= 1
        header.write_bytes(content)
    build(3, open_cache(cache.folder))
    assert with_header(units) == [False] * 4 and not header.exists()


def test_what_the_compiler_cannot_use_is_left(cache: KernelCache, units: list[str], monkeypatch) -> None:
    for factor in range(3):
        build(factor, cache)
    with monkeypatch.context() as patched:
        patched.setattr(precompiled_prelude, "header_text", lambda prelude: "#error no such luck\n")
        patched.setattr(KernelCache, "find_binary", lambda self, key: CachedBinary(self.folder / "none", "none"))
        job = toolchain_cpp.CppCompileJob("1" * 64, cpp_scale(7), LONG["cpp"])
        path, said = toolchain_cpp._compile([job], cache)
    assert path is not None and path.exists(), said
    build(3, cache)
    assert with_header(units)[-3:] == [True, False, False]


def test_a_header_that_cannot_be_made_is_not_tried_again(cache: KernelCache, units: list[str], monkeypatch) -> None:
    monkeypatch.setattr(precompiled_prelude, "header_text", lambda prelude: "#error no such luck\n")
    for factor in range(3):
        build(factor, cache)
    assert len(precompiled_prelude._refused) == 1
    build(3, cache)
    assert not with_header(units)[-1]
