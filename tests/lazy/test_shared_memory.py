"""lazy_mode beside others who hold a tensor's memory: NumPy arrays, DLPack, buffers, mapped files, other processes."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torchlazy
from torch import nn
from torchlazy.lazy.api import recorder

from tests.lazy.compare import Cases, compare

case = Cases()


def changed(*shape: int) -> tuple[np.ndarray, torch.Tensor]:
    array = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    return array, torch.from_numpy(array)


@case
def operators_read_what_is_there_now(path):
    array, x = changed(4)
    made = [x * 2, x[1:] + 1, torch.stack([x, x]), torch.cat([x, x]).sum(), torch.addmm(x, x[None], x.expand(4, 4))]
    array += 1
    yield made, x * 2, x[::2] * 3
    target = torch.zeros(4)
    target.copy_(x)
    torch.add(x, 1, out=(result := torch.empty(4)))
    array[:] = 0
    yield target, result, x


@case
def writes_are_there_at_once(path):
    array, x = changed(4)
    x.add_(1)
    yield array.copy()
    x[1] = 9
    x.view(2, 2)[1].mul_(3)
    yield array.copy()
    torch._foreach_add_([x, torch.ones(2)], 1)
    yield array.copy()
    buffer = bytearray(struct.pack("4f", 1, 2, 3, 4))
    y = torch.frombuffer(buffer, dtype=torch.float32)
    made = y + 1
    buffer[:4] = struct.pack("f", 7)
    yield made, y + 1
    y.mul_(2)
    yield bytes(buffer)


@case
def windows_keep_their_strides(path):
    array, x = changed(4, 6)
    windows = [x, x.t(), x.t()[1:3], x[:, 1:3], x.t()[1:3].expand(2, 2, 4), x[::2, ::3], x[:0], x.flatten()[5]]
    made = [window * 2 for window in windows]
    array[:] = 1
    yield made, [window * 2 for window in windows]


@case
def an_array_over_what_the_block_made(path):
    x = torch.arange(4.0) * 2
    array = x.numpy()
    made = x + 1
    array[0] = 5
    yield made, x, x + 1
    x += 1
    yield array.copy()
    copied = np.array(x)
    copied[:] = 0
    yield x, np.asarray(x, dtype=np.float64)


@case
def an_array_over_a_parameter(path):
    layer = nn.Linear(3, 2)
    with torch.no_grad():
        layer.weight.fill_(2), layer.bias.fill_(1)
        array = layer.weight.numpy()
        before = layer(torch.ones(1, 3))
        array[...] = 1
        yield before, layer(torch.ones(1, 3))
        layer.weight.mul_(3)
    yield array.copy()


@case
def dlpack_shares(path):
    x = torch.arange(4.0) * 2
    y = torch.from_dlpack(x)
    y += 1
    yield x, y
    x.mul_(2)
    yield y * 1
    array = np.from_dlpack(x)
    made = x + 1
    yield made, array.copy()
    yield torch.utils.dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(torch.ones(3) + 1))


@case
def dlpack_refuses_what_needs_a_gradient(path):
    for x in (torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True) * 2):
        with pytest.raises(BufferError, match="require gradient"):
            x.__dlpack__()
        yield x.detach()


@case
def mapped_files(path):
    name = str(path / "numbers")
    np.arange(32, dtype=np.float32).tofile(name)
    array = np.memmap(name, dtype=np.float32, mode="r+")
    x = torch.from_numpy(array)
    made = x * 2
    x[:4] = 9
    yield made, np.fromfile(name, dtype=np.float32)
    x = torch.from_file(name, shared=True, size=32, dtype=torch.float32)
    x.add_(1)
    yield x, np.fromfile(name, dtype=np.float32)


@case
def gradients_of_shared_inputs(path):
    array, x = changed(2, 3)
    layer = nn.Linear(3, 2)
    with torch.no_grad():
        layer.weight.fill_(0.5), layer.bias.fill_(0.25)
    layer(x).tanh().sum().backward()
    array[:] = 0
    yield layer.weight.grad, layer.bias.grad


@case
def under_inference_mode(path):
    with torch.inference_mode():
        array, x = changed(3)
        made = [x.reshape(3, 1), x.to(torch.float64), x.contiguous(), torch.einsum("i,j->ij", x, x)]
        array[:] = 0
        yield made


def frozen(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [frozen(item) for item in value]
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.tolist()
    return value.clone() if isinstance(value, torch.Tensor) else value


def played(function: Any, path: Any) -> list[Any]:
    return [frozen(value) for value in function(path)]


@case.parametrize()
def test_as_in_eager(f, tmp_path, tier):
    want = played(f, tmp_path)
    for _ in range(3):
        with torchlazy.lazy_mode():
            have = played(f, tmp_path)
        compare(have, want, ignore=("version",))


@pytest.mark.usefixtures("recorded_in_python")
def test_arrays_that_are_gone_share_nothing():
    def arrays() -> Iterator[np.ndarray]:
        for _ in range(3):
            yield torch.ones(3).add(1).numpy()

    with torchlazy.lazy_mode():
        held = list(arrays())
        assert len(recorder.shared._holders) == 3
        del held
        assert not recorder.shared._holders
        x = torch.ones(3) + 1
        x.numpy()
        torchlazy.reset_metrics()
        (x * 2 + x).add_(x)
        assert torchlazy.metrics()["cuts"] == {}
