"""Every ATen overload has one way and a reason, and the page has all of them."""

from __future__ import annotations

import re

import torch
from torchlazy.prims.coverage import OverloadOutcome, aten_overloads, coverage, page, summary, unshaped
from torchlazy.prims.decompose import RULES

ENTRIES = coverage()


def test_each_overload_has_one_way_and_a_reason():
    names = [e.name for e in ENTRIES]
    assert len(set(names)) == len(names) > 2500
    for e in ENTRIES:
        assert e.way is not OverloadOutcome.UNSUPPORTED
        assert e.reason or e.way in (OverloadOutcome.COMPOSED, OverloadOutcome.WRITES, OverloadOutcome.NO_RULE), e
    assert sum(count for _, count in summary(ENTRIES)[1:]) == len(ENTRIES)


def test_known_operators():
    ways = {e.name: e.way for e in ENTRIES}
    assert ways["add.Tensor"] is OverloadOutcome.DECOMPOSED
    assert ways["mm.default"] is OverloadOutcome.BY_CHOICE
    assert (
        ways["block_diag.default"] is not OverloadOutcome.COMPOSED
        and ways["broadcast_to.default"] is OverloadOutcome.COMPOSED
    )
    assert ways["relu_.default"] is OverloadOutcome.WRITES
    assert ways["add.out"] is OverloadOutcome.WRITES
    assert ways["unique_consecutive.default"] is OverloadOutcome.AT_ONCE
    assert ways["_coalesce.default"] is OverloadOutcome.OTHER_KIND


def test_what_a_graph_may_contain():
    found = set(aten_overloads())
    assert torch.ops.aten.add.Tensor in found and torch.ops.aten.add_.Tensor not in found
    assert all(o in found for o in RULES if o.namespace == "aten" and "hacked" not in o._overloadname)


def test_the_page_has_each_way_and_known_operators_alone():
    text = page(ENTRIES)
    rows = dict(re.findall(r"(?m)^\| ([^|]+) \| (\d+) \|$", text))
    assert len(rows) == len(OverloadOutcome) + 1 and rows[OverloadOutcome.UNSUPPORTED.value] == "0"
    assert set(re.findall(r"`([a-zA-Z_0-9]+\.\w+)`", text)) <= {e.name for e in ENTRIES}


def test_a_rule_that_is_never_asked_is_named():
    missing = unshaped(ENTRIES, "")
    assert "_aminmax.default" in missing and "add.Tensor" not in missing
    assert "_aminmax.default" not in unshaped(ENTRIES, '@rule("_aminmax")')
    assert "_aminmax.dim" not in unshaped(ENTRIES, "aten._aminmax.dim: 0")
