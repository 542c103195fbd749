"""What following costs: Python microseconds an operator, beside eager, recording alone and torch's lazy backend.

python benchmarks/record_cost.py [--rounds 60] [--limit 5.5] [--share 0.95]

Each round times all sides one after the other (which goes first alternates), with the same Python code on tiny tensors.
The clock of a lazy side covers recording only: the cut that runs the operators stands after it. Garbage collection is
off while a clock runs and one thread computes, so that eager's time is its Python and dispatch time. The builtin
backend (C++, the same device type) runs in a process of its own, `--no-builtin` leaves it out. So does `record`: the
least that a wrapper subclass does which only records in `__torch_dispatch__` (a new wrapper, a slot, an entry), with
torch as it is and without torchlazy. `above` is the median of lazy minus eager within a round, `share` that of lazy
over record. Exits with 1 if the elementwise chain with grad takes more than --limit, where record takes 5.8, and more
than --share of record; or if a view or detach takes more than that chain.
"""

from __future__ import annotations

import argparse
import gc
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar

SERVES = sys.argv[1] if sys.argv[1:2] in (["--serve-builtin"], ["--serve-record"]) else ""
if SERVES:
    os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"  # torchlazy would claim the device

import torch  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402
from torch.overrides import TorchFunctionMode  # noqa: E402

if not SERVES:
    import torchlazy

CHAIN = 200


@dataclass(frozen=True)
class Case:
    """`prepare(device)` returns the function that is timed; it returns what must stay alive until the cut."""

    name: str
    prepare: Callable[[str], Callable[[], object]]


@dataclass
class Times:
    """Microseconds an operator, one entry a round."""

    eager: list[float] = field(default_factory=list)
    lazy: list[float] = field(default_factory=list)
    record: list[float] = field(default_factory=list)
    builtin: list[float] = field(default_factory=list)

    @property
    def share(self) -> float:
        shares = [b / a for a, b in zip(self.record, self.lazy, strict=bool(self.record))]
        return statistics.median(shares) if shares else math.nan

    @property
    def above(self) -> float:
        return statistics.median(b - a for a, b in zip(self.eager, self.lazy, strict=True))


