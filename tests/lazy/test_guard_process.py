"""What the process keeps beside all objects: a call that asks for it is captured again where it changes.

Invariant: audits are off, so that nothing but a guard can notice.
"""

from __future__ import annotations

import decimal
import locale
import os
import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torchlazy.lazy.compiled.guards.process import process_reader, settings_among

from tests.lazy.changing_cases import Case, assert_each_change_is_noticed, setter

pytestmark = pytest.mark.usefixtures("operator_by_operator")


def the_working_directory(device):
    before = Path.cwd()
    return lambda x: x * len(os.getcwd()), [lambda: os.chdir("/"), lambda: os.chdir(before)]


def the_interpreter(device):
    limit = sys.getrecursionlimit()
    return lambda x: x * sys.getrecursionlimit() + len(sys.argv), [
        lambda: sys.setrecursionlimit(limit + 1), lambda: sys.argv.append("more"), lambda: sys.argv.pop(),
        lambda: sys.setrecursionlimit(limit),
    ]  # fmt: skip


def the_environment_in_bytes(device):
    call = lambda x: x * len(os.environb.get(b"TORCHLAZY_SIGHT", b"1"))  # noqa: E731
    return call, [lambda: os.environ.update(TORCHLAZY_SIGHT="55"), lambda: os.environ.pop("TORCHLAZY_SIGHT")]


def decimals(device):
    context = decimal.getcontext()
    call = lambda x: x * float(decimal.Decimal(1) / decimal.Decimal(3))  # noqa: E731
    return call, [setter(context, "prec", 2), setter(context, "prec", 28)]


def the_locale(device):
    before = locale.setlocale(locale.LC_ALL)
    other = "C" if before != "C" else "C.UTF-8"
    change = lambda name: lambda: locale.setlocale(locale.LC_ALL, name)  # noqa: E731
    return lambda x: x * len(locale.setlocale(locale.LC_ALL)), [change(other), change(before)]


def errors_of_numpy(device):
    call = lambda x: x * (3 if np.geterr()["divide"] == "raise" else 2)  # noqa: E731
    return call, [lambda: np.seterr(divide="raise"), lambda: np.seterr(divide="warn")]


def states_of_random_numbers(device):
    np.random.seed(0)
    random.seed(0)
    call = lambda x: x * float(np.random.get_state()[2]) + random.getstate()[1][1] % 1000  # type: ignore[arg-type]  # noqa: E731
    return call, [np.random.rand, lambda: random.seed(1)]


def the_seed(device):
    return lambda x: x * float(torch.initial_seed() % 100), [lambda: torch.manual_seed(3), lambda: torch.manual_seed(7)]


def types_of_autocast(device):
    def call(x):
        with torch.autocast("cpu"):
            y = x * (2 if torch.get_autocast_dtype("cpu") == torch.bfloat16 else 3)
        return y + torch.is_autocast_cache_enabled()

    change = lambda dtype: lambda: torch.set_autocast_dtype("cpu", dtype)  # noqa: E731
    return call, [
        change(torch.float16), change(torch.bfloat16), lambda: torch.set_autocast_cache_enabled(False),
        lambda: torch.set_autocast_cache_enabled(True),
    ]  # fmt: skip


def memory_that_nobody_wrote(device):
    settings: Any = torch.utils.deterministic
    call = lambda x: x + torch.utils.deterministic.fill_uninitialized_memory * 10  # noqa: E731
    changes = [
        setter(settings, "fill_uninitialized_memory", False),
        setter(settings, "fill_uninitialized_memory", True),
    ]
    return call, changes


CASES: tuple[Case, ...] = (
    the_working_directory, the_interpreter, the_environment_in_bytes, decimals, the_locale, errors_of_numpy,
    states_of_random_numbers, the_seed, types_of_autocast, memory_that_nobody_wrote,
)  # fmt: skip


@pytest.mark.parametrize("device", ["cpu", "lazy"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_a_change_of_the_process_is_noticed(case: Case, device: str) -> None:
    assert_each_change_is_noticed(case, device)


def test_hooks_of_saved_tensors_that_were_forbidden() -> None:
    layer = nn.Linear(4, 4)

    def case(device):
        forbidden = torch.autograd.graph.disable_saved_tensors_hooks("no hooks")

        def call(x):
            with torch.autograd.graph.save_on_cpu():
                return layer(x)

        return call, [forbidden.__enter__, lambda: forbidden.__exit__(None, None, None)]

    assert_each_change_is_noticed(case, "cpu")


def test_only_what_tells_of_the_process_is_read() -> None:
    assert process_reader(len) is None
    assert process_reader([]) is None  # it has no hash
    assert process_reader(os.getcwd) is not None
    assert settings_among(torch.ops, ["add"]) == []  # asking it for a name makes an operator
    assert settings_among(os, ["sep"]) == []
    assert settings_among(torch.backends.mkldnn, ["deterministic", "no_such"]) == ["deterministic"]
