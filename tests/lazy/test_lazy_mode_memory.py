"""Who reads memory in and after a block of `lazy_mode()`, views and windows over its edges: what eager shows."""

from __future__ import annotations

import contextlib
import copy
import pickle

import numpy as np
import pytest
import torch
import torchlazy
from torch import nn

from tests.lazy.compare import Cases, data
from tests.lazy.mode_blocks import address_read, check_as_in_eager, two_layers, write_and_read
from tests.lazy.models import same

case = Cases()


@case.parametrize()
@pytest.mark.parametrize("tiers", ["on", "off"])
def test_as_in_eager(f, tiers):
    check_as_in_eager(f, tiers)


# ---------------------------------------------------------------- readers


READERS = {
    "tolist": lambda t: t.tolist(),
    "numpy": lambda t: t.numpy().tolist(),
    "array": lambda t: np.asarray(t).tolist(),
    "address": address_read,
    "pickle": lambda t: pickle.loads(pickle.dumps(t)),
    "save": lambda t: write_and_read(t),
    "repr": repr,
    "str": lambda t: f"{t}",
    "format": lambda t: f"{t[0]:.3f}",
    "deepcopy": lambda t: copy.deepcopy(t),
    "copy": lambda t: copy.copy(t),
    "storage": lambda t: bytes(t.untyped_storage()[i] for i in range(8)),
    "typed storage": lambda t: list(t.storage())[:3],
    "dlpack": lambda t: torch.from_dlpack(t).tolist(),
    "numpy dlpack": lambda t: np.from_dlpack(t).tolist(),
    "item": lambda t: t[1].item(),
    "iterate": lambda t: [float(v) for v in t],
    "bool": lambda t: bool((t > 0).any()),
    "equal": lambda t: torch.equal(t, t + 0),
    "len and in": lambda t: (len(t), 0.0 in t),
    "clone": lambda t: t.clone(),
}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("of", ["plain", "made inside"])
@pytest.mark.parametrize("when", ["inside", "after"])
def test_readers(reader, of, when):
    read = READERS[reader]

    def run(block):
        t = data("cpu", 4)
        found = []
        with block():
            t.add_(1)
            value = t if of == "plain" else t * 2
            if when == "inside":
                found.append(read(value))
                value.mul_(3)
                found.append(read(value))
        found += [read(value), read(t)]
        return found

    have, want = run(torchlazy.lazy_mode), run(contextlib.nullcontext)
    if reader in ("repr", "str"):
        assert have == want
    else:
        same(have, want)


@case
def module_readers_inside(block):
    model = two_layers()
    with block():
        with torch.no_grad():
            model[0].weight.mul_(2)
        saved = write_and_read(model.state_dict())
        twin = copy.deepcopy(model)
        pickled = pickle.loads(pickle.dumps(model))
        model[0].weight.data.mul_(2)
    return saved, twin.state_dict(), pickled.state_dict(), model.state_dict()


# ---------------------------------------------------------------- views and memory


@case
def views_made_outside(block):
    base = data("cpu", 4, 6)
    row, column, flat = base[1], base[:, 2], base.view(-1)
    with block():
        row.add_(1)
        column.mul_(2)
        flat[0] = 7
        total = base.sum()
        base.sub_(0.5)
    return base, row, column, flat, total


@case
def views_made_inside(block):
    base = data("cpu", 4, 6)
    with block():
        row = base[1]
        row.add_(1)
        base.t()[2].exp_()
        copy_ = row.clone()
        base.mul_(2)
    row.add_(1)
    return base, row, copy_


@case
def views_shared_between_blocks(block):
    base = data("cpu", 4, 6)
    with block():
        inside = base[2:]
        inside.add_(1)
    base.mul_(2)
    outside = base[3]
    with block():
        inside.sub_(1)
        outside.mul_(3)
    outside.add_(1)
    return base, inside, outside


@case
def made_inside_viewed_outside(block):
    with block():
        x = data("cpu", 4, 6) * 1
    view = x[1:3]
    view.add_(1)
    with block():
        x.mul_(2)
        y = view + 1
    view.zero_()
    return x, y, view


@case
def numpy_memory(block):
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    tensor = torch.from_numpy(array)
    with block():
        tensor.add_(1)
        tensor[0].mul_(2)
    first = array.copy().tolist()
    array += 1  # seen by the next block
    with block():
        y = tensor * 2
    return first, y, array.tolist(), tensor


@case
def numpy_view_of_a_result(block):
    with block():
        x = data("cpu", 3) * 2
    array = x.numpy()
    array[0] = 5
    with block():
        x.add_(1)
    return array.tolist(), x


@case
def storage_with_an_offset(block):
    base = data("cpu", 10)
    part = base[3:7]
    with block():
        part.fill_(1)
        y = base.sum()
    return base, y


@case
def expanded_and_strided(block):
    base = data("cpu", 3, 1)
    with block():
        wide = base.expand(3, 4)
        y = wide * 2
        base.add_(1)
        z = wide.sum()
        window = torch.as_strided(base, (2,), (1,), 1)
        window.mul_(2)
    return base, y, z, window


@case
def other_dtypes(block):
    x = torch.arange(4, dtype=torch.int32)
    with block():
        floats = x.view(torch.float32)
        doubled = x * 2
        flags = x > 1
        x[flags] = 9
    return x, doubled, flags, floats.view(torch.int32)


@case
def data_attribute_and_set(block):
    p = nn.Parameter(data("cpu", 3))
    with block():
        p.data.add_(1)
        p.data = p.data * 2
        y = p * 1
    p.data.sub_(1)
    return p, y


@case
def resized(block):
    x = data("cpu", 4)
    with block():
        x.add_(1)
        x.resize_(2, 2)
        x.mul_(2)
    return x


@case
def out_arguments(block):
    x, out = data("cpu", 4), torch.empty(4)
    with block():
        torch.add(x, 1, out=out)
        torch.mul(out, 2, out=x)
    return x, out
