"""Which cuts are syncs and which are flushes; the blocks `no_sync()` and `sync_budget(n)`, which watch for syncs.

A *sync* needs a value on the host, or waits for the device. A *flush* only hands work off: nothing waits for it. An
operator that runs at once because it cannot be recorded is a flush too, unless the host must know its result's size.

Invariant: `CAUSES` and `REASONS` name every cause that the code base gives to a cut (tests/lazy/test_sync_policy.py). A
block watches the thread that opened it, and the threads on which autograd runs a backward; a cut or read that it
refuses has changed nothing.
"""

from __future__ import annotations

import functools
import re
import threading
import warnings
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, TypeVar

from torchlazy.lazy.record.recorder import Recorder
from torchlazy.lazy.record.sliced_read import APART
from torchlazy.lazy.trace import user_frames

Kind = Literal["sync", "flush"]
F = TypeVar("F", bound=Callable[..., Any])

_HOST_READS = (
    "item", "bool", "int", "float", "complex", "index", "print", "format", "tolist", "numpy", "save", "cpu", "copy_",
    "pack_padded_sequence", "set_rng_state", "apply_", "map_", "map2_",
    # Calls on ordinary tensors under `lazy_mode`, by the names of torch's methods.
    "__array__", "__reduce_ex__", "__reduce__", "__repr__", "__str__", "__format__", "__deepcopy__",
)  # fmt: skip
_WAITS = ("sync", "synchronize", "wait_tensor")
_SENT_OFF = (
    "flush", "optimizer step", "leaving lazy_mode", "trace length limit", "set_target", "set_default_dtype", "to lazy",
    "dump window opens", "dump window closes", "explain window opens", "explain window closes",
    "shadow window opens", "shadow window closes", "flops window opens", "compiled call", "end of a compiled call",
    "gradient", "export", "learning a trace", "communication hook", "fully_shard",
)  # fmt: skip
# The memory itself is asked for, or changed: it must be there, but no value is read.
_MEMORY = (
    "data_ptr", "const_data_ptr", "mutable_data_ptr", "untyped_storage", "storage", "_typed_storage", "dlpack",
    "__dlpack__", "share_memory_", "pin_memory", "is_shared", "data", "set_", "result of a compiled call",
    "shared memory", "held by a future", "another stream", "another state of the generator",
    "a stream is told what to wait for", "memory is read", "known traces part here", "end of a known trace", "forget",
    "operators repeat",
)  # fmt: skip

CAUSES: dict[str, Kind] = {
    **dict.fromkeys((*_HOST_READS, *_WAITS), "sync"),
    **dict.fromkeys((*_SENT_OFF, *_MEMORY), "flush"),
}
# Causes that name a device or an operator which changes an ordinary tensor under `lazy_mode`.
FAMILIES: tuple[tuple[str, Kind], ...] = ((r"to \w+(:\d+)?", "flush"), (r"[a-z]\w*_(\.\w+)?", "flush"))

# An operator that runs at once cuts with the cause "name: reason"; the pattern decides, the first that fits.
REASONS: tuple[tuple[str, Kind], ...] = (
    (r"data-dependent shape", "sync"),
    (r"the result's shape depends on data", "sync"),
    (r"the sizes of its helper results are the kernel's business", "flush"),
    (r"its result's shape depends on the lengths", "flush"),  # which are on the host already
    (r"does not return tensors", "sync"),
    (r"its result is not on the lazy device", "sync"),
    (r"to lazy", "flush"),
    (r"outside lazy_mode", "flush"),
    (r"random", "flush"),
    (r"torch is tracing", "flush"),
    (r"no functional form", "flush"),
    (r"a number that varies", "flush"),
    (r"a number beyond int64", "flush"),
    (r"made of other operators", "flush"),
    (r"writes to its arguments without saying so", "flush"),
    (r"changes the size of memory", "flush"),
    (r"beyond the storage", "flush"),
    (r"an argument of type \w+", "flush"),
    (r"an argument overlaps the written memory", "flush"),
    (r"a (torch\.\w+|nested|quantized|distributed|pinned|conjugated|negated) tensor", "flush"),
    (r"a [A-Z]\w+", "flush"),  # a class of tensors with operators of its own
    (r"a tensor on .*", "flush"),
    (r"a view of a tensor that is not lazy", "flush"),
    (r"a write to a tensor on .*", "flush"),
    (r"out= of another size( or dtype)?", "flush"),
    (r"elements of (the|a) written tensor share memory", "flush"),
    (r"tensors of a written list share memory", "flush"),
    (r"its result does not fit the written tensor", "flush"),
    (r"it writes to a tensor that is not lazy", "flush"),
    (r"communication between processes", "flush"),
    (r"the written tensor .*", "flush"),  # would have to grow, cannot hold the result
    (r"the result is a .*", "flush"),
    (r"[\w.]+\.\w+: .*", "flush"),  # what a fake kernel raised, or the operator itself when it was tried
)


