"""Programs on disk: what comes back is what was kept; what is damaged is gone; the folder stays within its bound."""

from __future__ import annotations

import multiprocessing
import os
from pathlib import Path

import pytest
import torch
from torchlazy.prims.meta import TensorMeta
from torchlazy.runtime import cache_folder
from torchlazy.runtime.errors import ProgramError
from torchlazy.runtime.executor import load_program
from torchlazy.runtime.program import store as program_store
from torchlazy.runtime.program.program import Allocate, Launch, Program
from torchlazy.runtime.program.store import ProgramStore, StoredProgram, from_text, program_key, to_text
from torchlazy.runtime.toolchains.build_ahead import build_kernels
from torchlazy.runtime.toolchains.kernel_cache import KernelCache
from torchlazy.runtime.toolchains.target_facts import package_fingerprint, target_facts

from .tiny_sources import PRELUDES, cpp_scale


def stored(factor: float = 1.0) -> StoredProgram:
    vector = TensorMeta((64,), torch.float32, (1,))
    program = Program(
        inputs=(("x", vector),),
        scalars=(("lr", float),),
        kernels=(cpp_scale(factor),),
        steps=(Allocate("y", vector), Launch(0, ("x", "y"), ("lr",), (64,))),
        outputs=("y",),
        output_metas=(vector,),
    )
    return StoredProgram(program, (("aten.mm.default", "a contraction", "model.py:4", True),), 1.5)


def file_of(store: ProgramStore, key: str) -> Path:
    (path,) = (store.folder / "programs").rglob(f"{key}.json")
    return path


def test_round_trip(tmp_path):
    store, key = ProgramStore(tmp_path), program_key("a trace", "cpp")
    assert not store.has_entries()
    assert store.get(key) is None
    store.put(key, stored())
    assert store.has_entries()
    assert store.get(key) == stored()
    assert store.get(program_key("another trace", "cpp")) is None
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == [f"{key}.json"]


def test_keys_tell_facts_apart():
    keys = {program_key("ab", "c"), program_key("a", "bc"), program_key("abc"), program_key("ab", "c", "")}
    assert len(keys) == 4


def test_facts_name_versions_and_target():
    assert torch.__version__ in target_facts("numba")
    assert package_fingerprint() in target_facts("numba")
    assert target_facts("triton", ("cuda", 90, 32)) != target_facts("triton", ("cuda", 80, 32))


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[: len(text) // 2],
        lambda text: "",
        lambda text: text.replace("lr", "rl", 1),
        lambda text: "import os\n",
        lambda text: to_text(program_key("foreign"), stored()),
        lambda text: text.encode().replace(b"kernel", b"\xff\xfe").decode("latin1"),
    ],
)
def test_damaged_files_are_deleted_and_made_again(tmp_path, damage):
    store, key = ProgramStore(tmp_path), program_key("a trace")
    store.put(key, stored())
    path = file_of(store, key)
    path.write_bytes(damage(path.read_text()).encode("latin1"))
    assert store.get(key) is None
    assert not path.exists()
    store.put(key, stored())
    assert store.get(key) == stored()


def test_one_wrong_bit_anywhere_is_noticed(tmp_path):
    store, key = ProgramStore(tmp_path), program_key("a trace")
    store.put(key, stored())
    path = file_of(store, key)
    sound = path.read_bytes()
    for place in range(0, len(sound), 7):
        path.write_bytes(sound[:place] + bytes([sound[place] ^ 1]) + sound[place + 1 :])
        assert store.get(key) is None, place
        assert not path.exists()
    path.write_bytes(sound)
    assert store.get(key) == stored()


def test_tuned_choices_count_and_go_as_other_files_do(tmp_path):
    path = tmp_path / "tuning" / f"{'0' * 64}.json"
    path.parent.mkdir()
    path.write_text("{}")
    os.utime(path, (1000, 1000))
    assert [file.kind for file in cache_folder.list_files(tmp_path)] == ["tuning"]
    assert [file.path for file in cache_folder.evict(tmp_path, 1)] == [path]


