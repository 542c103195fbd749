"""Ordinary tensors that torch conjugates or negates by a bit, in `lazy_mode` and compiled calls: their values are
eager's, and so is what is written to them."""

from __future__ import annotations

import warnings
import weakref

import pytest
import torch
import torchlazy

CALLS = 6


def data(number=0):
    return torch.tensor([1 + 2j, 3 - 1j, -2 + 1j]) * (number + 1)


PROGRAMS = {
    "product": lambda x: x * 2 + 1,
    "copy": lambda x: x.clone(),
    "sum": lambda x: x.sum(),
    "stack": lambda x: torch.stack([x, x]),
    "part": lambda x: x[1:] * 1,
    "written": lambda x: x.add_(1)[0],
    "written at": lambda x: x[:1].fill_(7) + x[1:],
    "real form": lambda x: torch.view_as_real(x * 1) if x.is_complex() else x * 1,
    "parts": lambda x: (x.real * 2, x.imag + 1) if x.is_complex() else x.real * 2,
    "back": lambda x: x.conj() * 1,
}


def resolved(tree):
    return torch.utils._pytree.tree_map(lambda x: x.resolve_conj().resolve_neg() + 0, tree)


@pytest.mark.parametrize("make", [lambda i: data(i).conj(), lambda i: data(i).conj().imag], ids=["conj", "neg"])
@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("way", ["mode", "compiled"])
def test_bits_are_values(name, make, way, monkeypatch):
    monkeypatch.setattr(torchlazy.config, "tiers", "foreground")
    program = PROGRAMS[name]
    compiled = torchlazy.compile(program)
    warnings.simplefilter("ignore")  # some of them are not replayed
    for number in range(CALLS if way == "compiled" else 3):
        given, taken = make(number), make(number)
        expected = program(given)
        if way == "compiled":
            found = compiled(taken)
        else:
            with torchlazy.lazy_mode():
                found = program(taken)
        torch.testing.assert_close(resolved((found, taken)), resolved((expected, given)))


def test_a_conjugate_and_its_memory_are_one_in_lazy_mode():
    kept, plain = data(), data()
    conjugate, other = kept.conj(), plain.conj()
    for _ in range(3):
        with torchlazy.lazy_mode():
            kept.add_(1j)
            conjugate.mul_(2j)
            found = kept + conjugate
        plain.add_(1j)
        other.mul_(2j)
        torch.testing.assert_close(resolved((found, kept)), resolved((plain + other, plain)))


@pytest.mark.parametrize("device", ["cpu", "lazy"])
@pytest.mark.parametrize(
    "program",
    [
        lambda x: x.conj(),
        lambda x: (x.conj(), x),
        lambda x: x.reshape(1, 3).mH,
        lambda x: x.conj().imag,
        lambda x: (x.conj().resolve_conj().add_(1), x.conj_physical_()),
    ],
)
def test_a_replay_gives_the_conjugate_of_an_argument(program, device):
    compiled = torchlazy.compile(program)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for number in range(CALLS):
            found, expected = compiled(data(number).to(device)), program(data(number))
            moved = torch.utils._pytree.tree_map(lambda x: x.cpu(), found)
            torch.testing.assert_close(resolved(moved), resolved(expected))
    assert compiled.report().replays > 0


def gradient(x):
    """Torch makes it a view of what it conjugates: here, of memory that nobody else holds."""
    x.requires_grad_()
    return torch.autograd.grad(torch.fft.hfft(x).square().sum(), x)[0]


@pytest.mark.parametrize("device", ["cpu", "lazy"])
@pytest.mark.parametrize("program", [gradient, lambda x: (x * 2).conj()])
def test_a_replay_gives_the_conjugate_of_what_it_made(program, device):
    compiled = torchlazy.compile(program)
    for number in range(CALLS):
        found, expected = compiled(data(number).to(device)), program(data(number))
        torch.testing.assert_close(resolved(found.cpu()), resolved(expected))
    assert compiled.report().replays > 0


class Owner:
    pass


KEPT = weakref.WeakKeyDictionary()  # no guard looks into it


def test_a_conjugate_of_what_is_kept_unseen_has_no_template():
    owner = Owner()

    def program(x):
        made = x * 2
        KEPT[owner] = made
        return made.conj()

    compiled = torchlazy.compile(program)
    for number in range(CALLS):
        found = compiled(data(number).to("lazy"))
        torch.testing.assert_close(resolved(found.cpu()), data(number).conj().resolve_conj() * 2)
        torch.testing.assert_close(KEPT[owner].cpu(), data(number) * 2)
