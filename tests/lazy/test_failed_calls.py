"""Compiled calls that raise half-way: the state is what eager leaves, written before the error and not behind it."""

from __future__ import annotations

import pytest
import torch
import torchlazy


def _one_write_before_two_behind(first, second, index):
    first.add_(1)
    second.add_(second[index].sum())
    first.mul_(2)


def _several_windows(first, second, index):
    first[:2].add_(1)
    first.mul_(2)
    second.copy_(second.flip(0))
    first.add_(second[index].sum())


def _read_between(first, second, index):
    first.add_(1)
    second.add_(first.sum().item())
    second.mul_(0.01).add_(second[index].sum())
    first.mul_(0.5)


def _fails_in_a_read(first, second, index):
    first.add_(1)
    second.mul_(0.5)
    second.add_(second[index].sum().item())
    first.mul_(3)


def _written_over_behind(first, second, index):
    first.add_(1)
    found = second[index]
    first.add_(found.sum())
    first[0] = 5
    second.zero_().add_(3)


CALLS = (_one_write_before_two_behind, _several_windows, _read_between, _fails_in_a_read, _written_over_behind)


@pytest.mark.parametrize("device", ["lazy", "cpu"])
@pytest.mark.parametrize("call", CALLS)
def test_writes_before_the_failing_operator_stand(compiled, call, device):
    _compare(call, device)


@pytest.mark.parametrize("device", ["lazy", "cpu"])
@pytest.mark.parametrize("call", CALLS)
def test_operator_by_operator_too(operator_by_operator, call, device):
    _compare(call, device)


def _compare(call, device: str) -> None:
    run = torchlazy.compile(call)
    found = _play(run, device)
    assert found == _play(call, "cpu")


def _play(run, device: str) -> list[object]:
    told: list[object] = []
    first, second = torch.zeros(4).to(device), torch.arange(5.0).to(device)
    for position in (1, 2, 0, 1, 77, 1, 77):
        try:
            run(first, second, torch.tensor([position]).to(device))
            told.append("done")
        except IndexError:
            told.append("out of range")
        told += [first.cpu().tolist(), second.cpu().tolist()]
    return told
