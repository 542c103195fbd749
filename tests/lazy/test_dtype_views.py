"""Writes through views of another dtype: the storage's bytes are what they are in eager, recorded and followed."""

from __future__ import annotations

import pytest
import torch
import torchlazy

CASES = {
    "smaller": (8, torch.float32, torch.uint8, None, None),
    "larger": (16, torch.uint8, torch.int64, None, None),
    "larger, a part": (12, torch.int32, torch.int64, slice(4, 8), None),
    "beside a rest of the storage": (3, torch.int16, torch.int32, slice(0, 2), None),
    "at an offset, with a rest": (5, torch.int16, torch.int32, slice(2, 4), None),
    "as large, transposed": (6, torch.int32, torch.float32, None, (2, 3)),
    "complex as real": (6, torch.complex64, torch.float32, slice(1, 4), None),
    "real as complex": (6, torch.float32, torch.complex64, None, None),
}


def play(device, count, dtype, seen_as, part, shape):
    found = []
    for _ in range(4):
        whole = (torch.arange(count, device=device) * 37 % 101).to(dtype)
        base = whole if shape is None else whole.view(shape).t()
        view = (base if part is None else base[part]).view(seen_as)
        whole.add_(1)
        found.append(view.clone())
        view.mul_(2)
        view[..., :1].add_(3)
        found += [whole.clone(), base.clone()]
        view.copy_(view.flip(0))
        found.append(whole.clone())
    return found


@pytest.mark.parametrize("tiers", ["off", "on"])
@pytest.mark.parametrize("case", CASES)
def test_writes_reach_the_bytes(case, tiers, monkeypatch):
    monkeypatch.setattr(torchlazy.config, "tiers", tiers)
    for have, want in zip(play("lazy", *CASES[case]), play("cpu", *CASES[case]), strict=True):
        assert have.dtype == want.dtype
        assert have.shape == want.shape
        assert torch.equal(have.cpu().reshape(-1).view(torch.uint8), want.reshape(-1).view(torch.uint8))


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("kind", ["Adam", "AdamW", "SGD", "RMSprop", "Adagrad"])
def test_optimizers_of_complex_parameters(kind, foreach):
    """Their steps write through `view_as_real`, several parameters in one call."""

    def train(device):
        torch.manual_seed(0)
        weights = [torch.randn(n, 4, dtype=torch.complex64).to(device).requires_grad_() for n in (4, 3)]
        optimizer = getattr(torch.optim, kind)(weights, 0.1, foreach=foreach)
        for _ in range(4):
            loss = sum((torch.arange(4.0, device=device) @ w.mT.abs()).sum() for w in weights)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return [w.detach().cpu() for w in weights]

    for have, want in zip(train("lazy"), train("cpu"), strict=True):
        torch.testing.assert_close(have, want, rtol=1e-4, atol=1e-5)


RESULTS = {
    "real": lambda x: torch.view_as_real(torch.fft.fft(x, dim=0)),
    "part": lambda x: torch.fft.fft(x, dim=0).imag[1:],
    "transposed": lambda x: (x * 2).real.t().contiguous().t().view(torch.int32),
    "back": lambda x: torch.view_as_complex(torch.view_as_real(torch.fft.fft(x, dim=0)).clone())[:, 1:],
}


@pytest.mark.parametrize("device", ["cpu", "lazy"])
@pytest.mark.parametrize("name", RESULTS)
def test_results_of_replays_over_memory_that_lies_in_columns(name, device):
    run, given = RESULTS[name], torch.complex(torch.rand(4, 7), torch.rand(4, 7))
    want, compiled = run(given), torchlazy.compile(run)
    for _ in range(4):
        have = compiled(given.to(device))
        assert have.stride() == want.stride()
        torch.testing.assert_close(have.cpu(), want)
    assert compiled.report().replays > 0


HALVES = {
    "computed": lambda d: (torch.arange(8.0, device=d).bfloat16() + 1).view(torch.int16) + 1,
    "float16": lambda d: (torch.arange(8.0, device=d).half() * 1.5 + 1).view(torch.uint16).to(torch.int32),
    "from integers": lambda d: (torch.arange(8, device=d).to(torch.int16) * 1000).view(torch.bfloat16) * 2,
    "one half as the other": lambda d: (torch.arange(8.0, device=d).half() + 1).view(torch.bfloat16) * 2,
    "transposed": lambda d: (torch.arange(8.0, device=d).half() + 1).view(2, 4).t().view(torch.int16) + 1,
    "a part": lambda d: (torch.arange(8.0, device=d).half() + 1)[1::2].view(torch.int16) + 1,
    "bits of NaNs": lambda d: (
        (torch.arange(8, device=d).to(torch.int16) + 0x7F81).view(torch.bfloat16).view(torch.int16) + 1
    ),
    "written": lambda d: (lambda x: (x.view(torch.int16).add_(1), x)[1])(torch.arange(8.0, device=d).bfloat16() + 1),
}


@pytest.mark.parametrize("name", HALVES)
@pytest.mark.parametrize("door", ["lazy", "lazy_mode", "compile"])
def test_bits_of_halves(name, door, monkeypatch):
    monkeypatch.setattr(torchlazy.config, "tiers", "off")
    monkeypatch.setattr(torchlazy.config, "strict", True)
    program = HALVES[name]
    wanted = program("cpu")
    if door == "lazy_mode":
        with torchlazy.lazy_mode():
            found = program("cpu")
    else:
        call = torchlazy.compile(program) if door == "compile" else program
        found = [call("lazy") for _ in range(3)][-1]
    assert found.dtype == wanted.dtype and found.stride() == wanted.stride()
    torch.testing.assert_close(found.cpu(), wanted, rtol=0, atol=0)
