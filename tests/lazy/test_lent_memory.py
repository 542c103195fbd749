"""Memory that sparse, nested, quantized tensors or raw storages hold, too: whoever reads it sees all writes.

Eager on the CPU is the oracle; each program runs on the lazy device, in `lazy_mode()` and, in part, as a compiled call.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torchlazy
from torch import Tensor

from tests.lazy.models import same

pytestmark = [
    pytest.mark.usefixtures("operator_by_operator"),
    pytest.mark.filterwarnings("ignore:Sparse", "ignore:TypedStorage", "ignore:.*nested tensors is in prototype"),
    pytest.mark.filterwarnings("ignore:torchlazy.compile.*runs its Python"),
]
Program = Callable[[str], list[Any]]


def coo(device: str) -> list[Any]:
    places, values = torch.tensor([[0, 1]]).to(device) * 1, torch.ones(2, device=device) * 1
    before = values * 2  # pending, on memory that is given away
    sparse = torch.sparse_coo_tensor(places, values, (2,))
    values.mul_(5)
    found = [before, sparse.to_dense()]
    later = values * 2
    sparse.mul_(2)
    found += [later, values * 1, sparse.to_dense()]
    sparse._values().add_(1)
    found += [values * 1]
    places.copy_(torch.tensor([[1, 0]]).to(device))
    values[0] = 7
    return [*found, sparse.to_dense()]


def compressed(make: Callable[..., Tensor], columns: bool) -> Program:
    def program(device: str) -> list[Any]:
        ends, places = torch.tensor([0, 1, 2]).to(device) * 1, torch.tensor([0, 1]).to(device) * 1
        values = torch.ones(2, device=device) * 1
        sparse = make(ends, places, values, (2, 2))
        values.mul_(5)
        found = [sparse.to_dense()]
        sparse.values().mul_(2)
        found += [values * 1, sparse.to_dense()]
        places.copy_(torch.tensor([1, 0]).to(device))
        found += [sparse.to_dense()]
        (sparse.col_indices() if columns else sparse.row_indices()).copy_(torch.tensor([0, 1]))
        return [*found, places * 1]

    return program


def blocks(device: str) -> list[Any]:
    ends, places = torch.tensor([0, 1, 2]).to(device), torch.tensor([0, 1]).to(device)
    values = torch.ones(2, 1, 1, device=device) * 1
    sparse = torch.sparse_bsr_tensor(ends, places, values, (2, 2))
    values.mul_(5)
    found = [sparse.to_dense()]
    sparse.values().mul_(2)
    return [*found, values * 1, sparse.to_dense()]


def nested(layout: torch.layout) -> Program:
    def program(device: str) -> list[Any]:
        rows = [torch.ones(2, device=device), torch.ones(1, device=device)]
        made = torch.nested.nested_tensor(rows, layout=layout)
        made.values().mul_(3)
        found = [torch.nested.to_padded_tensor(made, 0.0)]
        later = made.values() * 1
        made.mul_(2)
        found += [later, made.values() * 1]
        made.unbind()[0].add_(1)
        return [*found, torch.nested.to_padded_tensor(made, 0.0)]

    return program


def quantized(device: str) -> list[Any]:
    scales, zeros = torch.tensor([0.1, 0.2], dtype=torch.float64).to(device) * 1, torch.zeros(2, dtype=torch.int64)
    made = torch.quantize_per_channel(torch.ones(2, 2, device=device), scales, zeros.to(device), 0, torch.qint8)
    found = [made.dequantize().clone()]
    scales.mul_(2)
    found += [made.dequantize().clone()]
    made.q_per_channel_scales().mul_(2)
    return [*found, made.dequantize().clone(), scales * 1]


def sparse_gradients(device: str) -> list[Any]:
    layer = torch.nn.Embedding.from_pretrained(torch.ones(5, 2), freeze=False, sparse=True).to(device)
    optimizer = torch.optim.SparseAdam(layer.parameters(), lr=0.1)
    places, found = torch.tensor([1, 2]).to(device), []
    for _ in range(3):
        layer(places).sum().backward()
        gradient = layer.weight.grad.coalesce()
        gradient.values().clamp_(-0.1, 0.1)
        found.append(gradient.to_dense())
        optimizer.step()
        optimizer.zero_grad()
        places.add_(1).remainder_(5)
        found.append(layer.weight.detach() * 1)
    return found


def raw(device: str) -> list[Any]:
    x = torch.ones(3, device=device) * 1
    memory = x.untyped_storage()
    x.add_(1)
    found = [memory.tolist(), torch.tensor([], device=device).set_(memory) * 1]
    later = x * 2
    memory.fill_(0)
    found += [later, x * 1]
    window = torch.tensor([], device=device).set_(memory, 1, (2,), (1,))
    window.add_(4)
    found += [x * 1, memory.tolist(), memory.nbytes()]
    typed = x.storage()
    x.view(-1)[2:].mul_(3)
    found += [typed.tolist(), typed[2]]
    typed[1] = 9
    found += [x * 1, window * 1]
    del memory, typed
    x.add_(1)
    return [*found, x * 1, window * 1]


def raw_of_lists(device: str) -> list[Any]:
    x, y = torch.ones(4, device=device) * 1, torch.ones(4, device=device)
    first, second, found = x.untyped_storage(), y.storage(), []
    for _ in range(5):  # known after the second
        torch._foreach_mul_([x, y], 2.0)
        torch._foreach_add_([x, y], 1.0)
        x.add_(y)
        found += [first.tolist(), second.tolist()]
    torch.add(x, 1, out=y)
    return [*found, second.tolist()]


def raw_outlives(device: str) -> list[Any]:
    x = torch.ones(3, device=device) * 2
    memory = x.untyped_storage()
    del x
    one, other = (torch.tensor([], device=device).set_(memory) for _ in range(2))
    one.add_(1)
    return [other * 1, memory.tolist()]


def copied_deeply(device: str) -> list[Any]:
    x = torch.ones(3, device=device) * 2
    part, found = x[1:], []
    one, memory, window = copy.deepcopy([x, x.storage(), part])
    one.add_(1)
    found += [memory.tolist(), window * 1]
    memory[1] = 7
    found += [one * 1, window * 1, x * 1]
    memory, window, one = copy.deepcopy([x.untyped_storage(), part, x])
    window.add_(1)
    return [*found, one * 1, memory.tolist(), x * 1]


def training(device: str) -> list[Any]:
    weight = torch.nn.Parameter(torch.ones(3, device=device))
    optimizer = torch.optim.SGD([weight], lr=0.25)
    memory, found = weight.storage(), []
    for _ in range(4):
        (weight * weight).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(memory.tolist())
    return found


PROGRAMS: dict[str, Program] = {
    "coo": coo,
    "csr": compressed(torch.sparse_csr_tensor, True),
    "csc": compressed(torch.sparse_csc_tensor, False),
    "bsr": blocks,
    "nested": nested(torch.strided),
    "jagged": nested(torch.jagged),
    "quantized": quantized,
    "sparse_gradients": sparse_gradients,
    "raw": raw,
    "raw_of_lists": raw_of_lists,
    "raw_outlives": raw_outlives,
    "copied_deeply": copied_deeply,
    "training": training,
}


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("door", ["lazy", "mode"])
def test_others_see_every_write(name: str, door: str) -> None:
    if (name, door) == ("jagged", "lazy"):
        pytest.skip("torch makes no jagged tensors of lazy ones")
    want = PROGRAMS[name]("cpu")
    with torchlazy.lazy_mode() if door == "mode" else contextlib.nullcontext():
        found = PROGRAMS[name]("lazy" if door == "lazy" else "cpu")
    same([x.detach().cpu() if isinstance(x, Tensor) else x for x in found], want)


def test_a_consumer_of_dlpack_shares_memory_with_the_lazy_device() -> None:
    x = torch.ones(3, device="lazy") * 2
    consumer = torch.from_dlpack(x)
    x.add_(1)
    assert consumer.tolist() == [3.0] * 3
    consumer.mul_(2)
    assert (x + 0).tolist() == [6.0] * 3


def test_numbers_written_through_numpy_come_after_what_was_recorded() -> None:
    with torchlazy.lazy_mode():
        x = torch.ones(3) * 2
        torchlazy.sync()
        before = x * 2
        x.numpy()[:] = 5
        assert before.tolist() == [4.0] * 3 and x.tolist() == [5.0] * 3


def test_memory_that_nobody_else_holds_any_more_is_recorded_as_ever() -> None:
    x = torch.ones(3, device="lazy") * 2
    assert x.untyped_storage().nbytes() == 12
    memory = x.untyped_storage()
    x.add_(1)
    del memory
    torchlazy.reset_metrics()
    x.add_(1).mul_(2)
    assert torchlazy.metrics()["traces"] == 0
    assert x.tolist() == [8.0] * 3


# ---------------------------------------------------------------- compiled calls

Call = tuple[Callable[[Tensor], Tensor], Callable[[], list[Any]]]


def _held(device: str) -> tuple[Tensor, Tensor]:
    values = torch.ones(3, device=device) * 1
    return values, torch.sparse_coo_tensor(torch.tensor([[0, 1, 2]]).to(device), values, (3,))


def written(device: str) -> Call:
    values, sparse = _held(device)
    return lambda x: values.add_(x) * 2, lambda: [sparse.to_dense(), values * 1]


def written_by_its_values(device: str) -> Call:
    values, sparse = _held(device)

    def call(x: Tensor) -> Tensor:
        sparse._values().add_(x.cpu())
        return values * 2 + x

    return call, lambda: [sparse.to_dense(), values * 1]


def read_inside(device: str) -> Call:
    values, sparse = _held(device)

    def call(x: Tensor) -> Tensor:
        values.add_(x)
        return sparse.to_dense() * 2

    return call, lambda: [sparse.to_dense(), values * 1]


def made_inside(device: str) -> Call:
    values, places = torch.ones(3, device=device) * 1, torch.tensor([[0, 1, 2]]).to(device)

    def call(x: Tensor) -> Tensor:
        sparse = torch.sparse_coo_tensor(places, values, (3,))
        values.add_(x)
        return sparse.to_dense() * 2

    return call, lambda: [values * 1]


def raw_read_inside(device: str) -> Call:
    values = torch.ones(3, device=device) * 1
    memory = values.storage()

    def call(x: Tensor) -> Tensor:
        values.add_(x)
        return torch.tensor(memory.tolist()) * 2

    return call, lambda: [memory.tolist(), values * 1]


def raw_written_between(device: str) -> Call:
    values, held = torch.ones(3, device=device) * 1, []

    def between() -> list[Any]:
        held[:] = held or [values.storage()]
        held[0][0] = 0.5
        return [held[0].tolist(), values * 1]

    return lambda x: values.add_(x) * 2, between


def jagged_inside(device: str) -> Call:
    made = torch.nested.nested_tensor([torch.ones(2), torch.ones(1)], layout=torch.jagged)

    def call(x: Tensor) -> Tensor:
        made.values().add_(x.cpu())
        return torch.nested.to_padded_tensor(made, 0.0) + 0

    return call, lambda: [made.values() * 1]


@pytest.mark.parametrize(
    "make",
    [
        written, written_by_its_values, read_inside, made_inside, raw_read_inside, raw_written_between, jagged_inside,
    ],
)  # fmt: skip
@pytest.mark.parametrize("door", ["cpu", "lazy", "mode", "dynamo"])
def test_compiled_calls(make: Callable[[str], Call], door: str) -> None:
    def play(door: str) -> list[Any]:
        device = "lazy" if door in ("lazy", "dynamo") else "cpu"
        call, look = make(device)
        if door != "eager":
            call = torch.compile(call, backend="torchlazy") if door == "dynamo" else torchlazy.compile(call)
        found = []
        for turn in range(5):
            with torchlazy.lazy_mode() if door == "mode" else contextlib.nullcontext():
                seen = [call(torch.full((3,), float(turn)).to(device)), *look()]
                found += [x.detach().cpu().clone() if isinstance(x, Tensor) else x for x in seen]
        return found

    same(play(door), play("eager"))