def test_a_hash_of_ones_own_does_not_make_a_program():
    key = program_key("a trace")
    rest = "{}\n{}\n"
    text = f"{program_store.hashlib.sha256(rest.encode()).hexdigest()}\n{rest}"
    with pytest.raises(ProgramError, match="foreign"):
        from_text(key, text)


def test_a_disk_that_cannot_be_written_is_no_error(tmp_path):
    (tmp_path / "programs").write_text("a file in the way")
    store = ProgramStore(tmp_path)
    store.put(program_key("a trace"), stored())
    assert store.get(program_key("a trace")) is None


def test_the_least_recently_used_go_first(tmp_path):
    store = ProgramStore(tmp_path)
    keys = [program_key(str(number)) for number in range(10)]
    for age, key in enumerate(keys):
        store.put(key, stored())
        os.utime(file_of(store, key), (1000 + age, 1000 + age))
    size = file_of(store, keys[0]).stat().st_size
    assert store.get(keys[0]) == stored()  # used just now
    gone = cache_folder.evict(tmp_path, 6 * size)
    assert [file.path.stem for file in gone] == keys[1:6]
    assert store.get(keys[0]) is not None
    assert cache_folder.evict(tmp_path, 6 * size) == []


def test_putting_keeps_the_bound(tmp_path):
    store = ProgramStore(tmp_path, limit=1)
    store.put(program_key("a"), stored())
    assert cache_folder.list_files(tmp_path) == []


def test_only_the_packages_own_files_are_touched(tmp_path):
    for name in ("sources/main.py", "index/notes.json", "programs/readme.txt", "other/x.so"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("mine")
    ProgramStore(tmp_path).put(program_key("a"), stored())
    cache_folder.evict(tmp_path, 1)
    cache_folder.clear(tmp_path)
    assert len([path for path in tmp_path.rglob("*") if path.is_file()]) == 4


def test_abandoned_temporary_files_go(tmp_path):
    (tmp_path / "programs").mkdir()
    old, new = tmp_path / "programs" / ".tmp-old", tmp_path / "programs" / ".tmp-new"
    old.write_text("x"), new.write_text("x")
    os.utime(old, (1000, 1000))
    cache_folder.evict(tmp_path, 1 << 30)
    assert not old.exists()
    assert new.exists()


def put_and_get(folder: Path, number: int) -> None:
    store = ProgramStore(folder, limit=40_000)
    for turn in range(40):
        key = program_key(str((number + turn) % 12))
        cache_folder._next_eviction.clear()
        found = store.get(key)
        assert found is None or found == stored()
        store.put(key, stored())


def test_four_processes_at_once(tmp_path):
    context = multiprocessing.get_context("fork")
    children = [context.Process(target=put_and_get, args=(tmp_path, number)) for number in range(4)]
    for child in children:
        child.start()
    for child in children:
        child.join(600)
    assert [child.exitcode for child in children] == [0] * 4
    for file in cache_folder.list_files(tmp_path):
        assert program_store.find_damage(file) == ""


@pytest.mark.parametrize(
    ("text", "size"), [("1000", 1000), ("2GiB", 2 << 30), ("1.5g", 3 << 29), ("500 MB", 500 << 20), ("7k", 7168)]
)
def test_sizes(text, size):
    assert cache_folder.parse_size(text) == size


@pytest.mark.parametrize("text", ["lots", "", "-5", "0", "2 X", "G"])
def test_sizes_that_are_none(text):
    with pytest.raises(ValueError, match="TORCHLAZY_CACHE_SIZE"):
        cache_folder.parse_size(text)


def test_kernels_built_ahead_are_found(tmp_path):
    program = stored(1.25).program
    build_kernels(program, cache=KernelCache(tmp_path), preludes=PRELUDES, target=None)
    libraries = list((tmp_path / "binaries").iterdir())
    run = load_program(program, cache=KernelCache(tmp_path), preludes=PRELUDES)
    x = torch.arange(64.0)
    assert torch.equal(run([x], [0.5])[0], x * 2.5 + 0.5)
    assert list((tmp_path / "binaries").iterdir()) == libraries
