"""The order in which kernels share launches."""

from __future__ import annotations

import torch
from torchlazy.inductor.grouping import plan_slots
from torchlazy.inductor.lowering import lower
from torchlazy.inductor.scheduler import ScheduleOptions, schedule

from tests.inductor.prim_graphs import GraphMaker


def test_a_kernel_that_waits_for_its_partner_stands_in_one_slot() -> None:
    """Both kernels wait, the second reads the first: placing the first finds the second as one of its key."""
    g = GraphMaker()
    x = g.input("x", 4, 4)
    first = g.exp(x)
    second = g.exp(first)
    g.graph.output((g.extern(torch.ops.aten.mm.default, second, second), first))
    plan = schedule(lower(g.graph, donations={}), ScheduleOptions(fuse=False))
    slots = plan_slots(plan, ["key", "key", None])
    assert [slot.items for slot in slots] == [[0], [1], [2]]
