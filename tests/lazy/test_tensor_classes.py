"""Users' classes of tensors over lazy tensors: what is of the class in eager is of the class here."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
import torchlazy

from tests.lazy.compare import compare


class Image(torch.Tensor):
    """Tells of each function that is called on it."""

    calls: list[str] = []  # noqa: RUF012

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        cls.calls.append(getattr(func, "__name__", str(func)))
        return super().__torch_function__(func, types, args, kwargs or {})

    @property
    def width(self):
        return self.shape[-1]


class Quiet(torch.Tensor):
    """One that only has a name."""


def _program(kind, device):
    base = torch.arange(6.0, device=device).view(2, 3).requires_grad_()
    x = (base * 1).as_subclass(kind)
    y = (x + 1).sin()
    joined = torch.cat([y, y])
    largest, where = joined.max(1)
    window = joined[1:3] * 2
    window.sum().backward()
    leaf = torch.ones(2, device=device).as_subclass(kind).requires_grad_()
    (leaf * 3).sum().backward()
    written = torch.ones(3, device=device).as_subclass(kind)
    written.add_(1)
    written[0] = 7
    view = written.view(3, 1)
    view.mul_(2)
    layer = torch.nn.Linear(3, 2).to(device)
    torch.nn.init.ones_(layer.weight)
    torch.nn.init.zeros_(layer.bias)
    out = layer(written)
    parts = out.split(1)
    saved = io.BytesIO()
    torch.save(written, saved)
    saved.seek(0)
    loaded = torch.load(saved, weights_only=False)
    pickled = pickle.loads(pickle.dumps(written))
    tensors = [
        x, y, joined, largest, where, window, leaf, written, view, out, *parts, loaded, pickled, copy.copy(written),
        written.detach(), written.cpu(), written.double(), written.clone(),
    ]  # fmt: skip
    plain = [written.as_subclass(torch.Tensor), base.grad, leaf.grad]
    assert all(isinstance(t, kind) for t in tensors), [type(t) for t in tensors]
    assert not any(isinstance(t, kind) for t in plain)
    assert x.grad_fn is not None and leaf.is_leaf
    return [t.detach().as_subclass(torch.Tensor) for t in (*tensors, *plain)]


@pytest.mark.parametrize("kind", [Image, Quiet])
@pytest.mark.parametrize("where", ["lazy", "mode"])
def test_programs(kind, where, tier):
    want = _program(kind, "cpu")
    for _ in range(2):
        if where == "mode":
            with torchlazy.lazy_mode():
                have = _program(kind, "cpu")
        else:
            have = _program(kind, "lazy")
        compare(have, want, ignore=("version", "is_view", "device", "requires_grad", "grad_fn", "is_leaf"))


def test_its_functions_and_attributes_are_asked():
    x = torch.ones(2, 3, device="lazy").as_subclass(Image)
    Image.calls.clear()
    assert (x * 2 + 1).relu().width == 3
    assert Image.calls[:3] == ["mul", "add", "relu"]
    assert torchlazy.is_lazy(x) and x.device.type == "lazy" and type(x).__name__ == "Image"


def test_operators_on_them_are_recorded():
    torchlazy.reset_metrics()
    x = torch.ones(3, device="lazy").as_subclass(Image)
    with torchlazy.lazy_mode():
        y = torch.ones(3).as_subclass(Image) + 1
    assert (x * 2).sum().item() == 6 and y.tolist() == [2, 2, 2]
    assert torchlazy.metrics()["fallbacks"] == {}


@pytest.mark.usefixtures("device_in_python")
def test_compiled_calls_keep_the_class():
    double = torchlazy.compile(lambda x: x * 2)
    wrapped = torchlazy.compile(lambda x: x.as_subclass(Quiet) * 2)
    with pytest.warns(RuntimeWarning, match="it makes tensors of the class"):
        for _ in range(5):
            plain = torch.ones(2, device="lazy")
            assert not isinstance(double(plain), Quiet)
            for made in (double(plain.as_subclass(Quiet)), wrapped(plain)):
                assert isinstance(made, Quiet) and made.tolist() == [2, 2]


@pytest.mark.usefixtures("device_in_python")  # its own message
def test_what_is_no_class_of_tensors():
    with pytest.raises(TypeError, match=r"derive it from torch\.Tensor"):
        torch.ones(2, device="lazy").as_subclass(dict)


class Weight(torch.nn.Parameter):
    """A parameter of a library's own class."""

    def __new__(cls, data, requires_grad=True, tag=""):
        made = torch.Tensor._make_subclass(cls, data, requires_grad)
        made.tag = tag
        return made


def _made(x):
    weight = Weight(x.detach() * 2, tag="here")
    layer = torch.nn.Module()
    layer.weight = weight
    copied = copy.deepcopy(layer).weight
    assert isinstance(weight, Weight) and isinstance(copied, Weight) and len(list(layer.parameters())) == 1
    assert weight.tag == "here" and weight.requires_grad and weight.is_leaf
    y = Quiet(x * 3)
    new, empty = Quiet([1.0, 2.0]) * x.detach().cpu()[0].item(), Quiet(2)
    assert all(isinstance(one, Quiet) for one in (y, y + 1, new, empty)) and empty.shape == (2,)
    (weight * y).sum().backward()
    with torch.no_grad():
        weight -= 0.5
    return [weight.detach(), weight.grad, copied.detach(), y.detach(), new]


@pytest.mark.filterwarnings("ignore:torchlazy.compile.*runs its Python")
@pytest.mark.parametrize("where", ["lazy", "mode", "compile", "compile lazy"])
def test_classes_make_themselves(where):
    device = "lazy" if where.endswith("lazy") else "cpu"
    call = torchlazy.compile(_made) if where.startswith("compile") else _made
    for first in (1.0, 4.0, 7.0):
        x, twin = (torch.tensor([first, 2.0], device=on, requires_grad=True) for on in ("cpu", device))
        wanted = [*_made(x), x.grad]
        if where == "mode":
            with torchlazy.lazy_mode():
                found = _made(twin)
        else:
            found = call(twin)
        for mine, eager in zip([*found, twin.grad], wanted, strict=True):
            torch.testing.assert_close(mine.cpu().as_subclass(torch.Tensor), eager.as_subclass(torch.Tensor))
