"""Numbers that a few cheap operators lead to are read without a cut: the same values, one trace, one template a way."""

from __future__ import annotations

import pytest
import torch
import torchlazy
from torch import nn
from torchlazy.lazy.joint.record import CannotRecordJoint
from torchlazy.lazy.run.sync_policy import SyncError, SyncInside

from tests.lazy.joint_path import JointCall

pytestmark = pytest.mark.usefixtures("device_in_python", "operator_by_operator")


def masked(x: torch.Tensor, w: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """A look at the mask between two products, as libraries have it."""
    hidden = torch.tanh(x @ w)
    if not mask.bool().all():
        hidden = hidden * mask[:, None]
    return (hidden @ w).sum()


def tensors(*values: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x, w = torch.randn(len(values), 4, generator=generator), torch.randn(4, 4, generator=generator)
    return x, w, torch.tensor(values)


def cuts_of(function, *args) -> tuple[torch.Tensor, dict[str, int], dict[str, int]]:
    torchlazy.sync()
    torchlazy.reset_metrics()
    result = function(*args)
    torchlazy.flush()
    counts = torchlazy.metrics()
    return result, counts["cuts"], counts["reads_apart"]


@pytest.mark.parametrize("values", [(1, 1, 1), (1, 0, 1)])
def test_a_look_at_a_mask_is_no_cut(values):
    given = tensors(*values)
    for _ in range(4):  # recorded, followed, and with what leads to the number known
        found, cuts, apart = cuts_of(masked, *(t.to("lazy") for t in given))
        assert cuts == {"flush": 1} and apart == {"bool": 1}
        torch.testing.assert_close(found.cpu(), masked(*given))
    assert any(line.cause == "bool apart" and line.kind == "sync" for line in torchlazy.report().cuts)


def test_what_was_written_before_is_seen():
    mask, other = torch.ones(3).to("lazy"), torch.ones(2, 3).to("lazy")
    torchlazy.sync()
    torchlazy.reset_metrics()
    product = other @ other.T  # something else is pending
    mask[1] = 0
    mask.mul_(2)
    window = mask[1:]
    assert window.sum().item() == 2.0
    assert not mask.all()
    assert int(mask.max()) == 2
    assert mask[2].item() == 2.0
    mask.fill_(5)
    assert mask[0].item() == 5.0
    assert window.max().item() == 5.0
    assert torchlazy.metrics()["cuts"].keys() <= {"sync"}
    assert product.sum().item() == 12.0


def test_a_loop_that_looks_at_what_it_carries_is_cut_at_each_look():
    """Generation asks after each token whether all sequences are finished, of something that no product leads to."""
    w = torch.rand(4, 4).to("lazy")

    def generate(rounds):
        state, left = torch.rand(2, 4).to("lazy"), torch.full((2,), rounds).to("lazy")
        count = 0
        while left.max() > 0:
            state = torch.tanh(state @ w)
            left = left - 1
            count += 1
        return state, count

    assert generate(6)[1] == 6
    torchlazy.sync()
    torchlazy.reset_metrics()
    assert generate(6)[1] == 6 and generate(9)[1] == 9
    counts = torchlazy.metrics()
    assert counts["cuts"]["bool"] >= 15 and not counts["reads_apart"]
    assert counts["misses"] <= 2, counts  # whatever the number of rounds


DEAR = {
    "a product": lambda x: (x @ x).sum().item(),
    "random numbers": lambda x: torch.rand(3, device="lazy").sum().item(),
    "much work": lambda x: (x.expand(2000, 1000) + 1).sum().item(),
}


@pytest.mark.parametrize("read", DEAR.values(), ids=DEAR)
def test_what_is_dear_is_cut(read):
    x = torch.ones(1, 1).to("lazy")
    pending = (x + 1).exp()
    _, cuts, apart = cuts_of(lambda: (pending.exp(), read(x), pending))
    assert not apart and sum(cuts.values()) >= 1


def test_an_error_is_that_of_a_cut():
    x, places = torch.ones(3).to("lazy"), torch.tensor([5]).to("lazy")
    pending = x @ x
    with pytest.raises(IndexError):
        x[places].sum().item()
    assert pending.item() == 3


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.outer = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        hidden = self.inner(x).tanh()
        if not mask.bool().all():
            hidden = hidden * mask[:, None]
        return self.outer(hidden)


def test_a_module_that_looks_at_its_mask_is_replayed_with_its_gradients():
    torch.manual_seed(0)
    plain = Masked()
    lazy = Masked()
    lazy.load_state_dict(plain.state_dict())
    run = torchlazy.compile(lazy.to("lazy"))
    masks = [torch.ones(3), torch.tensor([1.0, 0.0, 1.0])]
    for turn in range(12):
        x, mask = torch.randn(3, 4), masks[turn % 3 == 2]
        for model, where in ((plain, "cpu"), (run, "lazy")):
            model.zero_grad()
            model(x.to(where), mask.to(where)).square().sum().backward()
        for mine, theirs in zip(lazy.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(mine.grad.cpu(), theirs.grad)
    report = run.report()
    assert report.variants == 2 and report.captures <= 3 and report.replays >= 4 and not report.alarm, report


class Picked(nn.Module):
    """Looks at numbers that positions pick, and scales by an ordinary tensor that it makes."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, mask: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        hidden = self.inner(x) / torch.sqrt(torch.tensor(x.size(-1), dtype=torch.float) * 3)
        if nn.functional.pad(mask[rows], (0, 1)).any().item():
            hidden = hidden * 2
        return hidden.tanh()


def test_positions_that_pick_what_is_looked_at_run_apart_with_gradients():
    torch.manual_seed(0)
    plain, lazy = Picked(), Picked()
    lazy.load_state_dict(plain.state_dict())
    run = torchlazy.compile(lazy.to("lazy"))
    masks = [torch.zeros(3), torch.tensor([0.0, 0.0, 1.0])]
    for turn in range(12):
        x, mask, rows = torch.randn(3, 4), masks[turn % 3 == 2], torch.tensor([turn % 2, 2])
        for model, where in ((plain, "cpu"), (run, "lazy")):
            model.zero_grad()
            model(x.to(where), mask.to(where), rows.to(where)).square().sum().backward()
        for mine, theirs in zip(lazy.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(mine.grad.cpu(), theirs.grad)
    report = run.report()
    assert report.variants == 2 and report.replays >= 4 and not report.alarm, report
    x, beyond = torch.randn(3, 4, device="lazy"), torch.tensor([0, 3])
    with pytest.raises(IndexError):
        run(x, masks[0].to("lazy"), beyond.to("lazy"))
    x, rows = torch.randn(3, 4), torch.tensor([0, 2])
    assert torch.allclose(run(x.to("lazy"), masks[1].to("lazy"), rows.to("lazy")).cpu(), plain(x, masks[1], rows))


class LooksBack(torch.autograd.Function):
    """Its backward goes on as the mask has it."""

    @staticmethod
    def forward(ctx, x, mask):
        ctx.save_for_backward(mask)
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        (mask,) = ctx.saved_tensors
        return (grad * 2 if mask.all() else grad * 0), None


def test_a_backward_that_looks_is_no_joint_but_right():
    x, mask = torch.ones(3).to("lazy").requires_grad_(), torch.ones(3).to("lazy")
    with pytest.raises(CannotRecordJoint, match="needs a value"):
        JointCall(LooksBack.apply)(x, mask)
    run = torchlazy.compile(lambda x, mask: LooksBack.apply(x * 1, mask))
    for turn in range(6):
        x = torch.ones(3).to("lazy").requires_grad_()
        run(x, torch.full((3,), float(turn % 2)).to("lazy")).sum().backward()
        assert x.grad.tolist() == [2.0 * 1.0 * (turn % 2)] * 3


def test_who_watches_reads_sees_them():
    given = [t.to("lazy") for t in tensors(1, 0)]
    with pytest.raises(SyncError), torchlazy.no_sync():
        masked(*given)
    with torchlazy.sync_budget(5) as reads:
        masked(*given)
    assert [sync.cause for sync in reads.syncs] == ["bool"]
    with pytest.raises(SyncInside):
        torchlazy.compile(masked, fullgraph=True)(*given)


def test_a_number_that_was_copied_from_an_input() -> None:
    source, copy, other = (torch.tensor(v).to("lazy") for v in (2.0, 0.0, 1.0))
    torchlazy.sync()
    copy.copy_(source)
    kept = other + 1
    assert copy.item() == 2
    assert kept.item() == 2
