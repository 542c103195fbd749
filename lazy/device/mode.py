"""`lazy_mode()`: operators on ordinary cpu and cuda tensors are recorded while the block runs.

By default natively (lazy/native/block.py). What follows is the block as the recorder in Python has it, which captures,
`export` and `flops` use, and programs where there is no compiler.

Inside the block every operator's ordinary arguments are replaced by lazy twins over the same memory; writes to them
are deferred, and written into that very memory at the next cut. Leaving the block cuts.

Invariant: a read of an ordinary tensor through torch, by an operator or by one of the calls in `_READERS` that do not
dispatch, gives the right value; so does any read once the block is left. Operators on memory that NumPy, DLPack or a
file shares are finished with it when they return (record/shared_memory.py). The one reader that cannot be seen is C
code that keeps a raw address across operators inside the block. A mode that was entered before the block sees each
operator, which then runs at once.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torchlazy.lazy.config import config
from torchlazy.lazy.device.block_hooks import HOOKS
from torchlazy.lazy.native.block import BLOCKS
from torchlazy.lazy.native.device import DEVICE  # it changes methods that are listed below
from torchlazy.lazy.ops import composites
from torchlazy.lazy.ops.composites import UNDER_A_MODE
from torchlazy.lazy.ops.handlers import CHANGES_THE_TENSOR, MOVES, SETS
from torchlazy.lazy.ops.host_lengths import BY_ADDRESS
from torchlazy.lazy.record.eager_fallback import run_unwrapped
from torchlazy.lazy.record.lent_memory import is_held_memory_pending
from torchlazy.lazy.record.recorder import Recorder
from torchlazy.lazy.record.shared_memory import accepts_copies, copy_of_now
from torchlazy.lazy.record.tensor import LazyTensor
from torchlazy.lazy.torch_private.dispatch import dispatch_modes, without_our_modes
from torchlazy.lazy.torch_private.distributed import any_distributed
from torchlazy.lazy.torch_private.patches import UnwrappedDispatchMode, load_inside
from torchlazy.lazy.trace.geometry import is_dense, kind_of
from torchlazy.lazy.trace.nested import map_nested

_T = torch.Tensor
USUAL = frozenset({_T, torch.nn.Parameter, LazyTensor})  # classes without rules of their own, but for ours
_LEAVES = frozenset({int, float, bool, type(None), torch.dtype})


def _methods(*names: str) -> dict[Any, str]:
    return {getattr(_T, name): name for name in names if hasattr(_T, name)}


# Methods that read ordinary memory without an operator: its values; `_READERS` has those for its address, too.
VALUE_READERS = _methods(
    "tolist", "numpy", "__array__", "__repr__", "__str__", "__format__", "__dlpack__", "__reduce_ex__", "__reduce__",
    "__deepcopy__", "apply_", "map_", "map2_",
)  # fmt: skip
_LOOKS = _methods(
    "tolist", "__repr__", "__str__", "__format__", "__reduce_ex__", "__reduce__", "__deepcopy__", "is_shared"
)  # fmt: skip
_READERS = VALUE_READERS | _methods(
    "data_ptr",
    "const_data_ptr",
    "mutable_data_ptr",
    "untyped_storage",
    "storage",
    "_typed_storage",
    "share_memory_",
    "pin_memory",
    "is_shared",
)
_BY_PYTHON = _methods("apply_", "map_", "map2_")
_GIVES_RAW = {method for method, name in _READERS.items() if name.endswith("storage")}
_SHARES = (_T.numpy, _T.__array__, _T.__dlpack__)
_FROM_FILE = torch.ops.aten.from_file.default  # mapped memory: the tensor stays an ordinary one
_NO_TANGENT = torch.ops.aten._efficientzerotensor.default  # of a number: torch reads it from its memory
_SET_DATA = _T.data.__set__  # type: ignore[attr-defined]
_OTHERWISE = BY_ADDRESS | UNDER_A_MODE | {torch.nn.functional.one_hot: composites.under_a_mode}
_RECORDED_DEVICES = ("cpu", "cuda")
_LOOKED_AT = frozenset({*_OTHERWISE, *_BY_PYTHON, *_READERS})
_OWN = (LazyTensor, torch.Tensor, torch.nn.Parameter)


def install(recorder: Recorder) -> None:
    """Give tensors that are read from files memory inside `lazy_mode`, and let any tensor be a generator's state.

    C code reads such a state by its address (`Generator.set_state`), without an operator.
    """
    load_inside(lambda: without_our_modes() if recorder.mode_depth else contextlib.nullcontext())
    set_state = torch.random.set_rng_state

    @functools.wraps(set_state)
    def set_rng_state(new_state: torch.Tensor) -> None:
        if isinstance(new_state, LazyTensor) and new_state.device.type == "cpu":
            new_state = recorder.hand_out(new_state, "set_rng_state")
        set_state(new_state)

    torch.random.set_rng_state = torch.set_rng_state = set_rng_state

    @functools.wraps(torch.utils.dlpack.to_dlpack)
    def to_dlpack(tensor: torch.Tensor) -> Any:
        return tensor.__dlpack__()  # the C function would read the address of a lazy tensor, which has none

    torch.utils.dlpack.to_dlpack = torch.to_dlpack = to_dlpack  # type: ignore[assignment]


class Readers(TorchFunctionMode):
    """Cuts before a call that would read memory without an operator."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    @staticmethod
    def looks_at(func: Any) -> bool:
        """Whether calls of the function may be more than passed on."""
        return func in _LOOKED_AT or func == _SET_DATA

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        recorder = self.recorder
        if func in _OTHERWISE and not recorder.busy:
            return _OTHERWISE[func](func, *args, **(kwargs or {}))
        if func in _BY_PYTHON and not recorder.busy:
            return _by_python(recorder, _BY_PYTHON[func], *args, **(kwargs or {}))
        if func == _SET_DATA and isinstance(args[1], LazyTensor) and not isinstance(args[0], LazyTensor):
            return func(args[0], _handed_over(recorder, args[1], "data"))
        if func not in _READERS or recorder.busy or isinstance(args[0], LazyTensor):
            return func(*args, **(kwargs or {}))
        with recorder.lock:
            recorder.cut(_READERS[func])
            if func not in _LOOKS:
                recorder.rematerialize_pending([args[0]])  # a caller with the address may write there
            recorder.busy = True  # the reader's own operators (a detach, a clone) run for real
            try:
                given = func(*args, **(kwargs or {}))
            finally:
                recorder.busy = False
            if func in _SHARES:  # a capsule keeps only the tensor alive that can be watched
                recorder.shared.add_holder(args[0], args[0] if func == _T.__dlpack__ else given)
            if func in _GIVES_RAW:
                recorder.shared.add_raw(args[0])
            return given


