"""Tensors and layers in `lazy_mode()` that are recorded in part, or not at all, take part with the right values."""

from __future__ import annotations

import contextlib
import ctypes
import re

import pytest
import torch
import torchlazy
from torch import nn

from tests.lazy.models import same


def test_recurrent_layers_without_gradients():
    """oneDNN's operator for them takes sizes as numbers: it must not be tried on tensors of other sizes."""
    for layer in (torch.nn.LSTM(8, 16, batch_first=True), torch.nn.LSTM(4, 8, num_layers=2, bidirectional=True)):
        x = torch.randn(3, 5, layer.input_size)
        with torch.no_grad():
            want = layer(x)[0]
            with torchlazy.lazy_mode():
                got = layer(x)[0]
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("options", [{}, {"num_layers": 2, "bidirectional": True}, {"bias": False}])
def test_recurrent_layers_in_training(options):
    """How large oneDNN's workspace is, only the kernel knows; the fake kernel promises none."""
    layer = torch.nn.LSTM(4, 6, batch_first=True, **options)
    for length in (3, 3, 5):
        x = torch.randn(2, length, 4)
        found = []
        for mode in (contextlib.nullcontext(), torchlazy.lazy_mode()):
            layer.zero_grad()
            with mode:
                out, (hidden, cell) = layer(x)
                (out.square().sum() + hidden.sum() + cell.sum()).backward()
            found.append([out.detach(), *(p.grad for p in layer.parameters())])
        torch.testing.assert_close(found[1], found[0])


def _padded(layout):
    tensors = [torch.ones(2, 3), torch.full((4, 3), 2.0)]
    nested = torch.nested.nested_tensor(tensors, layout=layout)
    return torch.nested.to_padded_tensor(nested * 2, 0.5)


def _through_a_layer():
    torch.manual_seed(0)
    layer = nn.Linear(3, 2)
    nested = torch.nested.nested_tensor([torch.ones(2, 3), torch.full((4, 3), 2.0)])
    padded = torch.nested.to_padded_tensor(layer(nested), 0.0)
    padded.square().sum().backward()
    return padded.detach(), layer.weight.grad


def _quantized():
    found = torch.quantize_per_tensor(torch.linspace(-1, 1, 5) * 2, 0.1, 0, torch.qint8)
    return found.int_repr(), found.dequantize() + 1


def _sparse():
    sparse = (torch.eye(3).to_sparse() * 2).coalesce()
    weight = torch.ones(3, 2, requires_grad=True)
    torch.sparse.mm(sparse, weight).square().sum().backward()
    return sparse.values() + 1, sparse.to_dense(), sparse.indices(), weight.grad


def _packed(total_length=None, batch_first=False):
    torch.manual_seed(0)
    layer = nn.GRU(3, 4, bidirectional=True)
    x = torch.randn(5, 4, 3, requires_grad=True)
    packed, _ = layer(nn.utils.rnn.pack_padded_sequence(x, [5, 3, 3, 1]))
    padded, lengths = nn.utils.rnn.pad_packed_sequence(packed, batch_first, 0.25, total_length)
    padded.square().sum().backward()
    return padded.detach(), lengths, x.grad, layer.weight_ih_l0.grad


def _split(method):
    x = torch.arange(20.0).reshape(5, 4) * 2
    points = torch.tensor([1, 2]) + 1
    split = x.tensor_split if method else (lambda *args, **kwargs: torch.tensor_split(x, *args, **kwargs))
    sections = torch.tensor(2)
    return *split(points), *split(points, dim=1), *split(sections, 1), *split([1, 3]), *split(3)


def _written_out():
    made, rank, wider = torch.zeros(4, 6), torch.zeros((), dtype=torch.int64), torch.zeros(2, 2, dtype=torch.float64)
    torch.kron(torch.arange(4.0).reshape(2, 2), torch.ones(2, 3), out=made)
    torch.linalg.matrix_rank(torch.eye(3), out=rank)
    torch.kron(torch.ones(2, 1), torch.ones(1, 2), out=wider)
    return (
        made * 1,
        rank * 1,
        wider,
        torch.kron(torch.ones(2), torch.ones(2)),
        torch.linalg.matrix_rank(torch.ones(3, 3)),
    )


OTHER_KINDS = {
    "written_out": _written_out,
    "split_at_a_tensor": lambda: _split(False),
    "method_split_at_a_tensor": lambda: _split(True),
    "nested": lambda: _padded(torch.strided),
    "jagged": lambda: _padded(torch.jagged),
    "nested_through_a_layer": _through_a_layer,
    "quantized": _quantized,
    "sparse": _sparse,
    "packed": _packed,
    "packed_longer": lambda: _packed(total_length=7, batch_first=True),
}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("kind", OTHER_KINDS)
def test_other_kinds_of_tensors_take_part(kind):
    torchlazy.config.rng = "eager"
    want = OTHER_KINDS[kind]()
    for _ in range(3):
        with torchlazy.lazy_mode():
            have = OTHER_KINDS[kind]()
        same(have, want)


def test_tensors_made_after_the_same_ones_on_the_lazy_device() -> None:
    for _ in range(2):  # the second is followed
        torch.ones(4, device="lazy").add_(1)
        torchlazy.sync()
    with torchlazy.lazy_mode():
        made = torch.ones(4, device="cpu")
        assert made.device.type == "cpu"
        later = made.add_(1)
    assert later.device.type == "cpu" and later.tolist() == [2.0] * 4


def test_a_storage_that_is_copied_is_there_at_once() -> None:
    """Files are written from the storage's own memory, which no operator reads (for a GPU from a copy on the host)."""

    def values(storage: torch.UntypedStorage) -> list[float]:
        return list((ctypes.c_float * 4).from_address(storage.data_ptr()))

    with torchlazy.lazy_mode():
        t = torch.arange(4.0) * 2
        copy = t.untyped_storage().clone()
        assert values(copy) == [0, 2, 4, 6]
        t.add_(1)
        assert values(torch.UntypedStorage(16).copy_(t.untyped_storage())) == [1, 3, 5, 7]
        assert values(copy) == [0, 2, 4, 6]


@pytest.mark.skipif(torch.cuda.is_available(), reason="a host with a GPU has pinned memory")
def test_pinned_memory_is_refused_where_eager_refuses_it():
    with pytest.raises(RuntimeError) as eager:
        torch.rand(2, pin_memory=True)
    with torchlazy.lazy_mode(), pytest.raises(RuntimeError, match=re.escape(str(eager.value))):
        torch.rand(2, pin_memory=True)
