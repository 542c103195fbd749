"""Methods that read memory without an operator: in a block they give eager's values, and stay torch's own objects."""

from __future__ import annotations

import contextlib
import copy
import io
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torchlazy
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torchlazy.runtime.native.recorder_library import LIBRARY
from torchlazy.runtime.toolchains.toolchain_cpp import has_cpp

from tests.fuzz.ways import followed

pytestmark = pytest.mark.skipif(not has_cpp(), reason="needs a C++ compiler")

KNOWN = {
    name: getattr(Tensor, name) for name in ("numpy", "tolist", "data_ptr", "untyped_storage", "__array__", "__repr__")
}


@pytest.fixture(autouse=True)
def _followed() -> Iterator[None]:
    assert LIBRARY.wait() is not None, LIBRARY.reason
    with followed():
        yield


def written(x: Tensor) -> None:
    """More operators than a trace needs that is worth a program."""
    for number in range(10):
        x.mul_(2).add_(number)


def saved(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


# What reads a storage that was taken before its tensor was written.
STORAGE_READS: dict[str, Callable[[torch.UntypedStorage], Any]] = {
    "clone": lambda s: s.clone().tolist(),
    "deepcopy": lambda s: copy.deepcopy(s).tolist(),
    "save": lambda s: saved(s).tolist(),
    "copy_": lambda s: torch.UntypedStorage(s.nbytes()).copy_(s).tolist(),
    "tolist": lambda s: s.tolist(),
    "item": lambda s: [s[i] for i in range(s.nbytes())],
    "slice": lambda s: s[0:8].tolist(),
    "float": lambda s: torch.TypedStorage(wrap_storage=s, dtype=torch.float32, _internal=True).tolist(),
    "tensor": lambda s: torch.empty(0, device=s.device).set_(s).tolist(),
    "fill": lambda s: s.fill_(1).tolist(),
    "setitem": lambda s: s.__setitem__(1, 7),
    "resize": lambda s: s.resize_(s.nbytes() + 24).tolist()[:24],
    "file": lambda s: saved(torch.empty(0, device=s.device).set_(s)).tolist(),
}


@pytest.mark.parametrize("device", ["cpu", "lazy"])
@pytest.mark.parametrize("kind", STORAGE_READS)
def test_a_storage_that_was_taken_before_it_is_written(kind: str, device: str) -> None:
    read = STORAGE_READS[kind]

    def program(device: str) -> list[Any]:
        x = torch.arange(6.0, device=device)
        storage = x.untyped_storage()
        written(x)
        found = read(storage)
        written(x)
        return [found, x.tolist(), read(storage)]

    want = program("cpu")
    for _ in range(5):
        with torchlazy.lazy_mode() if device == "cpu" else contextlib.nullcontext():
            assert program(device) == want


def test_methods_stay_the_objects_that_they_are() -> None:
    before = dict(vars(Tensor))
    x = torch.ones(3)
    with torchlazy.lazy_mode():
        written(x)
        assert dict(vars(Tensor)) == before
        assert {name: getattr(Tensor, name) for name in KNOWN} == KNOWN
    assert dict(vars(Tensor)) == before


def test_function_modes_know_the_methods() -> None:
    seen = []

    class Watching(TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.extend(name for name, known in KNOWN.items() if function is known)
            return function(*args, **kwargs or {})

    for _ in range(4):
        seen.clear()
        x = torch.arange(3.0)
        with torchlazy.lazy_mode(), Watching():
            written(x)
            assert x.numpy()[2] == np.asarray(x)[2] == x.tolist()[2]
            assert "tensor([" in repr(x)
        assert [name for name in seen if name != "data_ptr"] == ["numpy", "__array__", "tolist", "__repr__"]


def test_what_a_method_raises() -> None:
    for _ in range(4):
        with torchlazy.lazy_mode():
            x = torch.ones(3, requires_grad=True) * 2
            written(y := x.detach().clone())
            with pytest.raises(RuntimeError, match="Can't call numpy"):
                x.numpy()
            with pytest.raises(TypeError, match="tolist"):
                y.tolist(1)  # type: ignore[call-arg]
            with pytest.raises(TypeError):
                y.apply_()  # type: ignore[call-arg]


def test_printing_cuts_once_and_its_operators_go_unrecorded() -> None:
    x = torch.arange(3000.0)
    with torchlazy.lazy_mode():
        written(x)
        torchlazy.flush()
        torchlazy.reset_metrics()
        repr(x)
        x.add_(1)
        repr(x)
    assert torchlazy.lazy.report.metrics.ops == 1