def _by_python(recorder: Recorder, name: str, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """A method that calls a function of Python's on each element, and writes what it gives."""
    if isinstance(tensor, LazyTensor):
        return getattr(LazyTensor, name)(tensor, *args, **kwargs)  # type: ignore[no-any-return]
    twin = recorder.view_of_plain(tensor, recorder.storage_of_plain(tensor))
    with torch.no_grad():
        return tensor.copy_(getattr(twin.clone().requires_grad_(tensor.requires_grad), name)(*args, **kwargs))


def _handed_over(recorder: Recorder, tensor: LazyTensor, cause: str) -> torch.Tensor:
    """The memory of a lazy tensor that an ordinary one is set to."""
    if recorder.capture is not None:
        recorder.capture.handed_over(tensor._storage_)
    return recorder.hand_out(tensor, cause)


class Operators(UnwrappedDispatchMode):
    """Hands every operator to the recorder, ordinary tensors replaced by their twins."""

    def __init__(self, recorder: Recorder, of_device: bool) -> None:
        super().__init__()
        self.recorder = recorder
        self.of_device = of_device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.answer(func, args, kwargs or {})

    def answer(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """What comes of the operator, with this mode off."""
        if self.recorder.busy or func.namespace == "profiler":
            return func(*args, **kwargs)
        if self.of_device and not self._is_on_device(args, kwargs):
            return func(*args, **kwargs)
        found = self._recorded(func, args, kwargs)
        if DEVICE.target and found is not NotImplemented:
            DEVICE.mark_result(func, found, args, kwargs)
        return found

    @staticmethod
    def _is_on_device(args: Any, kwargs: dict[str, Any]) -> bool:
        device = kwargs.get("device")
        if device is not None and torch.device(device).type == "lazy":
            return True
        return any(isinstance(x, LazyTensor) for x in _tensors(args, kwargs)) or DEVICE.is_in((args, kwargs))

    def _recorded(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        recorder = self.recorder
        tensors = list(_tensors(args, kwargs))
        others = [tensor for tensor in tensors if not _is_usual(tensor)]
        if others and any_distributed(others):
            return NotImplemented  # torch then runs operators on its local part, which come here
        if func is _FROM_FILE or (func is _NO_TANGENT and not args[0]) or not _is_ours(tensors, others, kwargs):
            self._before_others(func, tensors)
            return func(*args, **kwargs)
        below = dispatch_modes()  # torch takes this one off while it runs
        if below and not all([isinstance(mode, Operators) for mode in below]):
            # The others must see the operator, torch's tracers among them: it runs, and what is pending before it. A
            # mode of ours below them records it.
            if not any(isinstance(mode, Operators) for mode in below):
                cause = f"{func.name().removeprefix('aten::')}: another mode is active"
                recorder.cut(cause)
                recorder.rematerialize_pending()
            return func(*args, **kwargs)
        with recorder.lock:
            if func in CHANGES_THE_TENSOR and not isinstance(args[0], LazyTensor):
                return self._change_plain(func, args, kwargs)
            if self._is_host_scalar_only(tensors):
                if not recorder.plan(func).written:
                    return func(*args, **kwargs)
                recorder.rematerialize_pending(tensors)
                result = func(*args, **kwargs)
                for tensor in tensors:
                    if tensor.dim():  # `out=` gave it another size
                        recorder.memory_changes(tensor)
                return result
            other = "pinned tensor" if kwargs.get("pin_memory") else ""
            other = other or next(filter(None, map(_other_kind, others)), "")
            if other:
                return run_unwrapped(recorder, func, args, kwargs, f"a {other}")
            plan = recorder.plan(func)
            windows = recorder.capture.themselves if recorder.capture is not None else None
            if windows is not None and kwargs and plan.written and windows.take_resized(func, args, kwargs):
                args, kwargs = windows.instead(args), windows.instead(kwargs)
            originals: dict[int, torch.Tensor] = {}
            twins: dict[int, LazyTensor] = {}
            touched: list[LazyTensor] = []  # whose memory is shared outside of torch

            def twin(place: int | str, value: Any) -> Any:
                if type(value) is LazyTensor:
                    return shared(value, place)
                if isinstance(value, _T):
                    if isinstance(value, LazyTensor) or not _is_recordable(value):
                        return value
                    found = twins.get(id(value))
                    if found is None:
                        found = recorder.view_of_plain(value, recorder.storage_of_plain(value))
                        twins[id(value)] = found
                        originals[id(found)] = value
                    return shared(found, place)
                return value

            def shared(value: LazyTensor, place: int | str) -> LazyTensor:
                if not recorder.shared or plan.kind == "view" or value._storage_ not in recorder.shared:
                    return value
                if recorder.capture is not None:
                    found: LazyTensor | None = recorder.capture.arrays.operand(value, plan, place)
                    if found is not None:
                        return found
                if accepts_copies(plan, place):
                    return copy_of_now(recorder, value)
                touched.append(value)
                return value

            def original(value: Any) -> Any:
                if type(value) is LazyTensor:
                    return originals.get(id(value), value)
                return value

            def twins_in(place: int | str, value: Any) -> Any:
                kind = type(value)
                if kind in _LEAVES:
                    return value
                if kind is list or kind is tuple:
                    return map_nested(functools.partial(twin, place), value)
                return twin(place, value)

            given = tuple([twins_in(place, value) for place, value in enumerate(args)])
            named = {name: twins_in(name, value) for name, value in kwargs.items()}
            result = recorder.dispatch(func, given, named)
            for position in plan.written:  # torch counts writes to single tensors itself
                written = args[position] if position < len(args) else None
                if isinstance(written, (list, tuple)):
                    torch.autograd.graph.increment_version([t for t in written if type(t) is not LazyTensor])
            for value in originals.values() if plan.written and plan.kind != "inplace" else ():
                self._follow_size(value, twins[id(value)])
            if touched:
                recorder.cut("shared memory")
            return original(result) if type(result) is LazyTensor else map_nested(original, result)

    def _before_others(self, func: Any, tensors: Sequence[torch.Tensor]) -> None:
        """Tensors of other kinds hold ordinary memory (a sparse one's values): nothing on it is pending when they are
        read, nor where they are written to."""
        recorder = self.recorder
        kind = next(filter(None, map(_other_kind, tensors)), "")
        if not kind or all(isinstance(t, LazyTensor) for t in tensors):
            return
        with recorder.lock:
            is_written = func._schema.is_mutable
            if is_written or is_held_memory_pending(recorder):
                cause = f"{func.name().removeprefix('aten::')}: a {kind}"
                recorder.cut(cause)
            if is_written:
                recorder.rematerialize_pending()

    def _follow_size(self, tensor: torch.Tensor, twin: LazyTensor) -> None:
        """Resize an ordinary tensor to which `out=` gave another size."""
        if twin._geometry.shape != tensor.shape:
            kind = torch.inference_mode(tensor.is_inference())
            with kind, self.recorder.apart(), torch._C.DisableTorchFunction():
                tensor.data = self.recorder.real(twin, "data")

    def _change_plain(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """`resize_`, `t_`, `set_` of an ordinary tensor: run on itself; its twin's storage is updated."""
        recorder, target = self.recorder, args[0]
        windows = recorder.capture.themselves if recorder.capture is not None else None
        if func in SETS and windows is not None:
            target = windows.take(target, MOVES)
            windows.take_sources(args)
            args = (target, *windows.instead(args[1:]))
        recorder.cut(func.name().removeprefix("aten::"))
        recorder.rematerialize_pending([target])
        args = [_handed_over(recorder, a, "set_") if isinstance(a, LazyTensor) else a for a in args]
        room = target.untyped_storage().nbytes()
        func(*args, **kwargs)
        recorder.memory_changes(target)
        if recorder.capture is not None:
            if func not in SETS and target.untyped_storage().nbytes() > room:
                recorder.capture.refuse("it gives a tensor from outside another size, for which there is no room")
            recorder.capture.changed_forms.add(id(target))
        return target

    def _is_host_scalar_only(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Every tensor is one number in ordinary memory that is not in the trace, such as an optimizer's step count.

        Such an operator runs at once: it costs nothing, and Python soon reads the number.
        """
        return bool(tensors) and all(
            type(t) is _T
            and t.dim() == 0
            and t.device.type == "cpu"
            and not t.requires_grad
            and _is_recordable(t)
            and not self.recorder.is_in_trace(t)
            for t in tensors
        )


def _tensors(args: Any, kwargs: dict[str, Any]) -> Iterator[torch.Tensor]:
    for value in (*args, *kwargs.values()):
        for item in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(item, _T):
                yield item


def _is_recordable(value: torch.Tensor) -> bool:
    return (
        type(value) in (torch.Tensor, torch.nn.Parameter)
        and value.device.type in _RECORDED_DEVICES
        and is_dense(value)
        and not torch._C._functorch.is_functorch_wrapped_tensor(value)
    )


def _is_usual(value: torch.Tensor) -> bool:
    return type(value) is LazyTensor or (_is_recordable(value) and not value.is_conj() and not value.is_neg())


def _other_kind(value: torch.Tensor) -> str:
    """The kind of a tensor with rules of its own; empty for those that are recorded."""
    if type(value) not in _OWN and not isinstance(value, LazyTensor):
        return type(value).__name__
    if isinstance(value, LazyTensor):
        return ""
    if not is_dense(value):
        return f"{kind_of(value)} tensor"
    return "conjugated tensor" if value.is_conj() else "negated tensor" if value.is_neg() else ""


def _is_ours(tensors: Sequence[torch.Tensor], others: Sequence[torch.Tensor], kwargs: dict[str, Any]) -> bool:
    """Some tensor argument is recordable, or it is a factory for a recordable device. `others`: the unusual ones."""
    device = kwargs.get("device")
    if device is not None and torch.device(device).type not in (*_RECORDED_DEVICES, "lazy"):
        return False
    if not tensors or len(others) < len(tensors):
        return True
    return any(isinstance(v, LazyTensor) or _is_recordable(v) for v in others)


class RecordedBlock:
    """The block as the recorder in Python knows it: every operator is recorded, and runs when a value is needed.

    For what must not run operators, or looks at each of them: captures, `export`, `flops`. `of_device`: operators on
    the lazy device alone.
    """

    recorder: Recorder  # set by the package at start

    def __init__(self, of_device: bool = False) -> None:
        self._of_device = of_device
        self._open: list[tuple[Readers, Operators, int]] = []

    def __enter__(self) -> None:
        recorder = self.recorder
        native_before = BLOCKS.suspend("a block that is recorded in Python")
        for hooks in HOOKS:
            hooks.begin(recorder)
        modes = (Readers(recorder), Operators(recorder, self._of_device))
        with recorder.lock:
            recorder.mode_depth += 1
            recorder.has_mode_tensors = True
        for mode in modes:
            mode.__enter__()
        self._open.append((*modes, native_before))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        recorder = self.recorder
        for hooks in HOOKS:
            hooks.leave(recorder)
        readers, operators, native_before = self._open.pop()
        operators.__exit__(kind, error, trace)
        readers.__exit__(kind, error, trace)
        with recorder.lock:
            try:
                recorder.cut("leaving lazy_mode")
            finally:
                recorder.mode_depth -= 1
                BLOCKS.resume(native_before)
                if not recorder.mode_depth:
                    recorder.leave_mode()


def recorded_in_python() -> contextlib.AbstractContextManager[None]:
    """Inside it the recorder in Python sees each operator of this thread, if they are recorded natively."""
    if BLOCKS.is_open_here():
        return RecordedBlock()
    return RecordedBlock(of_device=True) if DEVICE.is_in_use() else contextlib.nullcontext()


class lazy_mode:
    """Record every operator on cpu and cuda tensors inside the block; run them when it is left.

    With `config.native` "on" what is not known yet runs at once, and tensors are of the ordinary classes; while the
    native recorder is being compiled, once for each version of torch, everything runs at once. With "off"
    tensors made inside behave as tensors on their device; parameters updated inside hold the new values in the same
    memory. Re-entrant; one instance may be used many times. Usable as a decorator.
    """

    def __init__(self, *wrong: Any) -> None:
        if wrong:
            raise TypeError(
                f"lazy_mode: takes no arguments, not {getattr(wrong[0], '__qualname__', None) or repr(wrong[0])}; "
                "write `with lazy_mode():`, and as a decorator @lazy_mode()"
            )
        # Of a native block, whether it stands in another; None where nothing is recorded.
        self._open: list[RecordedBlock | bool | None] = []

    def __enter__(self) -> lazy_mode:
        recorder = RecordedBlock.recorder
        if config.enabled == "off":
            self._open.append(None)
            return self
        way = BLOCKS.way(recorder, recorder.driver)
        block = RecordedBlock() if way == "python" else BLOCKS.enter() if way == "native" else None
        if isinstance(block, RecordedBlock):
            block.__enter__()
        self._open.append(block)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._open:
            raise RuntimeError("lazy_mode: this block is not open; write `with lazy_mode():`")
        block = self._open.pop()
        if isinstance(block, RecordedBlock):
            block.__exit__(kind, error, trace)
        elif block is not None:
            BLOCKS.leave(block, "leaving lazy_mode")

    def __call__(self, function: Any) -> Any:
        @functools.wraps(function)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            with lazy_mode():
                return function(*args, **kwargs)

        return wrapped
