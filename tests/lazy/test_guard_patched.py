"""What users put in the place of things that a call runs without naming them, or hang on objects that had nothing
there: functions that torch's modules call, Python's builtins, attributes of tensors, hooks, members asked by Python.

Invariant: audits are off, so that nothing but a guard can notice.
"""

from __future__ import annotations

import abc
import builtins
import collections
import contextvars
import dataclasses
import functools
import types
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.nn.utils import parametrize

from tests.lazy.changing_cases import Case, assert_each_change_is_noticed, setter

pytestmark = pytest.mark.usefixtures("operator_by_operator")


def a_function_that_a_module_calls(device):
    layer, old = nn.Linear(4, 4).to(device), F.linear
    return lambda x: layer(x), [setter(F, "linear", lambda x, w, b=None: x * 3), setter(F, "linear", old)]


def a_function_of_torch_that_a_function_calls(device):
    norm, old = nn.LayerNorm(4).to(device), torch.layer_norm
    return norm, [setter(torch, "layer_norm", lambda x, *rest, **more: x * 3), setter(torch, "layer_norm", old)]


def a_method_that_a_module_calls(device):
    layer, old = nn.Conv1d(4, 4, 1).to(device), nn.Conv1d._conv_forward
    other = lambda self, x, weight, bias: x * 3  # noqa: E731
    return layer, [setter(nn.Conv1d, "_conv_forward", other), setter(nn.Conv1d, "_conv_forward", old)]


def a_method_of_tensors_that_a_module_calls(device):
    flat, old = nn.Flatten(0), vars(torch.Tensor).get("flatten")
    restore = (lambda: delattr(torch.Tensor, "flatten")) if old is None else setter(torch.Tensor, "flatten", old)
    return flat, [setter(torch.Tensor, "flatten", lambda self, *rest: self * 3), restore]


def attention_that_a_module_calls(device):
    """Behind functions that wrap one of C's."""
    layer = nn.MultiheadAttention(4, 2, batch_first=True).to(device)
    old, other = F.scaled_dot_product_attention, lambda query, key, value, *rest, **more: value * 3
    changes = [setter(F, "scaled_dot_product_attention", other), setter(F, "scaled_dot_product_attention", old)]
    return lambda x: layer(x[None], x[None], x[None], need_weights=False)[0], changes


def a_function_of_autograd(device):
    class Scaled(torch.autograd.Function):
        rate = 2.0

        @staticmethod
        def forward(ctx, x):
            return x * Scaled.rate

    return lambda x: Scaled.apply(x), [
        setter(Scaled, "rate", 5.0), setter(Scaled, "forward", staticmethod(lambda ctx, x: x * 7)),
    ]  # fmt: skip


def a_builtin(device):
    old = divmod
    changes = [setter(builtins, "divmod", lambda a, b: (a, b + 5)), setter(builtins, "divmod", old)]
    return lambda x: x * divmod(7, 2)[1], changes


def attributes_of_a_partial(device):
    part: Any = functools.partial(torch.mul, other=2.0)
    part.rate = 2.0
    return lambda x: part(x) * part.rate, [setter(part, "rate", 5.0)]


def keywords_of_a_partial_method(device):
    class Scaled:
        def scaled(self, x, rate):
            return x * rate

        twice = functools.partialmethod(scaled, rate=2.0)

    own, inner = Scaled(), vars(Scaled)["twice"]
    return lambda x: own.twice(x), [lambda: inner.keywords.update(rate=5.0), setter(inner, "keywords", {"rate": 7.0})]


def how_objects_are_made(device):
    default = [2.0]

    @dataclasses.dataclass
    class Settings:
        rate: float = dataclasses.field(default_factory=lambda: default[0])
        more: float = 1.0

    pair = collections.namedtuple("pair", "rate", defaults=[2.0])

    def other(self):
        self.rate, self.more = 8.0, 9.0

    return lambda x: x * Settings().rate + Settings().more * pair().rate, [
        lambda: default.__setitem__(0, 5.0), setter(Settings.__init__, "__defaults__", (7.0, 3.0)),
        setter(pair.__new__, "__defaults__", (4.0,)), setter(Settings, "__init__", other),
    ]  # fmt: skip


def what_an_abstract_class_says_of_others(device):
    class Shape(abc.ABC):  # noqa: B024
        says = [False]  # noqa: RUF012

        @classmethod
        def __subclasshook__(cls, kind):
            return cls.says[0]

    def change() -> None:
        Shape.says[0] = True
        abc._reset_caches(Shape)  # type: ignore[attr-defined]

    return lambda x: x * 3 if issubclass(int, Shape) else x, [change]


