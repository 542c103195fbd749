"""Tensors that the native walk makes by copying: they are what torch's own function makes."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torchlazy
from torchlazy.lazy.api import recorder
from torchlazy.lazy.record.follow import native
from torchlazy.lazy.record.follow.native import NativeSteps
from torchlazy.lazy.record.follow.native_copies import is_same, prototype_of
from torchlazy.lazy.record.tensor import LAZY, LazyTensor, make_tensor, making
from torchlazy.lazy.trace.geometry import geometry

copies = recorder.native_steps.copies
pytestmark = [
    pytest.mark.usefixtures("device_in_python"),
    pytest.mark.skipif(copies is None, reason="tensors are not copied with this torch, or without a compiler"),
]


def storage_of(tensor: torch.Tensor) -> Any:
    return torch.Tensor.untyped_storage(tensor)


def was_copied(tensor: torch.Tensor) -> bool:
    """Only a copy's memory is believed to be there."""
    return storage_of(tensor).device.type == "meta"


def followed(run: Callable[[], Any]) -> Any:
    """What the program gives when it comes as often that it is known."""
    for _ in range(5):
        kept = run()
        torchlazy.sync()
        del kept  # not before: a trace of which nothing is computed is not remembered
    return run()


MADE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "elementwise": lambda x: x + 1,
    "transposed": lambda x: (x * 2).t(),
    "window": lambda x: (x * 2)[1:, 1],
    "expanded": lambda x: (x * 2).unsqueeze(0).expand(3, 4, 2),
    "nothing": lambda x: (x * 2)[4:],
    "number": lambda x: x.sum(),
    "other dtype": lambda x: x > 0,
    "detached": lambda x: (x * 2).detach(),
    "one of several": lambda x: (x * 2).split(2)[1],
    "one of two": lambda x: x.max(0)[1],
}


@pytest.mark.parametrize("case", MADE)
def test_followed_tensors_are_as_torch_makes_them(case: str) -> None:
    x = torch.arange(8.0).view(4, 2).to("lazy")
    got = followed(lambda: MADE[case](x))
    with torch._C.DisableTorchFunction():
        assert was_copied(got)
        wanted = make_tensor(*making(got._geometry))
        assert torch._C._dispatch_keys(got) == torch._C._dispatch_keys(wanted)
        for fact in ("shape", "dtype", "device", "layout", "is_leaf"):
            assert getattr(got, fact) == getattr(wanted, fact)
        assert got.stride() == wanted.stride() and got.storage_offset() == wanted.storage_offset()
        assert storage_of(got).nbytes() == storage_of(wanted).nbytes()
    assert got._version == 0 and not got.requires_grad and not got.is_inference()
    torch.testing.assert_close(got.cpu(), MADE[case](x.cpu()))


def test_tensors_are_detached_natively_where_lazy_mode_was_used() -> None:
    """Those of the lazy device; what the mode made is no copy, and an ordinary tensor's twin outside of it."""
    x = torch.arange(8.0).view(4, 2).to("lazy")
    with torchlazy.lazy_mode():
        made = torch.ones(4, 2) + 1
        inside = followed(lambda: made.detach())
    got, outside = followed(lambda: (x.detach(), made.detach()))
    with torch._C.DisableTorchFunction():
        assert was_copied(got) and not was_copied(outside) and not was_copied(inside)
    assert got.device.type == "lazy" and outside.device.type == "cpu"
    assert got.tolist() == x.tolist() and outside.tolist() == made.tolist()


def test_no_two_share_a_memory() -> None:
    """DistributedDataParallel asks torch whether a gradient is in its bucket already."""
    x = torch.ones(4, device="lazy")
    made = followed(lambda: [x + 1, x * 2, (x - 1).view(4), x.detach()])
    with torch._C.DisableTorchFunction():
        assert len({storage_of(tensor)._cdata for tensor in made}) == 4
        assert sum(map(was_copied, made)) >= 3


def test_they_can_be_given_other_data_and_other_sizes() -> None:
    x = torch.arange(4.0, device="lazy")
    y, z, w = followed(lambda: [x + 1, x * 2, x * 3])
    y.data = torch.ones(3, 2, device="lazy")
    assert y.shape == (3, 2) and y.sum().item() == 6
    z.resize_(2)
    assert z.tolist() == [0, 2]
    w.set_(x)
    w.add_(1)
    assert x.tolist() == [1, 2, 3, 4] and w._version == 2
    w.requires_grad_()
    (w * w).sum().backward()
    assert w.grad is not None and w.grad.tolist() == [2, 4, 6, 8]


def test_writes_to_a_copy_and_to_its_views_are_counted_together() -> None:
    x = torch.ones(4, device="lazy")

    def run() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        y = x + 1
        return y, y[:2], y.detach()

    y, view, twin = followed(run)
    view.mul_(3)
    assert y._version == view._version == twin._version == 1 and view._base is y
    assert y.tolist() == [6, 6, 2, 2]


def test_under_inference_mode_they_are_tensors_of_it() -> None:
    x = torch.ones(4, 2, device="lazy")

    def run() -> tuple[torch.Tensor, torch.Tensor]:
        with torch.inference_mode():
            return x + 1, x.t()

    followed(lambda: (x + 1, x.t()))
    made, view = followed(run)
    assert made.is_inference() and not view.is_inference()


def test_nobody_finds_what_they_are_copied_from() -> None:
    x = torch.ones(4, 3, device="lazy")
    kept = followed(lambda: x + 1)
    assert kept._geometry.prototype is not None
    gc.collect()
    found = [thing for thing in gc.get_objects() if type(thing) is LazyTensor]
    assert any(thing is kept for thing in found) and all(thing._storage_ is not None for thing in found)


def test_what_is_copied_goes_with_its_geometry() -> None:
    assert copies is not None
    freed: list[int] = []

    class Told(torch.Tensor):
        __torch_dispatch__ = LazyTensor.__torch_dispatch__

        def __del__(self) -> None:
            freed.append(1)

    geom = geometry((3, 1, 4, 1, 5), (20, 20, 5, 5, 1), 0, torch.float64, LAZY, "cpu")
    geom.making = (Told, *making(geom)[1:])
    geom.prototype = prototype_of(geom, copies).for_native()
    del geom
    gc.collect()
    assert freed == [1]


def test_copies_that_are_not_the_same_are_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "is_same", lambda copy, geom, copies: not geom.offset and is_same(copy, geom, copies))
    steps = NativeSteps(recorder, recorder.native_steps.general_detach)
    assert steps.walk is not None and steps.copies is None


def test_other_versions_of_torch_are_not_relied_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.99.0")
    steps = NativeSteps(recorder, recorder.native_steps.general_detach)
    assert steps.walk is not None and steps.copies is None
