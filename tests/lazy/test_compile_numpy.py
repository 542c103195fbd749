"""Memory that a compiled call shares with NumPy: what it reads, writes and makes there is what eager would see."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torchlazy

STAGE = np.zeros(2, np.float32)
STAGED = torch.from_numpy(STAGE)


def ones() -> np.ndarray:
    return np.ones(2, np.float32)


def an_array_of_what_is_written_later(x):
    y = x.clone()
    array = y.numpy()
    y.add_(1)
    return float(array[0])


def an_array_that_is_written_later(x):
    array = ones()
    y = torch.from_numpy(array) + x
    array[:] = 3
    return y


def an_array_that_is_written_before(x):
    array = ones()
    tensor = torch.from_numpy(array)
    array[:] = 3
    return tensor * x, torch.from_numpy(array)[1:] * x


def a_copy_of_an_array(x):
    array = ones()
    y = torch.tensor(array) * x
    array[:] = 3
    return y


def a_buffer_that_is_filled_anew(x):
    array, made = ones(), []
    for turn in range(3):
        array[:] = turn
        made.append(torch.from_numpy(array) + x)
    return torch.stack(made)


def a_buffer_of_the_module(x):
    made = []
    for turn in range(3):
        STAGE[:] = turn
        made.append(STAGED + x)
    return torch.stack(made)


def an_operator_writes_to_an_array(x):
    array = ones()
    torch.from_numpy(array).mul_(x)
    return float(array[0])


def another_writes_with_out(x):
    array = ones()
    torch.add(x, 1, out=torch.from_numpy(array))
    return float(array[0])


def a_number_of_an_array(x):
    array = ones()
    tensor = torch.from_numpy(array)
    array[:] = 3
    return x * float(tensor[0])


def places_of_an_array(x):
    array = np.ones(2, np.bool_)
    mask = torch.from_numpy(array)
    first = x[mask]
    array[0] = False
    return first, x[mask], mask.nonzero()


def a_result_on_an_array(x):
    array = ones()
    tensor = torch.from_numpy(array)
    array[:] = 5
    return tensor, x + tensor


def a_gradient_through_an_array(x):
    weight = x.clone().requires_grad_()
    array = ones()
    loss = (torch.from_numpy(array) * weight).sum()
    array[:] = 3
    loss.backward()
    return weight.grad


WRITTEN = [
    an_array_of_what_is_written_later, an_array_that_is_written_later, an_array_that_is_written_before,
    a_copy_of_an_array, a_buffer_that_is_filled_anew, a_buffer_of_the_module, an_operator_writes_to_an_array,
    another_writes_with_out, a_number_of_an_array, places_of_an_array, a_result_on_an_array,
    a_gradient_through_an_array,
]  # fmt: skip
READ = {
    "computed": lambda x: float((x * 2).numpy().sum()),
    "detached": lambda x: float(x.detach().numpy().sum()),
    "a view of it": lambda x: float(x[0].numpy()),
    "as an array": lambda x: float(np.asarray(x * 3).sum()),
    "a copy": lambda x: float(np.array(x * 3).sum()),
    "by DLPack": lambda x: float(np.from_dlpack(x * 3).sum()),
    "a NumPy function": lambda x: x + float(np.sin(x * 3).sum()),
    "accuracy": lambda x: int((torch.stack([x, 1 / x], 1).argmax(1).cpu().numpy() == 1).sum()),
    "bytes": lambda x: bytes((x * 2).untyped_storage()),
    "address": lambda x: (x * 2).data_ptr() > 0,
    "a branch": lambda x: x * 2 if (x + 1).numpy()[0] > 2 else x * 3,
}


def plain(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return value.tolist() if isinstance(value, torch.Tensor) else value


def check(function: Any, run: Any) -> None:
    for turn in range(7):
        x = torch.tensor([0.5 + turn, 3.0 - turn / 2])
        want = plain(function(x.clone()))
        assert plain(run(x)) == want, turn
        assert x.tolist() == [0.5 + turn, 3.0 - turn / 2]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("door", ["compiled", "compiled in the mode", "the mode"])
@pytest.mark.parametrize("function", [*WRITTEN, *READ.values()], ids=[*(f.__name__ for f in WRITTEN), *READ])
def test_as_in_eager(function, door):
    run = function if door == "the mode" else torchlazy.compile(function)
    check(function, run if door == "compiled" else torchlazy.lazy_mode()(run))


@pytest.mark.parametrize("function", READ.values(), ids=READ)
@pytest.mark.parametrize("device", ["cpu", "lazy"])
def test_reads_have_their_line(function, device):
    run = torchlazy.compile(function)
    with pytest.warns(RuntimeWarning, match=r"its Python reads a value on the host \(\w+\); .*test_compile_numpy"):
        for _ in range(4):
            run(torch.ones(2).to(device))


def test_what_is_made_of_arrays_is_replayed():
    for function in WRITTEN[1:5]:
        run = torchlazy.compile(function)
        check(function, run)
        assert run.report().replays, function
