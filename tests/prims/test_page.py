"""The page has every primitive, and each primitive is documented whole."""

from __future__ import annotations

import re
from dataclasses import is_dataclass

import pytest
from torchlazy.prims.ops import PRIMS
from torchlazy.prims.page import page


def test_the_page_has_each_primitive_once() -> None:
    assert sorted(re.findall(r"(?m)^\| `(\w+)` \|", page())) == sorted(PRIMS)


@pytest.mark.parametrize("name", PRIMS)
def test_every_primitive_is_documented(name: str) -> None:
    prim = PRIMS[name]
    assert is_dataclass(prim.attrs) and prim.attrs.__dataclass_params__.frozen and prim.attrs.__doc__
    what, _, rest = prim.doc.partition("\n\n")
    assert what and "Broadcasting: none. Promotion: none." in rest
    assert re.search(r"Source: \S", rest) and rest.split("Broadcasting")[0].strip()
    assert prim.kinds and callable(prim.rule) and callable(prim.reference)
