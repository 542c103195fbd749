"""`mode="max-autotune"`: the launch facts of a program's large Triton kernels, chosen by measuring on the device.

Each candidate differs from what the rules chose (inductor/codegen/triton_choices.py) in threads a block or in a smaller
block. Kernels run on memory of zeros of their own, with the cache of the device overwritten before each run; what they
compute is not looked at. A choice is kept on disk by kernel, sizes and device.

Invariant: a candidate is the same text with other launch facts. Blocks only shrink, and by halves: a text that left out
masks because the rules' block divides its size is right for every half of it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torchlazy.runtime import executor
from torchlazy.runtime.program.program import Launch, Program
from torchlazy.runtime.program.steps import bytes_by_name
from torchlazy.runtime.toolchains import toolchain_triton
from torchlazy.runtime.toolchains.kernel_cache import read_regular, write_atomically
from torchlazy.runtime.toolchains.toolchain import LoadedKernel

Options = tuple[tuple[str, int], ...]
Measure = Callable[[LoadedKernel, Launch], float]

LEAST_BYTES = 1 << 20  # of a kernel's buffers: smaller ones take no time that could be saved
MOST_KERNELS = 24  # of one program, the largest ones: each candidate is a compilation
MARGIN = 0.97  # of the rules' time that a candidate must stay below
_REPEATS = 7
_FLUSH_BYTES = 128 << 20  # more than the device's cache


@dataclass(frozen=True, slots=True)
class TuningDecision:
    """What was chosen for one kernel, and why."""

    kernel: str
    options: Options
    reason: str


def candidates(options: Options) -> list[Options]:
    """Other launch facts for the same text: half and twice the threads, and half the block with half the threads."""
    facts = dict(options)
    warps, xblock = facts["num_warps"], facts["XBLOCK"]
    found = [facts | {"num_warps": other} for other in (warps // 2, warps * 2) if 1 <= other <= 16]
    if xblock >= 32:
        found.append(facts | {"XBLOCK": xblock // 2, "num_warps": max(warps // 2, 1)})
    return [tuple((name, fact[name]) for name, _ in options) for fact in found]


def tuned(
    run: executor.Executable, kernels: Sequence[LoadedKernel]
) -> tuple[executor.Executable, list[TuningDecision]]:
    """The program with measured launch facts; the very executable where there was nothing to choose.

    `kernels[i]` is the loaded `run.program.kernels[i]`. CUDA work goes to the current stream, and is waited for.
    """
    if run.device is None:
        return run, []
    device = f"cuda:{run.device}"
    bench = _Bench(run.program, device)
    chosen, decisions = choose(run.program, kernels, bench.milliseconds, torch.cuda.get_device_name(run.device))
    if all(new is old for new, old in zip(chosen, kernels, strict=True)):
        return run, decisions
    return executor.load(run.program, chosen), decisions


def choose(
    program: Program, kernels: Sequence[LoadedKernel], measure: Measure, device_name: str
) -> tuple[list[LoadedKernel], list[TuningDecision]]:
    """The kernels with the options that `measure` (milliseconds) finds fastest, and why."""
    wanted = _worth_measuring(program, kernels)
    trials: dict[int, list[LoadedKernel]] = {}
    for number, launch in wanted.items():
        if _remembered(kernels[number], launch, device_name) is None:
            trials[number] = [_with(kernels[number], options) for options in candidates(kernels[number].source.options)]
    _compile(trials, wanted)
    found, decisions = list(kernels), []
    for number, launch in wanted.items():
        kernel = kernels[number]
        options, reason = _remembered(kernel, launch, device_name) or (None, "")
        if options is None:
            options, reason = _fastest([kernel, *trials[number]], launch, measure)
            _remember(kernel, launch, device_name, options, reason)
        decisions.append(TuningDecision(kernel.source.entry, options, reason))
        if options != kernel.source.options:
            found[number] = _with(kernel, options)
    return found, decisions


def _fastest(tried: Sequence[LoadedKernel], launch: Launch, measure: Measure) -> tuple[Options, str]:
    """The options of the fastest; the first stay unless another one is clearly faster."""
    times: list[tuple[float, LoadedKernel]] = []
    for kernel in tried:
        try:
            times.append((measure(kernel, launch), kernel))
        except Exception as error:  # too many registers, too much shared memory: no candidate
            if kernel is tried[0]:
                return kernel.source.options, f"could not be measured: {type(error).__name__}"
    first = times[0][0]
    best, kernel = min(times, key=lambda pair: pair[0])
    told = ", ".join(f"{dict(k.source.options)['num_warps']}x{dict(k.source.options)['XBLOCK']}" for _, k in times)
    if kernel is tried[0] or best > MARGIN * first:
        return tried[0].source.options, f"the rules' choice stays: {first * 1e3:.1f} us; tried warps x block {told}"
    was, now = dict(tried[0].source.options), dict(kernel.source.options)
    changes = ", ".join(f"{name} {was[name]} -> {now[name]}" for name in was if was[name] != now[name])
    return kernel.source.options, f"{changes}: {best * 1e3:.1f} instead of {first * 1e3:.1f} us"


def _worth_measuring(program: Program, kernels: Sequence[LoadedKernel]) -> dict[int, Launch]:
    """For the largest kernels that have launch facts to choose, the launch on the most memory."""
    sizes = bytes_by_name(program)
    largest: dict[int, tuple[int, Launch]] = {}
    for step in program.steps:
        if not isinstance(step, Launch) or kernels[step.kernel].triton is None or kernels[step.kernel].source.dynamic:
            continue
        count = sum(sizes.get(name, 0) for name in step.buffers)
        if count >= LEAST_BYTES and count > largest.get(step.kernel, (0, step))[0]:
            largest[step.kernel] = count, step
    ordered = sorted(largest.items(), key=lambda item: -item[1][0])[:MOST_KERNELS]
    return {number: launch for number, (_, launch) in ordered}


def _with(kernel: LoadedKernel, options: Options) -> LoadedKernel:
    """The kernel with other launch facts: the same module, compiled apart."""
    assert kernel.triton is not None
    source = dataclasses.replace(kernel.source, options=options)
    triton = dataclasses.replace(kernel.triton, source=source, compiled={}, bound={})
    return dataclasses.replace(kernel, source=source, triton=triton)


def _compile(trials: dict[int, list[LoadedKernel]], wanted: dict[int, Launch]) -> None:
    """Compile all candidates side by side; those that do not compile fail again where they are measured."""
    jobs = [
        (kernel.triton, [wanted[number].sizes]) for number, tried in trials.items() for kernel in tried if kernel.triton
    ]
    with contextlib.suppress(Exception):
        toolchain_triton.compile_variants(jobs)


def _path(kernel: LoadedKernel, launch: Launch, device_name: str) -> Any:
    assert kernel.triton is not None
    text = json.dumps([kernel.source.key, launch.sizes, device_name, torch.version.cuda])
    return kernel.triton.folder / "tuning" / f"{hashlib.sha256(text.encode()).hexdigest()}.json"


def _remembered(kernel: LoadedKernel, launch: Launch, device_name: str) -> tuple[Options, str] | None:
    """What an earlier process chose, where it is one of today's candidates."""
    try:
        kept = json.loads(read_regular(_path(kernel, launch, device_name)))
        options = tuple((str(name), int(value)) for name, value in kept["options"])
        reason = str(kept["reason"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    allowed = [kernel.source.options, *candidates(kernel.source.options)]
    return (options, f"{reason} (measured before)") if options in allowed else None


def _remember(kernel: LoadedKernel, launch: Launch, device_name: str, options: Options, reason: str) -> None:
    path = _path(kernel, launch, device_name)
    with contextlib.suppress(OSError):  # a full disk: the next process measures again
        write_atomically(path, json.dumps({"options": options, "reason": reason}).encode())


class _Bench:
    """Runs single kernels on memory of their own."""

    def __init__(self, program: Program, device: str) -> None:
        self._device = device
        self._bytes = bytes_by_name(program)
        self._flush: torch.Tensor | None = None

    def milliseconds(self, kernel: LoadedKernel, launch: Launch) -> float:
        """The median of a few runs with a cold cache."""
        assert kernel.triton is not None
        if self._flush is None:
            self._flush = torch.empty(_FLUSH_BYTES, dtype=torch.uint8, device=self._device)
        memory = {
            name: torch.zeros(self._bytes[name] + 64, dtype=torch.uint8, device=self._device)
            for name in dict.fromkeys(launch.buffers)
        }
        addresses = [memory[name].data_ptr() for name in launch.buffers]
        scalars = [kind(1) for kind in kernel.source.scalars]
        function = kernel.triton.bind(self._device, launch.sizes)
        stream = torch.cuda.current_stream(self._device)
        function(stream.cuda_stream, *addresses, *scalars)
        times = []
        for _ in range(_REPEATS):
            self._flush.zero_()
            before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            before.record(stream)
            function(stream.cuda_stream, *addresses, *scalars)
            after.record(stream)
            after.synchronize()
            times.append(before.elapsed_time(after))
        return statistics.median(times)
