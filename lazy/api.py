"""The public functions, and the one recorder that they act on."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torchlazy.lazy.config import config
from torchlazy.lazy.deferred import DeferredDriver, DeferredModule
from torchlazy.lazy.device import checkpointing, device, modules, processes
from torchlazy.lazy.device.mode import RecordedBlock, lazy_mode, recorded_in_python  # noqa: F401
from torchlazy.lazy.device.mode import install as _install_mode
from torchlazy.lazy.distributed import ddp, fsdp
from torchlazy.lazy.inspect.dump import dump
from torchlazy.lazy.native.block import BLOCKS
from torchlazy.lazy.native.device import DEVICE
from torchlazy.lazy.ops import autocast, collectives, composites, handlers, host_lengths, random, recurrent
from torchlazy.lazy.record import signals, subclasses
from torchlazy.lazy.record.recorder import Recorder, register_fork
from torchlazy.lazy.record.sliced_read import APART
from torchlazy.lazy.record.tensor import LazyTensor
from torchlazy.lazy.report import CutLine, EagerUse, ExternUse, Report
from torchlazy.lazy.report import account as _account
from torchlazy.lazy.report import metrics as _metrics
from torchlazy.lazy.run.interpreter import run_entries
from torchlazy.lazy.run.sync_policy import kind_of, watch_syncs
from torchlazy.lazy.torch_private.patches import (
    answer_for_dispatch,
    exclude_from_dynamo,
    let_tracers_record,
    on_default_dtype_change,
)
from torchlazy.lazy.trace import user_frames
from torchlazy.runtime.native import code as native_code
from torchlazy.runtime.native.code import NativeCode
from torchlazy.runtime.native.recorder_library import LIBRARY

if TYPE_CHECKING:
    from torchlazy.lazy.inspect.explain import Explanation
    from torchlazy.lazy.inspect.flops.count import WorkCount
    from torchlazy.lazy.inspect.shadow import shadow as Shadow

_explain: Any = DeferredModule("torchlazy.lazy.inspect.explain")
_shadow: Any = DeferredModule("torchlazy.lazy.inspect.shadow")
_runs: Any = DeferredModule("torchlazy.lazy.run.driver")
_work_count: Any = DeferredModule("torchlazy.lazy.inspect.flops.count")
driver = DeferredDriver()
recorder = Recorder(driver, run_entries)


def _install() -> None:
    LazyTensor.recorder = recorder
    NativeCode.may_wait = staticmethod(lambda: config.tiers == "on")
    LazyTensor.__torch_dispatch__ = recorder.torch_dispatch  # type: ignore[method-assign, assignment]
    answer_for_dispatch(recorder.rules)
    exclude_from_dynamo(Recorder.torch_dispatch, Recorder.dispatch, Recorder.general, Recorder.detach)
    RecordedBlock.recorder = recorder
    _install_mode(recorder)
    dump.recorder, dump.driver = recorder, driver
    watch_syncs(recorder, BLOCKS.watch_syncs)
    handlers.install(recorder)
    random.install(recorder)
    composites.install_attention(recorder)
    composites.install_one_hot(recorder)
    composites.install_channel_shuffle(recorder)
    recurrent.install(recorder)
    host_lengths.install(recorder)
    composites.install_out_forms(recorder)
    autocast.install(recorder)
    modules.install_optimizers(recorder)
    subclasses.install()
    modules.install_scripted_modules(recorder)
    checkpointing.install(recorder)
    collectives.install(recorder)
    ddp.install(recorder)
    fsdp.install(recorder)
    signals.install(recorder)
    processes.install(recorder)
    device.register(recorder)
    let_tracers_record(LazyTensor)
    on_default_dtype_change(recorder.default_dtype_changes)
    register_fork(recorder)
    recorder.on_cut = _count_cut  # type: ignore[method-assign]
    recorder.on_eager = _count_eager  # type: ignore[method-assign]
    recorder.target = _default_target()
    if os.environ.get("TORCHLAZY_DUMP"):
        dump(os.environ["TORCHLAZY_DUMP"]).__enter__()


def _count_cut(cause: str, frame: str, operators: int) -> None:
    _account.cuts[cause, frame] += 1
    if cause.endswith(APART):
        _metrics.reads_apart[cause.removesuffix(APART)] += 1
        return
    _metrics.cuts[cause] += 1
    _metrics.traces += 1
    _metrics.ops += recorder.ops_recorded
    recorder.ops_recorded = 0


def _count_eager(op: Any, reason: str) -> None:
    name = str(op)
    _metrics.fallbacks[f"{name}: {reason}"] += 1
    if (name, reason) not in _account.eager:
        _account.eager_frames[name, reason] = user_frames.user_frame()
    _account.eager[name, reason] += 1


def _default_target() -> str:
    wish = os.environ.get("TORCHLAZY_TARGET")
    if wish:
        try:
            return check_target(wish)
        except (ValueError, RuntimeError) as why:
            text = f"the environment has TORCHLAZY_TARGET={wish!r}: {why}; mend or unset the variable"
            raise type(why)(text) from None
    return "cuda:0" if torch.cuda.is_available() else "cpu"


def check_target(target: str | torch.device) -> str:
    """ "cpu" or "cuda:N" for a target that exists here; raises TypeError, ValueError or RuntimeError otherwise."""
    if not isinstance(target, (str, torch.device)):
        raise TypeError(f'target {target!r} is a {type(target).__name__}; use "cpu", "cuda" or "cuda:N"')
    try:
        wish = torch.device(target)
    except RuntimeError as error:
        raise ValueError(f'target {target!r} is no device; use "cpu", "cuda" or "cuda:N"') from error
    if wish.type == "cpu":
        return "cpu"
    if wish.type != "cuda":
        raise ValueError(f'target {target!r}: lazy tensors compute on "cpu", "cuda" or "cuda:N"')
    if not torch.cuda.is_available():
        raise RuntimeError(f'target {target!r}: no CUDA device is available here; use "cpu"')
    index = wish.index if wish.index is not None else torch.cuda.current_device()
    if index >= torch.cuda.device_count():
        raise RuntimeError(f"target {target!r}: there are {torch.cuda.device_count()} CUDA devices")
    return f"cuda:{index}"


def set_target(target: str | torch.device) -> None:
    """Choose where the lazy device computes: "cpu", "cuda" or "cuda:N".

    Existing lazy tensors move when they are next used. Raises TypeError or ValueError for what is no such device,
    RuntimeError for a missing CUDA device. The environment variable TORCHLAZY_TARGET sets the target, too; the default
    is CUDA if there is one.
    """
    checked = check_target(target)
    recorder.cut("set_target")
    recorder.target = checked


def sync() -> None:
    """Run everything that was recorded and wait until it is done, on CUDA too."""
    recorder.cut("sync")
    BLOCKS.cut("sync")
    if recorder.target.startswith("cuda"):
        torch.cuda.synchronize(recorder.target)


def flush() -> None:
    """Cut and submit everything that was recorded, without waiting for a device."""
    BLOCKS.cut("flush")
    recorder.cut("flush")


def is_lazy(tensor: object) -> bool:
    """Whether this is a tensor whose operators are recorded: on the lazy device, or made under `lazy_mode`."""
    return isinstance(tensor, LazyTensor) or (isinstance(tensor, torch.Tensor) and DEVICE.is_marked(tensor))


def _count_untold() -> None:
    if driver.is_loaded:  # else nothing has run
        _runs.count_untold_runs()


def metrics() -> dict[str, Any]:
    """Counts since the start or the last `reset_metrics()`, as a plain dict.

    `traces` and `ops` recorded; `cuts` and `reads_apart` {cause: n}; `hits` and `misses` of the program cache;
    `compiles` and `compile_seconds`; `kernels` launched; `graph_replays`, runs of a whole program as CUDA graphs;
    `launched_ahead`, stages of such graphs that were launched before the cut;
    `extern_calls` {operator: n}; `fallbacks` {reason: n}; `bytes` allocated by programs.
    """
    _count_untold()
    _metrics.ops += recorder.ops_recorded
    recorder.ops_recorded = 0
    return _metrics.as_dict()


def reset_metrics() -> None:
    """Set every count to zero."""
    _count_untold()
    recorder.ops_recorded = 0
    _metrics.reset()
    _account.reset()


def report() -> Report:
    """What happened in the process: every line that cut, every new trace and where it differed from the known ones,
    every library call and fallback with its reason. Print it, or use `.to_dict()`. `reset_metrics()` resets it, too.
    """
    with recorder.lock:
        cuts = tuple(CutLine(cause, kind_of(cause), frame, n) for (cause, frame), n in _account.cuts.most_common())
        externs = tuple(ExternUse(op, why, frame, n, c) for (op, why, frame, c), n in _account.externs.most_common())
        eager = tuple(
            EagerUse(op, why, _account.eager_frames[op, why], n) for (op, why), n in _account.eager.most_common()
        )
        return Report(metrics(), cuts, tuple(_account.divergences), externs, eager)


def explain(fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Explanation:
    """Run `fn(*args, **kwargs)` once, for real, and report every cut, miss, library call and fallback, with lines.

    See `torchlazy.lazy.inspect.explain.explain`.
    """
    _check_callable("explain", fn)
    found: Explanation = _explain.explain(fn, *args, **kwargs)
    return found


def _check_callable(who: str, fn: object) -> None:
    if not callable(fn):
        raise TypeError(
            f"torchlazy.{who}: a {type(fn).__name__} cannot be called; pass a function and its arguments separately: "
            f"torchlazy.{who}(step, batch)"
        )


def disable(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, exempted from replays: its Python runs in each call. A decorator.

    A compiled call that comes to it is not replayed, and its report says so. Operators inside are recorded as others.
    """
    _check_callable("disable", function)
    name = str(getattr(function, "__qualname__", "") or type(function).__name__)

    @functools.wraps(function)
    def always_run(*args: Any, **kwargs: Any) -> Any:
        if recorder.capture is not None:
            recorder.capture.refuse(f"it calls {name}, which torchlazy.disable exempts")
        return function(*args, **kwargs)

    return always_run


