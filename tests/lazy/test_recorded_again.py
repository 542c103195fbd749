"""Programs that come again, and differ a little: natively, and recorded in Python."""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable

import pytest
import torch
import torchlazy
from torchlazy.lazy.api import recorder
from torchlazy.lazy.record.tensor import LazyTensor

from tests.lazy.known_traces import known

pytestmark = pytest.mark.usefixtures("way")
Program = Callable[[torch.Tensor, int], torch.Tensor]


def squared(y: torch.Tensor, times: int) -> torch.Tensor:
    """A chain of so many products."""
    for _ in range(times):
        y = y * y
    return y


def turned(x: torch.Tensor, turn: int) -> torch.Tensor:
    """Each turn is another program of the same operators."""
    exponents: tuple[float, ...] = (2.5, 2.0, 3.0, 0.0, -0.0)
    y = (x + 1.5).pow(exponents[turn % 5])
    y = y.sum([turn % 2], turn % 3 == 0)
    y = y.clamp(None if turn % 2 else 0.5, 2.0 if turn % 2 or turn % 4 else None)
    return (y.unsqueeze(turn % 2) * y.unsqueeze(0)).cumsum(0, dtype=None if turn % 3 else torch.float64)


def retyped(x: torch.Tensor, turn: int) -> torch.Tensor:
    """1, 1.0 and True are equal, and make results of three types."""
    whole = (x * 4).to(torch.int32)
    return torch.add(whole.eq(1), (1, 1.0, True)[turn % 3]) * (2, 2.0)[turn % 2]


def crossed(x: torch.Tensor, turn: int) -> torch.Tensor:
    """The same operators on other values of the same geometry."""
    y, z = x * 3, x * 5
    if turn % 2:
        y, z = z, y
    w = (y - z) / z
    w.sub_(y if turn % 3 else z)
    return w - (w if turn % 4 else y)


def windowed(x: torch.Tensor, turn: int) -> torch.Tensor:
    """A written window: what was a view's value is no more."""
    y = x * 2
    row = y[turn % 2]
    before = row * 1
    if turn % 3:
        y.mul_(3)
    row.neg_()
    return before + row + y[0]


PROGRAMS: dict[str, Program] = {p.__name__: p for p in (turned, retyped, crossed, windowed)}


@pytest.mark.parametrize("name", PROGRAMS)
def test_values_are_eager_s_whatever_differs(name: str) -> None:
    x = torch.rand(3, 3)
    lazy = x.to("lazy")
    for turn in (0, 0, 0, 0, *range(1, 12), 1, 2, 1, 2, 5, 5, 5):
        mine, theirs = PROGRAMS[name](lazy, turn), PROGRAMS[name](x, turn)
        assert mine.dtype == theirs.dtype
        torch.testing.assert_close(mine.cpu(), theirs)


@pytest.mark.parametrize("way", ["python"], indirect=True)
def test_what_the_recorder_knows_of_a_tensor_has_one_form_however_it_is_made() -> None:
    """One dictionary with the names in one order: Python reads these at a fraction of the cost of others."""
    x = torch.rand(2, 3).to("lazy")

    def program() -> list[torch.Tensor]:
        made = [x + 1, x.t(), x.detach(), *x.unbind(), *x.max(0)]
        made += [made[0].t(), made[1] * 2, made[0].mul_(2), made[1].view_as(made[1]), torch.nn.Parameter(x.detach())]
        with torch.inference_mode():
            made += [x.t(), x + 1, x.detach()]
        return made

    for _ in range(4):  # recorded, learned, followed and walked
        for tensor in program():
            assert [name for name in tensor.__dict__ if name != "_is_param"] == list(x.__dict__)
        torchlazy.flush()
    gone = weakref.ref(x.t()._storage_), weakref.ref((x + 1)._storage_)  # type: ignore[attr-defined]
    torchlazy.flush()
    assert gone[0]() is not None and gone[1]() is None


def test_tensors_of_lazy_mode_are_recorded_inside_of_it_only() -> None:
    x, weight = torch.rand(2, 3), torch.rand(2, 3)

    def program() -> list[torch.Tensor]:
        y = x + weight
        z = (y * y).t().unsqueeze(0)
        y.add_(weight)
        return [y, z, z.detach()]

    def inside() -> list[torch.Tensor]:
        with torchlazy.lazy_mode():
            return program()

    for _ in range(4):
        made = inside()
    expected = program()
    torch.testing.assert_close([one.tolist() for one in inside()], [one.tolist() for one in expected])
    y, z, twin = made
    recorded = recorder.ops_recorded
    outside = [y * y, z.transpose(1, 2), twin.squeeze(0), y.add_(weight), z.detach()]
    assert recorder.ops_recorded == recorded and not recorder.entries  # each of them ran at once
    torch.testing.assert_close(outside[0].tolist(), (expected[0] ** 2).tolist())
    torch.testing.assert_close(y.tolist(), (expected[0] + weight).tolist())


@pytest.mark.usefixtures("recorded_in_python")
def test_a_path_recorded_in_lazy_mode_is_left_outside_of_it_where_a_tensor_is_not_lazy() -> None:
    """A number made in the mode may stand among lazy operands anywhere; an operator on it alone is of the mode."""
    x = torch.rand(3).to("lazy")
    with torchlazy.lazy_mode():
        number = torch.ones(()) * 3

    def program() -> tuple[torch.Tensor, torch.Tensor]:
        y = x * number  # both are inputs
        alone = number + number
        alone = alone * alone
        return y + y, alone

    for _ in range(4):
        with torchlazy.lazy_mode():
            inside = program()
            assert not inside[1]._storage_.real  # type: ignore[attr-defined]  # recorded
    for _ in range(3):
        y, alone = program()
        assert recorder.live_storages() == 1 and alone.item() == 36  # what is of the mode ran at once
        torch.testing.assert_close(y.cpu(), x.cpu() * 6)


