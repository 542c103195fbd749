"""Results of collectives that a replay ran are taken once, in order, and nothing else in their place."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torchlazy.lazy.ops.collective_log import CollectiveLog, FinishedCollective, copies_of

if not torch.distributed.is_available():
    pytest.skip("needs torch.distributed", allow_module_level=True)
SUM, SEND = torch.ops.c10d.allreduce_.default, torch.ops.c10d.broadcast_.default


def ran(*values: float) -> list[FinishedCollective]:
    return [FinishedCollective(SUM, copies_of([torch.full((2,), float(value))])) for value in values]


def test_results_are_taken_in_order_by_whoever_comes_next():
    once, first, second = CollectiveLog(), torch.zeros(2), torch.zeros(2)
    with once:
        once.keep(ran(1, 2))
        assert once.take(SUM, [first])
        once.keep(ran(1))  # the next replay took it, and was given up as well
        assert once.take(SUM, [first]) and once.take(SUM, [second]) and not once.take(SUM, [second])
    assert first.tolist() == [1, 1] and second.tolist() == [2, 2]


@pytest.mark.parametrize(("op", "shape"), [(SEND, 2), (SUM, 3)])
def test_another_collective_is_an_error(op, shape):
    once = CollectiveLog()
    with pytest.raises(RuntimeError, match="no longer in step"), once:
        once.keep(ran(1))
        once.take(op, [torch.zeros(shape)])
    assert not once.take(SUM, [torch.zeros(2)])


def test_one_that_nobody_comes_to_is_an_error():
    once = CollectiveLog()
    with pytest.raises(RuntimeError, match="a replay of this call ran it, and its Python did not"), once:
        once.keep(ran(1))
    with pytest.raises(ZeroDivisionError), once:
        once.keep(ran(1))
        raise ZeroDivisionError
    assert not once.take(SUM, [torch.zeros(2)])


def in_a_thread(function):
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result()


def behind_a_backward(function):
    """What the function returns inside of a backward."""
    found, x = [], torch.zeros(2, requires_grad=True)
    x.register_hook(lambda gradient: found.append(function()))
    x.sum().backward()
    return found[0]


def test_a_backward_in_a_thread_of_its_own_takes_what_its_call_has_left():
    """As torch's engine runs one on a GPU; other threads have nothing to do with the call."""
    once, written = CollectiveLog(), torch.zeros(2)
    with once:
        once.keep(ran(1))
        assert not in_a_thread(lambda: once.take(SUM, [written]))
        assert in_a_thread(lambda: behind_a_backward(lambda: once.take(SUM, [written])))
        assert not behind_a_backward(lambda: once.take(SUM, [written]))
    assert written.tolist() == [1, 1]


def test_of_two_calls_that_have_something_left_nobody_knows_whose_a_backward_is():
    once = CollectiveLog()
    once.keep(ran(1))
    with ThreadPoolExecutor(1) as other, pytest.raises(RuntimeError, match="2 threads"):
        other.submit(once.keep, ran(2)).result()
        in_a_thread(lambda: behind_a_backward(lambda: once.take(SUM, [torch.zeros(2)])))
