"""The native launcher, with a driver of the test's own that notes what it was asked to launch."""

from __future__ import annotations

import ctypes
import struct
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torchlazy.runtime.native import launch as native_launch
from torchlazy.runtime.native.code import NativeCode
from torchlazy.runtime.native.launch import LaunchShape, launcher_of, native_launcher
from torchlazy.runtime.native.recorder_library import LIBRARY
from torchlazy.runtime.toolchains.toolchain import has_cpp, has_triton
from torchlazy.runtime.toolchains.toolchain_triton import compile_for_sm90, is_interpreting, launcher_of_triton

from .tiny_triton import triton_foreach, triton_scale

pytestmark = pytest.mark.skipif(not has_cpp(), reason="needs a C++ compiler")

_FAKE = r"""
#include <cstdint>
#include <cstring>
static int64_t notes[64];
static int launch(void* function, unsigned x, unsigned y, unsigned z, unsigned a, unsigned b, unsigned c,
                  unsigned shared, void* stream, void** parameters, void** extra) {
    if ((int64_t)function == 13) return 7;
    int64_t head[] = {notes[0] + 1, (int64_t)function, x, y, z, a, b, c, shared, (int64_t)stream, (int64_t)extra};
    std::memcpy(notes, head, sizeof head);
    for (int64_t i = 0; i < (int64_t)function; i++) notes[11 + i] = *(int64_t*)parameters[i];
    return 0;
}
static int text(int status, const char** found) {
    *found = status == 7 ? "out of luck" : nullptr;
    return 0;
}
extern "C" int kernel(void** found) {
    found[0] = (void*)launch;
    found[1] = (void*)text;
    found[2] = notes;
    return 0;
}
"""


@pytest.fixture(scope="module")
def driver() -> tuple[tuple[int, int], Any]:
    """Addresses of the two functions, and the notes: count, function, grid, block, shared, stream, extra, values."""
    address = NativeCode("fake_driver", lambda: _FAKE, (), "nothing").wait()
    assert address is not None
    found = (ctypes.c_void_p * 3)()
    ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(address)(ctypes.addressof(found))
    assert found[0] and found[1] and found[2]
    return (found[0], found[1]), (ctypes.c_int64 * 64).from_address(found[2])


def bits(value: float) -> int:
    return int(struct.unpack("=q", struct.pack("=d", value))[0])


def shape(**changes: Any) -> LaunchShape:
    facts: dict[str, Any] = {
        "pointers": 2, "fixed": (), "scalars": (float, int), "sizes": (100, 7), "moving_sizes": 0, "grid": 5,
        "xblock": 0, "unaligned": None,
    }  # fmt: skip
    return LaunchShape(**(facts | changes))


def test_the_driver_is_given_what_triton_gives_it(driver: Any) -> None:
    functions, notes = driver
    # The fake's function is the number of parameters: two addresses, two scalars, two sizes, two for scratch memory.
    launch = launcher_of(functions, 8, 64, 2048, shape())
    assert launch is not None
    before = notes[0]
    assert launch(77, 1 << 40, 48, 2.5, -3) == 0
    assert list(notes[:19]) == [
        before + 1, 8, 5, 1, 1, 64, 1, 1, 2048, 77, 0, 1 << 40, 48, bits(2.5), -3, 100, 7, 0, 0,
    ]  # fmt: skip
    assert launch(77, (1 << 64) - 16, 48, 2, True) == 0, "an address with its highest bit, numbers of other types"
    assert list(notes[11:15]) == [-16, 48, bits(2.0), 1]


def test_tables_stand_behind_the_pointers(driver: Any) -> None:
    functions, notes = driver
    launch = launcher_of(functions, 5, 32, 0, shape(pointers=1, fixed=(4096,), scalars=(int,), sizes=()))
    assert launch is not None and launch(0, 64, 9) == 0
    assert list(notes[11:16]) == [64, 4096, 9, 0, 0]


def test_sizes_of_a_run_decide_the_grid(driver: Any) -> None:
    functions, notes = driver
    launch = launcher_of(functions, 6, 32, 0, shape(scalars=(), sizes=(), moving_sizes=2, xblock=256))
    assert launch is not None
    assert launch(0, 16, 32, 257, 3) == 0
    assert notes[2] == 2 and list(notes[11:17]) == [16, 32, 257, 3, 0, 0]
    count = notes[0]
    assert launch(0, 16, 32, 0, 3) == 0 and notes[0] == count, "nothing to do is not launched"


def test_unaligned_addresses_go_to_the_other_variant(driver: Any) -> None:
    functions, notes = driver
    seen: list[tuple[Any, ...]] = []

    def other(*given: Any) -> int:
        seen.append(given)
        return 0

    launch = launcher_of(functions, 8, 32, 0, shape(unaligned=other))
    assert launch is not None
    count = notes[0]
    assert launch(1, 16, 40, 0.5, 2) == 0
    assert seen == [(1, 16, 40, 0.5, 2)] and notes[0] == count
    assert launch(1, 16, 48, 0.5, 2) == 0
    assert len(seen) == 1 and notes[0] == count + 1


def test_what_cannot_be_launched_raises(driver: Any) -> None:
    functions, notes = driver
    launch = launcher_of(functions, 13, 32, 0, shape())
    assert launch is not None
    with pytest.raises(RuntimeError, match="out of luck"):
        launch(0, 16, 32, 1.0, 1)
    good = launcher_of(functions, 8, 32, 0, shape())
    assert good is not None
    count = notes[0]
    for given in (
        (0, 16, 32, 1.0),
        (0, 16, 32, "1", 1),
        (0, 16, 32, 1.0, 1.5),
        (0, "a", 32, 1.0, 1),
        (0, -1, 2, 1.0, 1),
    ):
        with pytest.raises((RuntimeError, TypeError, OverflowError)):
            good(*given)
    assert notes[0] == count
    assert launcher_of(functions, 8, 32, 0, shape(sizes=(1,) * 200)) is None, "more than its table holds"


