"""Pickles, files and deep copies of lazy tensors: windows keep where they lie, and what shares memory in one file
shares it when it is read, as in eager."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torchlazy
from torch import Tensor, nn

pytestmark = pytest.mark.usefixtures("operator_by_operator")


def pickled(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))


def saved(value: Any, **how: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, **how)


WAYS = [pickled, saved, copy.deepcopy]


def windows(data: Tensor) -> list[Tensor]:
    rows = data[1:]
    return [rows[:, 1:3], rows, data, data.t()[::2], data.view(-1).expand(2, 12)[0], data[:0], data[2, 3]]


def parts(data: Tensor) -> list[Tensor]:
    numbers = torch.complex(data, data + 1)
    return [numbers[1:], numbers, numbers.t().conj()]


def negative_parts(data: Tensor) -> list[Tensor]:
    numbers = torch.complex(data, data + 1)
    return [numbers.conj().imag[1:], numbers.real, numbers.imag.t()]


def leaves(data: Tensor) -> list[Tensor]:
    window = data[::2].requires_grad_()
    return [window, nn.Parameter(data[1]), data]


def written_before(data: Tensor) -> list[Tensor]:
    window = data[:, 1]
    data.mul_(2)
    window.add_(1)
    return [window, data]


def _facts(tensors: list[Tensor]) -> list[Any]:
    return [
        (t.shape, t.stride(), t.storage_offset(), t.dtype, t.requires_grad, t.is_leaf, t.is_conj()) for t in tensors
    ]


def _numbers(tensors: list[Tensor]) -> list[Tensor]:
    return [t.detach().cpu().resolve_conj().resolve_neg().clone() for t in tensors]


@pytest.mark.parametrize("make", [windows, parts, negative_parts, leaves, written_before])
@pytest.mark.parametrize("way", WAYS)
def test_read_as_eager_reads_it(make: Callable[[Tensor], list[Tensor]], way: Callable[[Any], Any]) -> None:
    found, expected = (way(make(torch.arange(12.0).reshape(3, 4).to(device))) for device in ("lazy", "cpu"))
    assert all(torchlazy.is_lazy(tensor) for tensor in found)
    assert _facts(found) == _facts(expected)
    assert [isinstance(t, nn.Parameter) for t in found] == [isinstance(t, nn.Parameter) for t in expected]
    torch.testing.assert_close(_numbers(found), _numbers(expected))
    for one, other in zip(found, expected, strict=True):  # who shares memory shows
        for tensor in (one, other):
            tensor.data.add_(100)
        torch.testing.assert_close(_numbers(found), _numbers(expected))


@pytest.mark.parametrize("device", ["cpu", "lazy"])
def test_on_another_device_it_is_shared_too(device: str) -> None:
    data = torch.arange(12.0).reshape(3, 4).to("lazy")
    window, whole = saved([data[1:, 1:], data], map_location=device)
    assert window.device.type == device and (window.storage_offset(), window.stride()) == (5, (4, 1))
    window.zero_()
    assert whole.sum().item() == 0 + 1 + 2 + 3 + 4 + 8


def test_two_files_and_two_loads_have_memory_of_their_own() -> None:
    data = torch.arange(4.0).to("lazy")
    first = pickle.dumps(data[1:])
    data.add_(10)
    second = pickle.dumps(data[1:])
    one, other, again = pickle.loads(first), pickle.loads(second), pickle.loads(second)
    other.zero_()
    assert one.tolist() == [1, 2, 3] and again.tolist() == [11, 12, 13] and data.tolist() == [10, 11, 12, 13]


def test_a_held_piece_of_a_pickle_does_not_hide_a_later_write() -> None:
    data = torch.arange(4.0).to("lazy")
    step = torchlazy.compile(lambda: data.mul_(2))
    held = []
    for turn in range(1, 6):
        held.append(data[1:].__reduce_ex__(2))
        assert data[2:].__reduce_ex__(2)[1][0].tolist() == [2 * 2 ** (turn - 1), 3 * 2 ** (turn - 1)]
        step()


def test_a_tied_module_is_tied_when_it_is_read() -> None:
    module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)).to("lazy")
    module[1].weight = module[0].weight
    for way in WAYS:
        read = way(module) if way is not saved else way(module.state_dict())
        one, other = (read[0].weight, read[1].weight) if way in (pickled, copy.deepcopy) else list(read.values())[::2]
        one.data.zero_()
        assert not other.any()


@pytest.mark.usefixtures("device_in_python")
def test_files_of_the_old_format_are_refused() -> None:
    file, data = io.BytesIO(), torch.arange(4.0)
    with pytest.raises(RuntimeError, match="old format"):
        torch.save(data.to("lazy"), file, _use_new_zipfile_serialization=False)
    file.seek(0)
    torch.save(data, file, _use_new_zipfile_serialization=False)
    file.seek(0)
    with pytest.raises(RuntimeError, match="old format"):
        torch.load(file, map_location="lazy")
    file.seek(0)
    assert torch.equal(torch.load(file, map_location="cpu").to("lazy").cpu(), data)
