"""Every way to make a tensor from nothing, on the lazy device as on the CPU."""

from __future__ import annotations

import numpy
import pytest
import torch
import torchlazy

from tests.lazy.compare import check, compare, data

FACTORIES = {
    "zeros": lambda d: torch.zeros(2, 3, device=d),
    "zeros of dtype": lambda d: torch.zeros((2, 3), dtype=torch.int32, device=d),
    "ones": lambda d: torch.ones(2, 0, 3, device=d),
    "ones of bool": lambda d: torch.ones(3, dtype=torch.bool, device=d),
    "empty": lambda d: torch.empty(2, 3, device=d).fill_(1),
    "empty channels_last": lambda d: torch.empty(2, 3, 4, 5, memory_format=torch.channels_last, device=d).zero_(),
    "empty_strided": lambda d: torch.empty_strided((2, 3), (1, 2), device=d).zero_(),
    "full": lambda d: torch.full((2, 3), 2.5, device=d),
    "full of int": lambda d: torch.full((2,), 7, device=d),
    "full of bool": lambda d: torch.full((2,), True, device=d),
    "full of complex": lambda d: torch.full((2,), 1 + 2j, device=d),
    "arange": lambda d: torch.arange(5, device=d),
    "arange of floats": lambda d: torch.arange(0.5, 3, 0.25, device=d),
    "arange with steps": lambda d: torch.arange(10, 2, -3, device=d),
    "arange of dtype": lambda d: torch.arange(4, dtype=torch.float64, device=d),
    "range": lambda d: torch.range(1, 4, device=d),
    "linspace": lambda d: torch.linspace(-1, 1, 7, device=d),
    "logspace": lambda d: torch.logspace(0, 2, 5, device=d),
    "eye": lambda d: torch.eye(3, 4, device=d),
    "tril_indices": lambda d: torch.tril_indices(3, 4, 1, device=d),
    "triu_indices": lambda d: torch.triu_indices(3, 3, device=d),
    "scalar_tensor": lambda d: torch.scalar_tensor(3.5, device=d),
    "tensor": lambda d: torch.tensor([[1, 2], [3, 4]], device=d),
    "tensor of floats": lambda d: torch.tensor([1.5, 2], dtype=torch.float16, device=d),
    "tensor of a scalar": lambda d: torch.tensor(3, device=d),
    "tensor of bools": lambda d: torch.tensor([True, False], device=d),
    "tensor of complex": lambda d: torch.tensor([1 + 2j], device=d),
    "tensor of nothing": lambda d: torch.tensor([], device=d),
    "tensor with grad": lambda d: torch.tensor([1.0], requires_grad=True, device=d),
    "tensor of numpy": lambda d: torch.tensor(numpy.arange(3, dtype=numpy.float32), device=d),
    "as_tensor": lambda d: torch.as_tensor([1, 2], device=d),
    "asarray": lambda d: torch.asarray([1.0, 2.0], device=d),
    "from_numpy": lambda d: torch.from_numpy(numpy.arange(6.0).reshape(2, 3)).to(d),
    "from_numpy transposed": lambda d: torch.from_numpy(numpy.arange(6.0).reshape(2, 3).T).clone().to(d),
    "empty_like": lambda d: torch.empty_like(data(d, 2, 3).t()).zero_(),
    "zeros_like": lambda d: torch.zeros_like(data(d, 2, 3), dtype=torch.int64),
    "ones_like on the device": lambda d: torch.ones_like(data("cpu", 2, 3), device=d),
    "full_like": lambda d: torch.full_like(data(d, 2, 3), 4),
    "new_empty": lambda d: data(d, 2).new_empty(3).zero_(),
    "new_zeros": lambda d: data(d, 2).new_zeros((2, 2), dtype=torch.int32),
    "new_ones": lambda d: data(d, 2).new_ones(3),
    "new_full": lambda d: data(d, 2).new_full((2,), 9),
    "new_tensor": lambda d: data(d, 2).new_tensor([1, 2]),
    "new_empty_strided": lambda d: data(d, 2).new_empty_strided((2, 2), (1, 2)).zero_(),
    "complex": lambda d: torch.complex(data(d, 3), data(d, 3)),
    "polar": lambda d: torch.polar(data(d, 3).abs(), data(d, 3)),
    "hann_window": lambda d: torch.hann_window(6, device=d),
    "hamming_window": lambda d: torch.hamming_window(6, periodic=False, device=d),
    "blackman_window": lambda d: torch.blackman_window(5, device=d),
    "bartlett_window": lambda d: torch.bartlett_window(5, device=d),
    "kaiser_window": lambda d: torch.kaiser_window(5, device=d),
    "one_hot of turned classes": lambda d: torch.nn.functional.one_hot(torch.arange(6, device=d).view(2, 3).t()),
    "one_hot": lambda d: torch.nn.functional.one_hot(torch.tensor([0, 2], device=d), 3),
    "meshgrid": lambda d: torch.meshgrid(torch.arange(2, device=d), torch.arange(3, device=d), indexing="ij"),
    "cartesian_prod": lambda d: torch.cartesian_prod(torch.arange(2, device=d), torch.arange(2, device=d)),
    "vander": lambda d: torch.vander(torch.arange(3, device=d)),
    "fftfreq": lambda d: torch.fft.fftfreq(5, device=d),
    "block_diag": lambda d: torch.block_diag(torch.ones(1, 2, device=d), torch.ones(2, 1, device=d)),
    "_efficientzerotensor": lambda d: torch._efficientzerotensor((2, 3), device=d) + 0,
}


