"""What is asked of torch's fake kernels: shapes that values decide are never guessed."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torchlazy


@pytest.fixture
def positives() -> Iterator[torch._ops.OpOverload]:
    """An operator without a fake kernel, whose result has as many elements as its argument has positive ones."""
    library = torch.library.Library("torchlazy_test_infer", "FRAGMENT")
    library.define("positives(Tensor x) -> Tensor")
    library.impl("positives", lambda x: x[x > 0].clone(), "CPU")
    yield torch.ops.torchlazy_test_infer.positives.default
    library._destroy()


@pytest.mark.usefixtures("device_in_python")
def test_an_operator_without_a_fake_kernel_runs_on_the_values(positives: torch._ops.OpOverload, tier: str) -> None:
    x = torch.tensor([1.0, -2.0, 3.0, 4.0])
    assert positives(x.to("lazy")).tolist() == [1, 3, 4]
    assert (positives(x.to("lazy") - 2) * 2).tolist() == [2, 4]
    assert {use.op for use in torchlazy.report().eager} == {str(positives)}


def test_gradient_of_a_value_written_at_repeated_places(tier: str) -> None:
    """torch's formula asks for the unique places; some versions have no fake kernel for that."""
    results = []
    for device in ("cpu", "lazy"):
        value = torch.tensor(2.0).to(device).requires_grad_()
        places = torch.tensor([2, 1, 4, 2, 2]).to(device)
        filled = torch.zeros(5, 5).to(device).index_fill(-1, places, value)
        (filled * torch.arange(25.0).view(5, 5).to(device)).sum().backward()
        assert value.grad is not None
        results.append(value.grad.item())
    assert results[0] == results[1] == 185.0


@pytest.mark.parametrize("shape", [(3, 5), (5, 3), (2, 3, 4)])
def test_geqrf_is_recorded(shape: tuple[int, ...], tier: str) -> None:
    x = torch.randn(shape)
    for mine, theirs in zip(torch.geqrf(x.to("lazy")), torch.geqrf(x), strict=True):
        assert mine.stride() == theirs.stride()
        torch.testing.assert_close(mine.cpu(), theirs)
    assert not torchlazy.report().eager
    with pytest.raises(RuntimeError):
        torch.geqrf(x.to("lazy").flatten())


def test_what_holds_for_empty_tensors_says_nothing_of_others(operator_by_operator):
    def total(length: int) -> torch.Tensor:
        return torch.zeros(length, device="lazy").to(torch.float8_e4m3fn).sum()

    total(0)
    with pytest.raises(NotImplementedError):
        total(3)
