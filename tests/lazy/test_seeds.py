"""Seeds of random operators: what they take from torch's generators, on many threads and under the user's modes."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torchlazy.lazy.torch_private.settings import draw_seed


def drawn(count: int, seed: int = 5, generator: torch.Generator | None = None) -> list[int]:
    """As torch draws them."""
    if generator is None:
        torch.manual_seed(seed)
    return [int(torch.empty((), dtype=torch.int64).random_(generator=generator).item()) for _ in range(count)]


def test_a_seed_is_what_torch_draws() -> None:
    expected, state = drawn(4), torch.get_rng_state()
    torch.manual_seed(5)
    assert [draw_seed(None) for _ in range(4)] == expected
    assert torch.equal(torch.get_rng_state(), state)
    own = torch.Generator().manual_seed(9)
    assert [draw_seed(own), draw_seed(own)] == drawn(2, generator=torch.Generator().manual_seed(9))
    assert torch.equal(torch.get_rng_state(), state)


def test_threads_share_no_seed() -> None:
    expected = sorted(drawn(400))
    torch.manual_seed(5)
    found: list[int] = []

    def draw() -> None:
        found.extend([draw_seed(None) for _ in range(100)])

    threads = [threading.Thread(target=draw) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == expected


class Functions(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(func)


class Operators(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(func)


@pytest.mark.parametrize("mode", [Functions, Operators, torch.inference_mode, torch.no_grad])
def test_modes_see_nothing_of_a_draw(mode: Any) -> None:
    expected = drawn(2)
    torch.manual_seed(5)
    with mode():
        assert draw_seed(None) == expected[0]
    assert draw_seed(None) == expected[1]