@pytest.mark.parametrize("name", FACTORIES)
def test_as_in_eager(name, tier):
    check(FACTORIES[name], ignore=("version",))


RANDOM = {
    "rand": lambda d: torch.rand(2, 3, device=d),
    "randn": lambda d: torch.randn(2, 3, dtype=torch.float64, device=d),
    "randint": lambda d: torch.randint(3, 9, (2, 3), device=d),
    "randperm": lambda d: torch.randperm(6, device=d).sort().values,
    "normal": lambda d: torch.normal(2.0, 3.0, (4,), device=d),
    "rand_like": lambda d: torch.rand_like(data(d, 2, 3).t()),
    "randn_like": lambda d: torch.randn_like(data(d, 2, 3)),
    "randint_like": lambda d: torch.randint_like(data(d, 2, 3), 5),
    "bernoulli": lambda d: torch.bernoulli(torch.full((3,), 0.5, device=d)),
    "multinomial": lambda d: torch.multinomial(torch.ones(5, device=d), 3),
    "poisson": lambda d: torch.poisson(torch.ones(5, device=d)),
    "complex": lambda d: torch.randn(3, dtype=torch.complex64, device=d),
    "half": lambda d: torch.rand(3, dtype=torch.float16, device=d),
    "nothing": lambda d: torch.rand(0, 3, device=d),
}


@pytest.mark.parametrize("name", RANDOM)
def test_random_geometry(name, tier):
    have, want = RANDOM[name]("lazy"), RANDOM[name]("cpu")
    assert (have.shape, have.dtype, have.stride()) == (want.shape, want.dtype, want.stride())
    assert have.device == torch.device("lazy")
    assert bool(torch.isfinite(torch.view_as_real(have) if have.is_complex() else have.double()).all())


def test_device_as_context():
    with torch.device("lazy"):
        made = [torch.zeros(2), torch.tensor([1.0]), torch.arange(3), torch.randn(2), torch.nn.Linear(2, 2).weight]
        host = torch.ones(2, device="cpu")
    assert [str(t.device) for t in made] == ["lazy"] * 5
    assert host.device.type == "cpu"
    assert torch.zeros(1).device.type == "cpu"


def test_default_device():
    torch.set_default_device("lazy")
    try:
        x = torch.ones(2)
        assert torch.get_default_device() == torch.device("lazy")
        assert torchlazy.is_lazy(x)
        assert torch.nn.Linear(2, 3)(x).device == torch.device("lazy")
    finally:
        torch.set_default_device(None)
    assert torch.ones(1).device.type == "cpu"


def test_default_dtype(tier):
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float32):
        torch.set_default_dtype(dtype)
        try:
            check(lambda d: (torch.ones(2, device=d), torch.tensor([1.5], device=d), torch.arange(2, device=d) / 2))
        finally:
            torch.set_default_dtype(torch.float32)


def test_device_index_and_names():
    assert torch.zeros(1, device=torch.device("lazy")).device == torch.device("lazy")
    x = torch.zeros(1, device="lazy:0")
    assert x.device.type == "lazy"
    assert (x + torch.ones(1, device="lazy")).tolist() == [1]
    assert x.is_cpu is False
    assert x.to("lazy").tolist() == [0]
    assert x.new_zeros(1).device.type == "lazy"


def test_legacy_constructors():
    compare(torch.zeros(2, device="lazy").type(torch.float64), torch.zeros(2, dtype=torch.float64))
    assert torch.zeros(2, device="lazy").new([1, 2]).tolist() == [1, 2]


@pytest.mark.parametrize("make", [
    lambda d: torch.zeros(2, device=d), lambda d: torch.zeros(2).to(d), lambda d: torch.ones(2, device="lazy").to(d),
    lambda d: torch.tensor([1.0], device=d), lambda d: torch.randn(2, device=d), lambda d: torch.nn.Linear(2, 2).to(d),
    lambda d: torch.ones(2, device="lazy").new_zeros(2, device=d), lambda d: torch.zeros_like(torch.ones(2), device=d),
])  # fmt: skip
def test_there_is_one_lazy_device(make):
    with pytest.raises(RuntimeError, match="there is no device 'lazy:3'"):
        make("lazy:3")
    make("lazy:0")


def test_the_first_lazy_device_is_the_lazy_device():
    x = torch.zeros(2, device="lazy") + 1
    torchlazy.reset_metrics()
    y = x.to("lazy:0")
    assert torchlazy.metrics()["cuts"] == {}
    assert y.tolist() == [1, 1]