def flops(fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> WorkCount:
    """Count what `fn(*args, **kwargs)` computes and moves, as formulas over the sizes of its tensors; nothing runs.

    `.flops`, `.bytes` and `.by_op` are SymPy expressions, `.at(x_0=64)` gives ints, `.constraints` and
    `.raises_for(x_0=64)` say for which sizes it would raise. See `torchlazy.lazy.inspect.flops.count.flops`.
    """
    _check_callable("flops", fn)
    found: WorkCount = _work_count.flops(fn, *args, **kwargs)
    return found


def shadow(folder: str | os.PathLike[str] = "torchlazy_shadow") -> Shadow:
    """A block in which every cut runs operator by operator and compiled, and the results are compared.

    A wrong program is warned of, with its kernel, operator and line, and written to `folder` as a script that runs by
    itself. See `torchlazy.lazy.inspect.shadow.shadow`.
    """
    found: Shadow = _shadow.shadow(folder)
    return found


def wait_for_compile() -> None:
    """Wait until all background compilation is done and its programs are in place: the next step runs them.

    Nothing is compiled before its second run, so run a step twice first.
    """
    native_code.wait_for_all()
    LIBRARY.wait_if_begun()
    if driver.is_loaded:
        driver.tiers.wait()  # without the lock: other threads keep recording
    with recorder.lock:
        if driver.is_loaded:
            driver.tiers.finish()


_install()
