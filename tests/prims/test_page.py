"""The page of primitives is what its command writes, and every primitive is documented whole."""

from __future__ import annotations

import re
from dataclasses import is_dataclass

import pytest
from torchlazy.prims.ops import PRIMS
from torchlazy.prims.page import PAGE, page


def test_the_page_is_up_to_date() -> None:
    """Line by line; a torch without some operator has fewer lines."""
    written, missing = PAGE.read_text().splitlines(), [line for line in page().splitlines() if line.startswith("| `")]
    assert set(missing) <= set(written), "run `python -m torchlazy.prims.page --write`"
    names = set(re.findall(r"(?m)^\| `(\w+)` \|", PAGE.read_text()))
    assert names >= set(PRIMS) == set(re.findall(r"(?m)^\| `(\w+)` \|", page()))
    if names == set(PRIMS):
        assert PAGE.read_text() == page()


@pytest.mark.parametrize("name", PRIMS)
def test_every_primitive_is_documented(name: str) -> None:
    prim = PRIMS[name]
    assert is_dataclass(prim.attrs) and prim.attrs.__dataclass_params__.frozen and prim.attrs.__doc__
    what, _, rest = prim.doc.partition("\n\n")
    assert what and "Broadcasting: none. Promotion: none." in rest
    assert re.search(r"Source: \S", rest) and rest.split("Broadcasting")[0].strip()
    assert prim.kinds and callable(prim.rule) and callable(prim.reference)
