"""What mixtures of experts call on a device that is not the CPU: histograms of integers, grouped matrix products."""

from __future__ import annotations

import pytest
import torch
import torchlazy

from tests.lazy.compare import check, data, ints


@pytest.mark.usefixtures("device_in_python")
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.uint8], ids=str)
def test_histogram_of_integers(dtype: torch.dtype, tier: str) -> None:
    """CUDA counts integers and the CPU does not: programs cast by the device's type, which is neither here."""
    codes = ints("cpu", 20, high=5)
    have = torch.histc(codes.to("lazy").to(dtype), bins=5, min=0, max=4)
    assert have.dtype == dtype
    assert have.tolist() == torch.bincount(codes, minlength=5).tolist()


def test_histogram_of_booleans_is_eagers_error() -> None:
    check(lambda device: torch.histc(torch.ones(3, dtype=torch.bool, device=device)))


@pytest.mark.parametrize(
    "shapes", [((6, 8), (3, 8, 12)), ((3, 6, 8), (3, 8, 12)), ((6, 8), (8, 16)), ((3, 6, 8), (8, 16))]
)
def test_grouped_mm(shapes: tuple[tuple[int, ...], tuple[int, ...]], tier: str) -> None:
    """float32 on the CPU, which torch's own shape rule refuses: no cut."""
    left, right = shapes

    def product(device):
        a, b = data(device, *left), data(device, *right, seed=1)
        ends = {(2, 3): [2, 3, 6], (2, 2): [2, 4, 8], (3, 2): [4, 8, 16], (3, 3): None}[(len(left), len(right))]
        offsets = None if ends is None else torch.tensor(ends, dtype=torch.int32).to(device)
        return torch._grouped_mm(a, b, offs=offsets)

    check(product)
    assert torchlazy.metrics()["cuts"] == {"sync": 1}


@pytest.mark.parametrize("shapes", [((6, 8), (3, 7, 12)), ((6, 8), (3, 8, 5))], ids=["inner sizes", "alignment"])
def test_grouped_mm_errors_are_eagers(shapes: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    def product(device):
        offsets = torch.tensor([2, 3, 6], dtype=torch.int32).to(device)
        return torch._grouped_mm(data(device, *shapes[0]), data(device, *shapes[1]), offs=offsets)

    check(product)


def test_gradient_of_indices_on_the_host() -> None:
    """Indices may lie on the host, for reads and for the writes of the gradient; both are recorded."""
    rows = torch.tensor([[0, 2], [2, 1]])

    def gradient(device):
        x = data(device, 3, 4, grad=True)
        x[rows].square().sum().backward()
        x.grad[rows[0]] = 1.0
        return x.grad

    check(gradient, ignore=("version",))
    assert torchlazy.metrics()["cuts"] == {"sync": 1}
