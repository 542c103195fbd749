"""Lazy tensors that go to other processes share their memory with them, as ordinary tensors do."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import torch, torchlazy
import torch.multiprocessing as mp
from multiprocessing.reduction import ForkingPickler


class Image(torch.Tensor):
    pass


def add(queue, tensors):
    with torch.no_grad():
        for x in tensors:
            x.add_(1)
    queue.put([(type(x).__name__, str(x.device), x.requires_grad, x.tolist()) for x in tensors])
    back = torch.ones(2, device=tensors[0].device) + 1
    queue.put(back)
    queue.get()


def play(device, how):
    context = mp.get_context(how)
    there, here = context.SimpleQueue(), context.SimpleQueue()
    whole = torch.zeros(4, device=device) + 1
    image = torch.zeros(2).to(device).as_subclass(Image)
    tensors = [whole, whole[1:3], torch.nn.Parameter(torch.zeros(2, device=device)), image]
    child = context.Process(target=add, args=(Both(there, here), tensors))
    child.start()
    seen, back = there.get(), there.get()
    whole.mul_(2)
    found = [seen, back.tolist(), str(back.device), [x.tolist() for x in tensors]]
    here.put(None)
    child.join()
    assert child.exitcode == 0
    return found


class Both:
    def __init__(self, put, get):
        self.put, self.get = put.put, get.get


if __name__ == "__main__":
    want, have = play("cpu", "spawn"), play("lazy", "spawn")
    want = eval(repr(want).replace("'cpu'", "'lazy:0'"))
    have = eval(repr(have).replace("LazyTensor", "Tensor").replace("'lazy'", "'lazy:0'"))
    for one in (want, have):
        one[0][2] = ("", *one[0][2][1:])  # a parameter's class
    assert have == want, (have, want)
    try:
        ForkingPickler.dumps(torch.ones(2, device="lazy", requires_grad=True) * 2)
    except RuntimeError as why:
        assert "detach" in str(why)
    else:
        raise AssertionError("a graph went to another process")
    torchlazy.config.native = "off"
    with torchlazy.lazy_mode():
        x = torch.ones(3) * 2
        make, given = torchlazy.lazy.device.processes._reduce(x)
        other = make(*given)
        x.add_(1)
        assert other.tolist() == [3.0] * 3, other
    print("as in eager")
"""


@pytest.mark.slow
@pytest.mark.parametrize("native", ["off", "on"])
def test_memory_is_shared_with_spawned_processes(native: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    monkeypatch.setenv("TORCHLAZY_NATIVE_DEVICE", native)
    done = subprocess.run([sys.executable, str(program)], capture_output=True, text=True, timeout=300, check=False)
    assert done.stdout.strip().endswith("as in eager"), done.stdout + done.stderr