def chain(requires_grad: bool) -> Callable[[str], Callable[[], object]]:
    """`CHAIN` dependent adds and multiplications of four numbers."""

    def prepare(device: str) -> Callable[[], object]:
        x = torch.ones(4, device=device, requires_grad=requires_grad)
        y = torch.full((4,), 0.5, device=device)

        def run() -> Tensor:
            z = x
            for _ in range(CHAIN // 2):
                z = z + y
                z = z * y
            return z

        return run

    return prepare


def in_place_chain(device: str) -> Callable[[], object]:
    """The same with in-place operators, as optimizers write them."""
    x = torch.ones(4, device=device)
    y = torch.full((4,), 0.5, device=device)

    def run() -> Tensor:
        for _ in range(CHAIN // 2):
            x.add_(y)
            x.mul_(y)
        return x

    return run


def view_chain(device: str) -> Callable[[], object]:
    """Views of views, four deep: half of what a transformer dispatches.

    Deeper chains cost more on the lazy device: autograd composes the functions of a chain of views of a subclass anew
    at each link, so link number 100 costs a hundred times the first.
    """
    x = torch.ones(4, 2, device=device)

    def run() -> Tensor:
        for _ in range(CHAIN // 4):
            z = x.transpose(0, 1).unsqueeze(0).squeeze(0).transpose(0, 1)
        return z + z  # a trace of which nothing is computed is not remembered

    return run


def detach_chain(device: str) -> Callable[[], object]:
    """What autograd calls most often."""
    x = torch.ones(4, 2, device=device)

    def run() -> Tensor:
        for _ in range(CHAIN):
            z = x.detach()
        return z + z

    return run


def perceptron(train: bool) -> Callable[[str], Callable[[], object]]:
    """Four small layers; with `train` also loss and backward, without an optimizer (its step is a cut)."""

    def prepare(device: str) -> Callable[[], object]:
        torch.manual_seed(0)
        layers: list[nn.Module] = []
        for _ in range(4):
            layers += [nn.Linear(8, 8), nn.LayerNorm(8), nn.GELU()]
        model = nn.Sequential(*layers).to(device)
        x, target = torch.randn(4, 8).to(device), torch.randn(4, 8).to(device)

        def run() -> object:
            if not train:
                # Ten times: 16 operators alone would measure the caches that the collection before each round empties.
                with torch.no_grad():
                    for _ in range(10):
                        y = model(x)
                return y
            model.zero_grad()
            loss = F.mse_loss(model(x), target)
            loss.backward()
            return loss

        return run

    return prepare


WITH_GRAD = "elementwise chain, grad"
CASES = (
    Case("elementwise chain", chain(requires_grad=False)),
    Case(WITH_GRAD, chain(requires_grad=True)),
    Case("in-place chain", in_place_chain),
    Case("view chain", view_chain),
    Case("detach chain", detach_chain),
    Case("MLP forward, no grad", perceptron(train=False)),
    Case("MLP forward and backward", perceptron(train=True)),
)
RECORDED = {case.name for case in CASES[:5]}  # what the side that only records can do
_started: list[bool] = []  # torch's backend, in the child that serves it


def count_operators(run: Callable[[], object]) -> int:
    """How many operators one call of the lazy side records."""
    torchlazy.sync()
    torchlazy.reset_metrics()
    kept = run()
    torchlazy.sync()
    del kept
    return int(torchlazy.metrics()["ops"])


def time_once(run: Callable[[], object], finish: Callable[[], object]) -> float:
    """Seconds of one call; the cut and the release of its results come after the clock."""
    gc.collect()
    gc.disable()
    started = time.perf_counter()
    kept = run()
    seconds = time.perf_counter() - started
    gc.enable()
    finish()
    del kept
    return seconds


class Other:
    """Another side in a child process, which times one call for each line that it reads."""

    def __init__(self, serves: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, __file__, serves], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def time_once(self, case: Case) -> float:
        """Seconds of one call of the case there; NaN where it does not work there."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(case.name + "\n")
        self.process.stdin.flush()
        return float(self.process.stdout.readline() or "nan")


class Recorded(Tensor):
    """A tensor that only records: what any lazy tensor in Python does at least for an operator.

    Results are made by the place of the operator in the trace, as it was the first time; `slot` names a value.
    """

    slot: int
    entries: ClassVar[list[tuple[object, ...]]] = []
    making: ClassVar[
        list[tuple[object, ...] | None]
    ] = []  # with what the result is made; None: the first argument is returned

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __torch_dispatch__(op, types, args=(), kwargs=None):  # type: ignore[no-untyped-def, override]
        entries, making = Recorded.entries, Recorded.making
        number = len(entries)
        try:
            made = making[number]
            slots = tuple([a.slot for a in args])
        except (AttributeError, IndexError):
            if number == len(making):
                making.append(_making(op, args))
            made = making[number]
            slots = tuple([getattr(a, "slot", a) for a in args])
        result = args[0] if made is None else torch.Tensor._make_wrapper_subclass(*made)
        result.slot = number
        entries.append((op, slots, number))
        return result


def _making(op: Callable[..., Tensor], args: tuple[object, ...]) -> tuple[object, ...] | None:
    metas = [
        torch.empty_strided(a.shape, a.stride(), dtype=a.dtype, device="meta") if isinstance(a, Tensor) else a
        for a in args
    ]
    result = op(*metas)
    return None if result is metas[0] else _wrapper_of(result)


def _wrapper_of(like: Tensor) -> tuple[object, ...]:
    strides = None if like.is_contiguous() else like.stride()
    return Recorded, tuple(like.shape), strides, None, None, like.dtype, torch.strided, torch.device("lazy")


class RecordedFactories(TorchFunctionMode):
    """Tensors made on "lazy" are such wrappers."""

    def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def, override]
        if str((kwargs or {}).get("device")) != "lazy":
            return func(*args, **(kwargs or {}))
        like = func(*args, **(kwargs | {"device": "meta"}))
        made = torch.Tensor._make_wrapper_subclass(*_wrapper_of(like))
        made.slot = -1
        return made.requires_grad_(like.requires_grad)


def serve_record(case: Case) -> tuple[Callable[[], object], Callable[[], object]]:
    """What the child that only records times, and what comes after it; a case alone in the child's trace."""
    if case.name not in RECORDED:
        raise RuntimeError("it records neither modules nor backwards")
    with RecordedFactories():
        run = case.prepare("lazy")
    making: list[tuple[object, ...] | None] = []

    def timed() -> object:
        Recorded.making = making
        return run()

    return timed, Recorded.entries.clear


def serve_builtin(case: Case) -> tuple[Callable[[], object], Callable[[], object]]:
    """The same for torch's own lazy backend."""
    from torch._lazy import mark_step, wait_device_ops
    from torch._lazy.ts_backend import init

    if not _started:
        init()
        _started.append(True)

    def finish() -> None:
        mark_step()
        wait_device_ops()

    return case.prepare("lazy"), finish


def serve(prepare: Callable[[Case], tuple[Callable[[], object], Callable[[], object]]]) -> None:
    """The child's side."""
    torch.set_num_threads(1)
    cases = {case.name: case for case in CASES}
    prepared: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {}
    for line in sys.stdin:
        name = line.strip()
        try:
            if name not in prepared:
                prepared[name] = prepare(cases[name])
            seconds = time_once(*prepared[name])
        except RuntimeError:  # an operator that it lacks
            seconds = float("nan")
        print(seconds, flush=True)


def measure(
    case: Case, rounds: int, builtin: Other | None, record: Other | None = None, warmup: int = 5
) -> tuple[int, Times]:
    """Operators a call, and the times of all rounds after the warm-up."""
    eager, lazy = case.prepare("cpu"), case.prepare("lazy")
    operators = count_operators(lazy)
    if not operators:
        raise RuntimeError(f"{case.name}: the lazy side recorded no operator; is the device registered?")
    times = Times()
    for number in range(warmup + rounds):
        sides: list[tuple[list[float], Callable[[], float]]] = [
            (times.eager, lambda: time_once(eager, torchlazy.sync)),
            (times.lazy, lambda: time_once(lazy, torchlazy.sync)),
        ]
        if record is not None and case.name in RECORDED:
            sides.append((times.record, lambda: record.time_once(case)))
        if builtin is not None:
            sides.append((times.builtin, lambda: builtin.time_once(case)))
        for kept, run in sides if number % 2 else reversed(sides):
            seconds = run()
            if number >= warmup:
                kept.append(1e6 * seconds / operators)
    return operators, times


def main() -> int:
    if SERVES:
        serve(serve_builtin if SERVES == "--serve-builtin" else serve_record)
        return 0
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--limit", type=float, default=5.5, help="microseconds an operator with grad")
    parser.add_argument("--share", type=float, default=0.95, help="of what recording alone takes, with grad")
    parser.add_argument("--no-builtin", action="store_true", help="without torch's builtin lazy backend")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torchlazy.set_target("cpu")
    builtin = None if options.no_builtin else Other("--serve-builtin")
    record = Other("--serve-record")
    print(
        f"torch {torch.__version__}, {options.rounds} rounds, medians (least in brackets), microseconds an operator\n"
    )
    sides = "".join(f"{side:>16}" for side in ("eager", "lazy", "record", "builtin"))
    print(f"{'case':<28}{'operators':>10}{sides}{'above':>8}{'share':>8}")
    lazy: dict[str, float] = {}
    shares: dict[str, float] = {}
    for case in CASES:
        operators, times = measure(case, options.rounds, builtin, record)
        columns = "".join(
            f"{f'{statistics.median(side):.2f} ({min(side):.2f})' if side else '-':>16}"
            for side in (times.eager, times.lazy, times.record, times.builtin)
        )
        lazy[case.name] = statistics.median(times.lazy)
        shares[case.name] = times.share
        print(f"{case.name:<28}{operators:>10}{columns}{times.above:>8.2f}{times.share:>8.2f}", flush=True)
    for other in (builtin, record):
        if other is not None:
            other.process.kill()
    chain_cost, share = lazy[WITH_GRAD], shares[WITH_GRAD]
    cheap = max(lazy["view chain"], lazy["detach chain"])
    print(
        f"\nwith grad: {chain_cost:.2f}, the limit is {options.limit:g}, or {share:.2f} of recording alone, the limit "
        f"is {options.share:g}; the dearest view: {cheap:.2f}"
    )
    return int((chain_cost > options.limit and share > options.share) or cheap > chain_cost)


if __name__ == "__main__":
    sys.exit(main())
