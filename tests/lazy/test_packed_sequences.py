"""Packed sequences in compiled modules that are trained: lengths that come again are replayed, others are noticed.

Invariant: values and parameters after each call are eager's, whatever the lengths; lengths with a write that waits are
read behind it.
"""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import torchlazy
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from tests.lazy.compare import data

pytestmark = pytest.mark.usefixtures("operator_by_operator")

LENGTHS = [(4, 3, 1), (4, 3, 1), (2, 4, 4)]


class Net(nn.Module):
    def __init__(self, batch_first: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.batch_first = nn.GRU(3, 2, batch_first=batch_first), batch_first

    def forward(self, x: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        rows = pack_padded_sequence(x.tanh(), lengths, self.batch_first, enforce_sorted=False)
        out, last = self.layer(rows)
        padded, lengths = pad_packed_sequence(out, self.batch_first, total_length=5)
        return padded, last, lengths


def _trained(net: Any, device: str, batch_first: bool) -> list[Any]:
    found = []
    for number in range(9):
        shape = (3, 5, 3) if batch_first else (5, 3, 3)
        x = data("cpu", *shape, seed=number).to(device).requires_grad_()
        padded, last, lengths = net(x, torch.tensor(LENGTHS[number % 3]))
        (padded.square().sum() + last.sum()).backward()
        assert x.grad is not None
        found.append([v.detach().cpu().clone() for v in (padded, last, lengths, x.grad, net.layer.weight_ih_l0.grad)])
        net.zero_grad()
    return found


@pytest.mark.parametrize("device", ["cpu", "lazy"])
@pytest.mark.parametrize("batch_first", [True, False])
def test_training_is_eagers(device: str, batch_first: bool) -> None:
    run = torchlazy.compile(Net(batch_first).to(device))
    have, want = _trained(run, device, batch_first), _trained(Net(batch_first), "cpu", batch_first)
    torch.testing.assert_close(have, want, rtol=1e-4, atol=1e-5)
    report = run.report()
    assert report.replays >= 1 and report.captures <= 4 and not report.verified and not report.alarm, str(report)


@pytest.mark.parametrize("device", ["cpu", "lazy"])
def test_lengths_that_vary_while_nothing_else_does(device: str) -> None:
    """In the mode, and on the lazy device."""
    torch.manual_seed(0)
    layer = nn.GRU(3, 2)

    def call(x: Tensor, lengths: Tensor) -> tuple[Tensor, ...]:
        packed = pack_padded_sequence((x * 2 + 1).tanh().sin(), lengths)
        assert packed.batch_sizes.device.type == "cpu" and packed.data.device == x.device
        padded, lengths = pad_packed_sequence(layer(packed)[0], total_length=5)
        assert lengths.device.type == "cpu"
        return packed.data * 3, padded, lengths

    for turn in range(12):
        x, lengths = data("cpu", 5, 3, 3, seed=turn), torch.tensor([(5, 3, 2), (5, 4, 1), (5, 5, 1)][turn % 3])
        with torch.no_grad():
            want = call(x, lengths)
            layer.to(device)
            with torchlazy.lazy_mode() if device == "cpu" else contextlib.nullcontext():
                have = call(x.to(device), lengths)
            layer.cpu()
        torchlazy.wait_for_compile()
        torch.testing.assert_close([one.cpu() for one in have], list(want), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("way", ["mode", "compiled"])
def test_lengths_are_read_behind_what_is_written_to_them(way: str) -> None:
    scores = data("cpu", 12, 2, 6).log_softmax(-1)

    def call(rows: Tensor, words: Tensor, at: Tensor) -> tuple[Tensor, ...]:
        for lengths in (rows, words, at):
            lengths.sub_(1)
        loss = F.ctc_loss(scores, torch.ones(2, 4, dtype=torch.int64), rows, words)
        parts = [part.sum() for part in torch.tensor_split(scores, at)]
        packed = pad_packed_sequence(pack_padded_sequence(scores, rows))[0]
        return loss, packed, *parts

    def arguments() -> list[Tensor]:
        return [torch.tensor(found) for found in ((12, 11), (4, 3), (3, 6))]

    want = call(*arguments())
    for run in [torchlazy.compile(call)] * 3 if way == "compiled" else [call]:
        with torchlazy.lazy_mode():
            have = run(*arguments())
        torch.testing.assert_close(have, want)


def test_packing_that_torch_refuses_is_torchs_error() -> None:
    run = torchlazy.compile(lambda x, lengths: pack_padded_sequence(x, lengths).data)
    x = data("cpu", 4, 2, 3)
    for lengths in ((2, 4), (0, 0), (4, 3, 1)):
        with pytest.raises(RuntimeError):
            run(x, torch.tensor(lengths))
    torch.testing.assert_close(run(x, torch.tensor((4, 1))), pack_padded_sequence(x, torch.tensor((4, 1))).data)
