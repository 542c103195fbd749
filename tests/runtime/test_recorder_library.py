"""Where the native recorder's library is looked for: in the wheel, then in the cache folder; else it is compiled."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torchlazy.runtime.native import recorder_library


@pytest.fixture
def compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Path]]:
    """What was compiled, with a stand-in for the compiler, an empty cache folder and a wheel that brings nothing."""
    found: list[Path] = []

    def compile_into(path: Path) -> None:
        found.append(path)
        path.write_bytes(b"a library")

    (tmp_path / "prebuilt").mkdir()
    monkeypatch.setenv("TORCHLAZY_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(recorder_library, "PREBUILT", tmp_path / "prebuilt")
    monkeypatch.setattr(recorder_library, "_compile", compile_into)
    recorder_library.brought.cache_clear()
    yield found
    recorder_library.brought.cache_clear()


def lay_into_the_wheel(library: Path) -> Path:
    """A link: a process that loads a second copy is ended, as its operators are registered already."""
    recorder_library.brought.cache_clear()
    path = recorder_library.PREBUILT / recorder_library._file_name()
    path.symlink_to(library)
    return path


def test_it_is_compiled_once_into_the_cache_folder(compiled, tmp_path):
    assert not recorder_library.LIBRARY.is_kept()
    path = recorder_library.find_or_compile()
    assert path.parent == tmp_path / "cache" and recorder_library.LIBRARY.is_kept()
    assert recorder_library.find_or_compile() == path
    assert compiled == [path]


def test_what_the_wheel_brought_is_not_compiled(compiled, monkeypatch):
    if recorder_library.LIBRARY.wait() is None:
        pytest.skip("no C++ compiler")
    path = lay_into_the_wheel(Path(recorder_library.LIBRARY.module.__file__))
    assert recorder_library.LIBRARY.is_kept() and recorder_library.find_or_compile() == path
    monkeypatch.setattr(torch, "__version__", "2.0.1")
    recorder_library.brought.cache_clear()
    assert not recorder_library.LIBRARY.is_kept()
    assert recorder_library.find_or_compile() != path
    assert len(compiled) == 1


def test_what_cannot_be_loaded_here_is_compiled(compiled, tmp_path, caplog):
    (tmp_path / "foreign.so").write_bytes(b"for another machine")
    lay_into_the_wheel(tmp_path / "foreign.so")
    assert not recorder_library.LIBRARY.is_kept()
    assert [recorder_library.find_or_compile()] == compiled
    assert [record.message for record in caplog.records if "cannot be loaded" in record.message]