def derived_classes(device):
    class Base:
        rate = 1.0

    class Derived(Base):
        rate = 2.0

    made = [Derived]
    total = lambda x: x * sum(kind.rate for kind in Base.__subclasses__())  # noqa: E731
    return total, [lambda: made.append(type("Another", (Base,), {"rate": 3.0}))]  # type: ignore[arg-type]


def values_in_a_context(device):
    variable: contextvars.ContextVar[float] = contextvars.ContextVar("rate", default=2.0)
    context = contextvars.copy_context()
    context.run(variable.set, 3.0)
    return lambda x: x * context[variable], [lambda: context.run(variable.set, 5.0)]


def a_weak_set(device):
    class Part:
        rate = 2.0

    first, second = Part(), Part()
    parts = weakref.WeakSet([first])
    changes = [setter(first, "rate", 4.0), lambda: parts.add(second), lambda: parts.discard(first)]
    return lambda x, _=(first, second): x * len(parts) + sum(part.rate for part in parts), changes


def what_a_missing_key_gives(device):
    table: Any = collections.defaultdict(lambda: 2.0)

    def call(x):
        y = x * table["a"]
        table.clear()
        return y

    return call, [setter(table, "default_factory", lambda: 9.0)]


def names_that_a_module_answers_for(device):
    text = "TABLE = {'rate': 2.0}\ndef __getattr__(name):\n    return TABLE[name]"
    settings: Any = types.ModuleType("settings_that_answer")
    exec(text, settings.__dict__)
    return lambda x: x * settings.rate, [lambda: settings.TABLE.update(rate=5.0), setter(settings, "rate", 9.0)]


def attributes_of_tensors(device):
    layer, held = nn.Linear(4, 4).to(device), torch.ones(4).to(device)

    def call(x):
        y = layer(x) * (3.0 if hasattr(layer.weight, "frozen") else 2.0)
        return y + held * getattr(held, "rate", 1.0)

    return call, [
        setter(layer.weight, "frozen", True), setter(held, "rate", 5.0), setter(held, "rate", 6.0),
        lambda: delattr(layer.weight, "frozen"), lambda: delattr(held, "rate"),
    ]  # fmt: skip


def hooks_of_registrations(device):
    handles: list[Any] = []

    def call(x):
        module = nn.Module()
        module.weight = nn.Parameter(torch.ones(4, device=x.device))
        return x * module.weight.detach()

    hook = lambda module, name, value: nn.Parameter(value * 3)  # noqa: E731
    register = lambda: handles.append(register_module_parameter_registration_hook(hook))  # noqa: E731
    return call, [register, lambda: handles[0].remove()]


def which_buffers_are_saved(device):
    module = nn.Module()
    module.register_buffer("mean", torch.ones(4, device=device), persistent=False)
    return lambda x: x + len(module.state_dict()), [module._non_persistent_buffers_set.clear]


def parametrizations_in_a_cache(device):
    class Scaled(nn.Module):
        rate = 2.0

        def forward(self, weight):
            return weight * self.rate

    layer = parametrize.register_parametrization(nn.Linear(4, 4).to(device), "weight", Scaled())
    cached, changes = parametrize.cached(), [setter(Scaled, "rate", 5.0)]
    enter = lambda: (layer.weight, setattr(Scaled, "rate", 3.0))  # noqa: E731
    changes += [lambda: (cached.__enter__(), enter()), lambda: cached.__exit__(None, None, None)]
    return lambda x: layer(x), changes


def items_of_a_list_among_the_defaults(device):
    """It stays the same list, and calls replace what it holds."""

    def call(x, seen=[]):  # noqa: B006
        seen.append(1)
        return x * min(len(seen), 6)

    return call, [lambda: call.__defaults__[0].clear()]  # type: ignore[index]


CASES: tuple[Case, ...] = (
    a_function_that_a_module_calls, a_function_of_torch_that_a_function_calls, a_method_that_a_module_calls, a_builtin,
    a_method_of_tensors_that_a_module_calls, attention_that_a_module_calls, a_function_of_autograd,
    attributes_of_a_partial, keywords_of_a_partial_method, how_objects_are_made, what_an_abstract_class_says_of_others,
    derived_classes, values_in_a_context, a_weak_set, what_a_missing_key_gives, names_that_a_module_answers_for,
    attributes_of_tensors, hooks_of_registrations, which_buffers_are_saved, parametrizations_in_a_cache,
    items_of_a_list_among_the_defaults,
)  # fmt: skip


@pytest.mark.parametrize("device", ["cpu", "lazy"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_what_was_put_there_is_noticed(case: Case, device: str) -> None:
    assert_each_change_is_noticed(case, device)
