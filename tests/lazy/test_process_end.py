"""Objects that read or compute on lazy tensors when the process ends: it ends soon, and with its own exit status.

Invariant: functions of `atexit` compute as ever; what runs while Python takes its modules apart computes, or raises.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import atexit, sys, threading, time
mode = sys.argv[1]

def reader():
    found = [((x * 3 + 1).sum()).item() for _ in range(4)]
    torchlazy.sync()
    torchlazy.wait_for_compile()
    print("read", found == [51.0] * 4, (pending + 1).sum().item() == 81, flush=True)

if "early" in mode:  # runs after everything that torch and torchlazy do at the end
    atexit.register(reader)
import torch, torchlazy
torchlazy.config.tiers = "off" if "foreground" in mode else "on"
x = torch.arange(6.0).to("lazy")
pending = x * 5
if "late" in mode:
    atexit.register(reader)

class Reads:
    def __init__(self):
        self.value = x * 2 + 1
    def __del__(self):
        self.value.add_(1)
        self.more = torch.relu(self.value) * 3
        self.more.sum().item()
        self.value.tolist()

class Cycle:
    def __init__(self):
        self.me, self.inner = self, Reads()

kept, cycle, sys.kept = Reads(), Cycle(), Reads()
Reads()
for turn in range(3):
    (torch.tanh(x * turn) + x).sum().item()
if "compiled" in mode:
    compiled = torchlazy.compile(lambda x: (x * 7).sum())
    for _ in range(3):
        compiled(x)
if "thread" in mode:
    threading.Thread(target=lambda: (time.sleep(0.2), print((pending * 2).sum().item()))).start()
"""


@pytest.mark.parametrize("mode", ["plain", "late", "early", "late foreground compiled", "late early compiled thread"])
def test_a_process_that_computes_at_its_end(mode: str) -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM, mode], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "INTERNAL ASSERT" not in done.stderr
    for line in done.stdout.splitlines():
        assert line in ("read True True", "150.0"), done.stdout
    assert done.stdout.count("read") == mode.count("late") + mode.count("early"), done.stderr