@pytest.mark.skipif(LIBRARY.wait() is None, reason="needs the native library")
def test_programs_launch_as_the_launcher_does(driver: Any) -> None:
    functions, notes = driver
    seen: list[tuple[Any, ...]] = []
    facts = shape(fixed=(4096,), unaligned=lambda *given: seen.append(given))

    def program(function: int) -> Any:
        kernel = (*functions, function, 64, 2048, facts.grid, [4096], [100, 7], facts.unaligned, facts)
        spec = {
            "inputs": [0, 1], "steps": [("launch", kernel, [0, 1], [0, 1], [100, 7], [], []), ("launch", None)],
            "outputs": [0], "scalars": [True, False], "donations": [(0, 0)], "slots": 2, "device": -1, "symbols": 0,
            "sizes": [],
        }  # fmt: skip
        return LIBRARY.module.Program(spec)

    first, second = torch.zeros(8), torch.zeros(8)
    count = notes[0]
    good = program(9)
    assert not good.has_run
    assert good.run([first, second], [2.5, -3])[0].data_ptr() == first.data_ptr() and good.has_run
    addresses = [first.data_ptr(), second.data_ptr()]
    assert list(notes[:20]) == [
        count + 1, 9, 5, 1, 1, 64, 1, 1, 2048, 0, 0, *addresses, 4096, bits(2.5), -3, 100, 7, 0, 0,
    ]  # fmt: skip
    good.run([first[1:], second], [0.5, 2])
    assert seen == [(0, addresses[0] + 4, addresses[1], 0.5, 2)] and notes[0] == count + 1
    bad = program(13)
    with pytest.raises(RuntimeError, match="out of luck"):
        bad.run([first, second], [1.0, 1])
    assert not bad.has_run


def kernel_of(**metadata: Any) -> Any:
    facts = {
        "num_warps": 4, "num_ctas": 1, "shared": 1024, "launch_cooperative_grid": False, "launch_pdl": False,
        "global_scratch_size": 0, "profile_scratch_size": 0,
    }  # fmt: skip
    return SimpleNamespace(metadata=SimpleNamespace(**(facts | metadata)), function=8)


def test_only_plain_kernels_are_launched_natively(driver: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    functions, notes = driver
    monkeypatch.setattr(native_launch, "_driver", lambda: functions)
    launch = native_launcher(kernel_of(), shape())
    assert launch is not None and launch(0, 16, 32, 1.0, 1) == 0
    assert list(notes[5:9]) == [128, 1, 1, 1024]
    for change in (
        {"num_ctas": 2}, {"launch_pdl": True}, {"launch_cooperative_grid": True}, {"global_scratch_size": 64},
        {"profile_scratch_size": 8}, {"tensordesc_meta": [1]}, {"instrumentation_mode": "gsan"},
    ):  # fmt: skip
        assert native_launcher(kernel_of(**change), shape()) is None


def test_without_a_driver_triton_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_launch, "_driver", lambda: None)
    assert native_launcher(kernel_of(), shape()) is None


def test_both_launchers_take_and_give_the_same(driver: Any) -> None:
    """Triton's own launcher is called with the very values that the driver is given natively."""
    functions, notes = driver
    calls: list[tuple[Any, ...]] = []
    triton = SimpleNamespace(run=lambda *given: calls.append(given), function=8, packed_metadata="facts")
    for changes, given in (
        ({}, (3, 16, 32, 0.5, 4)),
        ({"scalars": (), "sizes": (), "moving_sizes": 2, "xblock": 64, "grid": 0}, (3, 16, 32, 65, 2)),
        ({"pointers": 1, "fixed": (4096,), "scalars": (int,), "sizes": ()}, (3, 64, 9)),
    ):
        facts = shape(**changes)
        count = facts.pointers + len(facts.fixed) + len(facts.scalars) + len(facts.sizes) + facts.moving_sizes
        native = launcher_of(functions, count + 2, 32, 0, facts)
        assert native is not None and native(*given) == 0
        assert launcher_of_triton(triton, facts, (64, 128))(*given) == 0
        grid, _, _, stream, function, packed, *hooks = calls[-1][:9]
        assert (grid, stream, function, packed, hooks) == (notes[2], notes[9], 8, "facts", [None, None, None])
        values = calls[-1][9:-2]
        assert calls[-1][-2:] == (64, 128), "what the kernel was compiled for follows"
        assert [bits(v) if type(v) is float else v for v in values] == list(notes[11 : 11 + len(values)])


@pytest.mark.skipif(not has_triton() or is_interpreting(), reason="needs Triton's compiler")
def test_kernels_have_the_parameters_that_they_are_given(
    driver: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton-cache"))
    monkeypatch.setattr(native_launch, "_driver", lambda: driver[0])
    for source, own in ((triton_scale(), 4), (triton_foreach(), 3)):
        compiled = compile_for_sm90(source)
        entry = compiled.asm["ptx"].split(".entry")[1].split(")")[0]
        assert entry.count(".param") == own + 2, "and the addresses of two pieces of scratch memory"
        assert native_launcher(SimpleNamespace(metadata=compiled.metadata, function=8), shape()) is not None