class SyncError(RuntimeError):
    """A sync inside `torchlazy.no_sync()`.

    Cause: the line that is named needs a value on the host, or waits for the device. Fix: keep the value on the device
    (`torch.where` instead of `if`), or read it after the block.
    """


class SyncInside(RuntimeError):
    """A call compiled with `fullgraph=True` needs a value on the host, at the line that is named."""


class SyncBudgetWarning(UserWarning):
    """More syncs inside `torchlazy.sync_budget(n)` than n."""


@dataclass(frozen=True)
class Sync:
    """One sync: what needed the value, and the user's line."""

    cause: str
    frame: str


def kind_of(cause: str) -> Kind:
    """Whether a cut for this cause is a sync or a flush; what no table names counts as a flush."""
    return _named_kind(cause) or "flush"


@functools.lru_cache(maxsize=1024)
def _named_kind(cause: str) -> Kind | None:
    """What the tables say of a cause; None where they do not name it."""
    cause = cause.removesuffix(APART)
    if cause in CAUSES:
        return CAUSES[cause]
    _, is_operator, reason = cause.partition(": ")
    table, text = (REASONS, reason) if is_operator else (FAMILIES, cause)
    return next((kind for pattern, kind in table if re.fullmatch(pattern, text, re.DOTALL)), None)


def is_named(cause: str) -> bool:
    """Whether some table names this cause."""
    return _named_kind(cause) is not None


class _Window(ABC):
    """What `no_sync` and `sync_budget` share: a block that is open, and asked before each sync."""

    recorder: Recorder  # set by the package at start
    watch_native: Callable[[Callable[[str], bool] | None], None]  # set likewise: the native recorder asks, too

    def __init__(self) -> None:
        self._thread: int | None = None

    @abstractmethod
    def asked(self, cause: str) -> None:
        """A sync is about to happen on a thread that this block watches."""

    def watches(self, thread: int, is_ours: bool) -> bool:
        return self._thread == thread or not is_ours

    def _open(self) -> None:
        if self._thread is not None:
            raise RuntimeError(f"this {type(self).__name__} is open already; make another one for a block inside")
        self._thread = threading.get_ident()
        with self.recorder.lock:
            _OPEN.append(self)
            if len(_OPEN) == 1:
                _Gate.install(self.recorder)

    def _close(self) -> None:
        with self.recorder.lock:
            _OPEN.remove(self)
            if not _OPEN:
                _Gate.remove(self.recorder)
        self._thread = None


_OPEN: list[_Window] = []  # in the order in which they were opened


class _Gate:
    """The recorder's gate while any block is open; the gate installed before is asked after it."""

    before: Callable[[str], bool] | None = None

    @classmethod
    def install(cls, recorder: Recorder) -> None:
        cls.before, recorder.gate = recorder.gate, cls.ask
        if cls.before is None:  # else each operator is recorded in Python
            _Window.watch_native(cls.ask)

    @classmethod
    def remove(cls, recorder: Recorder) -> None:
        recorder.gate, cls.before = cls.before, None
        _Window.watch_native(None)

    @classmethod
    def ask(cls, cause: str) -> bool:
        if kind_of(cause) == "sync":
            thread = threading.get_ident()
            is_ours = _is_python_thread()
            for window in reversed(_OPEN):
                if window.watches(thread, is_ours):
                    window.asked(cause)
        return cls.before(cause) if cls.before is not None else False