def test_a_write_to_a_tensor_of_lazy_mode_ends_the_walks_of_a_trace() -> None:
    """What it holds may then be a value of another device, by which walks would take it for a tensor of that device."""
    x = torch.rand(()).to("lazy")
    with torchlazy.lazy_mode():
        number = torch.ones(()) * 3

    def program(target: torch.Tensor) -> torch.Tensor:
        torch.add(x, x, out=target)
        return target * target

    for _ in range(4):
        lazy = program(torch.zeros((), device="lazy"))
        torch.testing.assert_close(lazy.cpu(), (x.cpu() * 2) ** 2)
    for _ in range(2):
        plain = program(number)
        assert plain.device.type == "cpu"
        torch.testing.assert_close(plain.item(), float((x.cpu() * 2) ** 2))


@pytest.mark.parametrize("way", ["python"], indirect=True)
def test_lines_are_written_down_from_when_they_are_wanted() -> None:
    x = torch.rand(4).to("lazy")

    def program() -> torch.Tensor:
        return squared(x + 1.5, 5)

    known(program)
    recorder.keep_frames = True
    try:
        kept = program()
        assert len(recorder.frames) == len(recorder.entries) == 6
    finally:
        recorder.keep_frames = False
    del kept


@pytest.mark.parametrize("way", ["python"], indirect=True)
def test_nobody_records_while_the_lock_is_held() -> None:
    x = torch.rand(4).to("lazy")

    def program() -> torch.Tensor:
        return squared(x + 1.5, 20)

    known(program)
    begun = threading.Event()
    results: list[object] = []

    def other() -> None:
        begun.set()
        results.append(program().tolist())

    y = x + 1.5  # at the second step
    with recorder.lock:
        thread = threading.Thread(target=other)
        thread.start()
        assert begun.wait(600)
        thread.join(0.2)
        assert not results and len(recorder.entries) == 1
    thread.join(600)
    torch.testing.assert_close(torch.tensor(results[0]), program().cpu())
    del y


def test_the_lock_is_not_released_by_others() -> None:
    with pytest.raises(RuntimeError, match="does not hold it"):
        recorder.lock.release()
    assert recorder.lock.acquire() and recorder.lock.acquire(timeout=600)
    recorder.lock.release()
    recorder.lock.release()


def test_threads_record_the_same_program_at_once() -> None:
    """Each has its own values: what one thread walks past is no step for the other."""
    count, turns = 4, 12
    inputs = [torch.rand(4) + number for number in range(count)]

    def program(x: torch.Tensor) -> torch.Tensor:
        y = x + 0.5
        for _ in range(12):
            y = (y * x).view(2, 2).t().reshape(4)
            y.sub_(x)
            y = y / (y.detach().abs().sum() + 1)
        return y

    lazies = [x.to("lazy") for x in inputs]
    for x in lazies:
        for _ in range(3):
            program(x).tolist()
    failures: list[str] = []
    start = threading.Barrier(count)

    def run(number: int) -> None:
        expected = program(inputs[number])
        start.wait()
        for _ in range(turns):
            found = torch.tensor(program(lazies[number]).tolist())
            if not torch.allclose(found, expected, rtol=1e-4, atol=1e-5):
                failures.append(f"{number}: {found} {expected}")

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=run, args=(number,)) for number in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(600)
    finally:
        sys.setswitchinterval(interval)
    assert not failures, failures[0]


def test_views_under_inference_mode_are_as_eager_s() -> None:
    x = torch.rand(2, 3).to("lazy")

    def program() -> torch.Tensor:
        y = x + 1.0
        return y.t().unsqueeze(0)

    known(program)
    with torch.inference_mode():
        assert program().is_inference() and not x.t().is_inference()
    assert not program().is_inference()


def test_errors_of_an_operator_are_eager_s_on_a_known_path() -> None:
    x = torch.rand(2, 3).to("lazy")

    def program(dim: int) -> torch.Tensor:
        y = x + 1.0
        y = y * y
        return y.sum(dim)

    known(lambda: program(1))
    for _ in range(2):
        with pytest.raises(IndexError):
            program(7)
        torch.testing.assert_close(program(1).cpu(), ((x.cpu() + 1) ** 2).sum(1))


@pytest.mark.parametrize("way", ["python"], indirect=True)
def test_writes_count_as_changes_where_gradients_are_recorded() -> None:
    from torchlazy.lazy.record.tensor import writes_with_grad

    x = torch.rand(3).to("lazy")

    def program() -> torch.Tensor:
        y = x * 2.0
        y.add_(x)
        y.neg_()
        return y

    known(program)
    before, value = writes_with_grad[0], program()
    assert writes_with_grad[0] == before + 2 and value._version == 2
    with torch.no_grad():
        program()
    assert writes_with_grad[0] == before + 2


@pytest.mark.parametrize("way", ["python"], indirect=True)
def test_other_subclasses_keep_their_rules() -> None:
    """Torch asks us what to call for an operator on a subclass: of others it is told what it would have found."""

    class Other(torch.Tensor):
        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def, override]
            return torch.tensor(1.0)

    other = torch.Tensor._make_wrapper_subclass(Other, (2,))
    assert torch.ops.aten.neg(other).item() == 1.0
    torch.library.register_torch_dispatch(
        "aten::sin", Other, lambda cls, func, types, args=(), kwargs=None: torch.tensor(2.0)
    )
    assert torch.ops.aten.sin(other).item() == 2.0
    assert type(torch.ops.aten.sin(torch.rand(2).to("lazy"))) is LazyTensor
