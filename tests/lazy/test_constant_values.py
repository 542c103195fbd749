"""Questions whose answer depends on nothing outside the trace do not cut it."""

from __future__ import annotations

import torch
import torchlazy


def _cuts() -> dict[str, int]:
    return torchlazy.metrics()["cuts"]


def test_a_constant_condition_does_not_cut():
    x = torch.randn(4, 8).to("lazy")
    torchlazy.reset_metrics()
    y = x * 2
    positions = torch.arange(8, device="lazy")[None].expand(4, -1)
    packed = (positions[:, 1:] - positions[:, :-1] != 1).cumsum(-1)
    assert (packed[:, -1] == 0).all()
    assert not (positions == 3).all()
    assert not _cuts()
    assert torch.equal(y.cpu(), x.cpu() * 2)


def test_a_condition_on_an_input_cuts_and_is_right():
    for value in (0.0, 1.0):
        x = torch.full((3,), value).to("lazy")
        torchlazy.reset_metrics()
        assert bool((x == 1).all()) is (value == 1.0)
        assert _cuts() == {"bool": 1}


def test_random_and_varying_numbers_are_no_constants():
    torch.manual_seed(0)
    answers = {bool((torch.rand(1, device="lazy") < 0.5).all()) for _ in range(32)}
    assert answers == {True, False}
    for number in (0.5, 2.5):
        x = torch.ones(1, device="lazy") * number
        assert bool((x > 1).all()) is (number > 1)


def test_an_in_place_write_is_seen():
    mask = torch.ones(3, device="lazy")
    assert mask.all()
    mask[1] = 0
    assert not mask.all()
    given = torch.zeros(3).to("lazy")
    mask = torch.ones(3, device="lazy")
    mask.mul_(given)
    assert not mask.all()


def test_results_of_one_operator_are_told_apart():
    for _ in range(2):
        for name, expected in (("values", True), ("indices", False)):
            found = torch.full((3,), 2, device="lazy").max(0)
            assert bool(getattr(found, name)) is expected
            torchlazy.sync()


def test_equal_arguments_of_other_types_make_other_constants():
    call = torchlazy.compile(lambda x, number: x + torch.ones(1, device=x.device, dtype=number).sum(0).item())
    x = torch.arange(3, dtype=torch.uint8).to("lazy")
    for _ in range(2):
        for dtype in (torch.float32, torch.int64, torch.bool):
            assert call(x, dtype).dtype == (x.cpu() + torch.ones(1, dtype=dtype).sum(0).item()).dtype