def _is_python_thread() -> bool:
    """Not a thread that C++ started (autograd's, for a device): Python knows such a thread as a dummy only."""
    return not isinstance(threading.current_thread(), threading._DummyThread)


class no_sync(_Window):
    """Raise `SyncError` at the user's line where a value is needed on the host.

    `.item()`, `bool()`, `print`, `.cpu()`, `.numpy()`, shapes that depend on data and `torchlazy.sync()` raise before
    anything has happened; so does a read of a value that is computed already, which would wait for a GPU. A flush
    (the end of an optimizer step, `torchlazy.flush()`, a trace that grew long) is allowed. Watches the thread that
    opened it, and backward on autograd's own threads. Usable as a decorator; blocks may stand inside each other.
    Callables of `torchlazy.compile` run their Python inside, so that the line is the one that reads.
    """

    def __init__(self, *wrong: Any) -> None:
        super().__init__()
        if wrong:
            raise TypeError(f"no_sync: takes no arguments, not {_shown(wrong[0])}; as a decorator write @no_sync()")

    def __enter__(self) -> no_sync:
        self._open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    def __call__(self, function: F) -> F:
        return _decorated(function, no_sync)

    def asked(self, cause: str) -> None:
        where = user_frames.user_frame() or "an unknown line"
        raise SyncError(
            f"torchlazy: {where} needs a value on the host ({cause}) inside torchlazy.no_sync(); keep it on the "
            "device (torch.where instead of if), or read it after the block"
        )


class sync_budget(_Window):
    """Warn with `SyncBudgetWarning`, naming each cause and line, when more than `n` syncs happen inside.

    The warning comes when the block is left, unless an exception leaves it. `syncs` lists them while it is open and
    afterwards. Usable as a decorator: each call then has a budget of its own. Raises ValueError for a negative n,
    TypeError for what is no int.
    """

    def __init__(self, n: int) -> None:
        super().__init__()
        if not isinstance(n, int) or isinstance(n, bool):
            raise TypeError(f"sync_budget: {_shown(n)} is no number of syncs; write sync_budget(2), as a decorator too")
        if n < 0:
            raise ValueError(f"sync_budget: {n} syncs are no budget; use 0 or more")
        self.budget = n
        self.syncs: list[Sync] = []

    def __enter__(self) -> sync_budget:
        self._open()
        self.syncs = []
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()
        if kind is None and len(self.syncs) > self.budget:
            warnings.warn(self._text(), SyncBudgetWarning, stacklevel=2)

    def __call__(self, function: F) -> F:
        return _decorated(function, lambda: sync_budget(self.budget))

    def asked(self, cause: str) -> None:
        self.syncs.append(Sync(cause, user_frames.user_frame()))

    def _text(self) -> str:
        lines = [
            f"  {count} x {sync.cause} at {sync.frame or 'an unknown line'}"
            for sync, count in Counter(self.syncs).items()
        ]
        head = f"torchlazy: {len(self.syncs)} syncs inside torchlazy.sync_budget({self.budget}):"
        return "\n".join([head, *lines])


def _shown(value: object) -> str:
    return getattr(value, "__qualname__", None) or repr(value)


def _decorated(function: F, window: Callable[[], Any]) -> F:
    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        with window():
            return function(*args, **kwargs)

    return wrapped  # type: ignore[return-value]


def watch_syncs(recorder: Recorder, native: Callable[[Callable[[str], bool] | None], None]) -> None:
    """Sets the recorder whose syncs all blocks watch; `native` lets the native one ask what it is given, too."""
    _Window.recorder, _Window.watch_native = recorder, staticmethod(native)
