"""`LazyTensor`: a tensor without data, a view of a lazy storage.

Invariant: a LazyTensor's C++ metadata equals its `_geometry`; its value is that view of `_storage_` as it is now.
`_slot` caches the trace's slot of that value, valid while `_epoch` is the recorder's epoch and `_seen` the storage's
version; a tensor over its whole storage may leave that to the storage's own slot.
"""

from __future__ import annotations

import contextlib
import copy
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torchlazy.lazy.record.lent_memory import is_lent, lend, storage_on
from torchlazy.lazy.record.saving import host_view, refuse_old_files
from torchlazy.lazy.torch_private.dispatch import with_our_dispatch
from torchlazy.lazy.trace.geometry import CONJUGATED, NEGATED, Geometry, geometry_like
from torchlazy.lazy.trace.storage import LazyStorage
from torchlazy.lazy.trace.trace import Slot, slot

if TYPE_CHECKING:
    from torchlazy.lazy.record.recorder import Recorder

LAZY = torch.device("lazy")
make_tensor: Any = torch.Tensor._make_wrapper_subclass
_plain_data = torch.Tensor.data
_requires_grad: Any = torch.Tensor.requires_grad
_set_requires_grad = torch.Tensor.requires_grad_
# Counts whatever may have changed a tensor object without replacing it: its storage, geometry, requires_grad or hooks;
# and the last of these tensors by identity, 0 where more than one may have changed. Guards look at tensors one by one
# only where theirs are among them.
changes = [0]
changed_lately: deque[int] = deque(maxlen=64)
# Counts writes while gradients are recorded: autograd may then make the written tensor require a gradient.
writes_with_grad = [0]
made_with_bits = [False]  # whether any tensor was made that shows its memory conjugated or negated
is_inference_mode = torch.is_inference_mode_enabled
# The autocast key that stands in for the lazy device's own, which torch lacks (ops/autocast.py).
# The stub of DispatchKey lists only some of the keys.
_AUTOCAST = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)  # type: ignore[attr-defined]


def note_change(tensor: LazyTensor | None) -> None:
    """Note that this tensor object was changed in place; None: it is not known which one."""
    changes[0] += 1
    changed_lately.append(0 if tensor is None else id(tensor))


class LazyTensor(torch.Tensor):
    """A tensor whose operators are recorded. Made by the recorder, never by users.

    Code that makes one gives it a dictionary by `unknown`, and then sets what is known: filled name by name, the
    dictionary would be of a kind that Python (3.11) makes and reads at several times the cost. `_slot` is the tensor's
    value while the recorder's epoch is `_epoch` and the storage's version is `_seen`.
    """

    _storage_: LazyStorage
    _geometry: Geometry
    _slot: Slot
    _epoch: int
    _seen: int
    recorder: Recorder  # the one recorder; set by the package at start

    # Replaced by the recorder's own method once the package has one: one call less for each operator.
    # The stub's `__torch_dispatch__` lacks `func`.
    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return cls.recorder.dispatch(func, args, kwargs or {})

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # the stub lacks `func`

    # ---------------------------------------------------------------- reading on the host

    def _real(self, cause: str) -> torch.Tensor:
        if self.recorder.capture is not None:
            self.recorder.capture.read_on_host(cause)
        return self.recorder.real(self, cause)

    def _host(self, cause: str) -> torch.Tensor:
        real = self._real(cause)
        with self.recorder.apart():
            return real.cpu()

    def _shared(self, cause: str) -> torch.Tensor:
        """The memory for a caller that keeps it; on the lazy device, where addresses may change, the current memory."""
        if self.recorder.capture is not None:
            self.recorder.capture.lends(self, cause)
        real = self.recorder.real if self._geometry.device == LAZY else self.recorder.hand_out
        return real(self, cause)

    def _lent(self, cause: str) -> torch.Tensor:
        """The memory for one who reads and writes it without asking."""
        recorder = self.recorder
        if recorder.capture is not None:
            recorder.capture.lends(self, cause)
        if self._geometry.device == LAZY:
            return lend(recorder, self, cause)
        if self._storage_.epoch == recorder.epoch:  # what was recorded may read it
            recorder.cut(cause)
        real = recorder.hand_out(self, cause)
        if cause in ("untyped_storage", "storage"):
            recorder.shared.add_raw(real)
        return real

    @contextlib.contextmanager
    def _read_as(self, cause: str) -> Iterator[None]:
        """Inside, torch's own conversion reads the value; the cut gets this cause instead of "item"."""
        recorder = self.recorder
        recorder.reading_as = cause
        try:
            with with_our_dispatch():
                yield
        finally:
            recorder.reading_as = ""

    def __bool__(self) -> bool:
        with self._read_as("bool"):
            return super().__bool__()

    def __int__(self) -> int:
        with self._read_as("int"):
            return super().__int__()

    def __float__(self) -> float:
        with self._read_as("float"):
            return super().__float__()

    def __complex__(self) -> complex:
        with self._read_as("complex"):
            return super().__complex__()

    def __index__(self) -> int:
        with self._read_as("index"):
            return super().__index__()

    def tolist(self) -> Any:
        capture = self.recorder.capture
        found = NotImplemented if capture is None else capture.listed(self)
        if found is not NotImplemented:
            return found
        host = self._host("tolist")
        with self.recorder.apart():
            return host.tolist()

    def numpy(self, *, force: bool = False) -> Any:
        """The value as a NumPy array: a copy from the lazy device, the very memory of a tensor made in `lazy_mode`."""
        if self.requires_grad and not force and torch.is_grad_enabled():
            raise RuntimeError("Can't call numpy() on Tensor that requires grad. Use tensor.detach().numpy() instead.")
        on_cpu = self._geometry.device.type == "cpu"
        host = self._lent("numpy") if on_cpu else self._host("numpy")
        with self.recorder.apart():
            if not on_cpu:
                return host.clone().numpy()
            array = host.numpy()
            self.recorder.shared.add_holder(host, array)
            return array

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        array = self.numpy()
        return array.astype(array.dtype if dtype is None else dtype, copy=bool(copy))

    def apply_(self, function: Any) -> Any:
        return self._by_python("apply_", (), function)

    def map_(self, other: torch.Tensor, function: Any) -> Any:
        return self._by_python("map_", (other,), function)

    def map2_(self, one: torch.Tensor, other: torch.Tensor, function: Any) -> Any:
        return self._by_python("map2_", (one, other), function)

    def _by_python(self, name: str, others: tuple[torch.Tensor, ...], function: Any) -> LazyTensor:
        """A function of Python's is called on each element, at once: torch's own method reads them by their address."""
        recorder = self.recorder
        if self.device == LAZY and name == "apply_":
            raise TypeError("apply_ is only implemented on CPU tensors")
        hosts = []
        for tensor in (self, *others):
            if not isinstance(tensor, LazyTensor):  # under `lazy_mode`
                tensor = recorder.view_of_plain(tensor, recorder.storage_of_plain(tensor))
            host = tensor._host(name)
            with recorder.apart():
                hosts.append(host.clone().requires_grad_(tensor.requires_grad))
        with recorder.apart():
            rows = [host.detach().expand_as(hosts[0]).flatten().tolist() for host in hosts]
            is_refused = any(host.requires_grad for host in hosts)
        found = iter(() if is_refused else [function(*items) for items in zip(*rows, strict=True)])
        with recorder.apart():
            getattr(hosts[0], name)(*hosts[1:], lambda *_: next(found))
        with torch.no_grad():
            self.copy_(hosts[0].to(self.device))
        return self

    # Torch's very signature; mypy drops the names of a special method's arguments and so misses the keyword-only one.
    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        host = self._host("print")
        with self.recorder.apart():
            text = repr(host)
        extra = []
        if self._geometry.device == LAZY:
            extra.append("device='lazy'")
        try:
            node = self.grad_fn
            name = "" if node is None else type(node).__name__
        except RuntimeError:  # a view made under `no_grad`, written since
            name = "Invalid"
        if name:
            extra.append(f"grad_fn=<{name}>")
        elif self.requires_grad:
            extra.append("requires_grad=True")
        text = _with_facts(text[: text.rindex(")")], extra) + ")"
        return f"Parameter containing:\n{text}" if isinstance(self, torch.nn.Parameter) else text

    __str__ = __repr__

    def __format__(self, spec: str) -> str:
        if self.dim() == 0:
            if not (self.is_floating_point() or self.is_complex()):  # the name of a layer: a branch of a captured call
                with self._read_as("format"):
                    return self.item().__format__(spec)
            host = self._host("format")
            with self.recorder.apart():
                return host.item().__format__(spec)
        return object.__format__(self, spec)

    def data_ptr(self) -> int:
        """The address of the real memory on the compute device."""
        real = self._shared("data_ptr")
        with self.recorder.apart():
            return real.data_ptr()

    const_data_ptr = mutable_data_ptr = data_ptr

    def untyped_storage(self) -> torch.UntypedStorage:
        real = self._lent("untyped_storage")
        with self.recorder.apart():
            return real.untyped_storage()

    def storage(self) -> Any:
        real = self._lent("storage")
        with self.recorder.apart():
            return real.storage()

    def __dlpack__(self, **kwargs: Any) -> Any:
        if self.requires_grad:
            raise BufferError("Can't export tensors that require gradient, use tensor.detach()")
        real = self._lent("dlpack")
        if self._geometry.device != LAZY:
            self.recorder.shared.add(self._storage_)
        with self.recorder.apart():
            return real.__dlpack__(**kwargs)

    def __dlpack_device__(self) -> Any:
        real = self._real("dlpack")
        with self.recorder.apart():
            return real.__dlpack_device__()

    # ---------------------------------------------------------------- copying and saving

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) in memo:
            return memo[id(self)]
        if not self.is_leaf:
            raise RuntimeError(
                "Only Tensors created explicitly by the user (graph leaves) support the deepcopy protocol at the "
                "moment."
            )
        if isinstance(self, torch.nn.Parameter):  # its copy has neither its gradient nor its attributes
            with torch.no_grad():
                parameter = memo[id(self)] = torch.nn.Parameter(self.detach().clone(), self.requires_grad)
            return parameter
        twin = memo[id(self)] = self._copied_with_others(memo).requires_grad_(self.requires_grad)
        if self.grad is not None:
            twin.grad = copy.deepcopy(self.grad, memo)
        for name, value in self.__dict__.items():
            if name not in OWN_ATTRIBUTES:
                setattr(twin, name, copy.deepcopy(value, memo))
        return twin

    def _copied_with_others(self, memo: dict[Any, Any]) -> torch.Tensor:
        """A copy that shares memory, within this deep copy, with the copies of all tensors on the same memory."""
        storage, geom = self._storage_, self._geometry
        with torch.no_grad():
            if geom.bits:  # eager's copy of a conjugated view is on memory of its own, too
                return self.detach().clone()
            held = self._copied_with_raw(memo)
            if held is not None:
                return held
            whole: Any = memo.get(("storage", id(storage)))
            if whole is None:
                whole = wrap_view(self, storage, storage.base, None, -1).clone()
                is_lazy = type(whole) is LazyTensor  # else made under `lazy_mode`, and copied outside of it
                if not (whole._geometry is storage.base if is_lazy else whole.stride() == storage.base.strides):
                    return self.detach().clone()
                memo["storage", id(storage)] = whole
            if geom is storage.base:
                return whole.detach()
            if type(whole) is not LazyTensor:
                return whole.as_strided(geom.shape, geom.strides, geom.offset)
            return wrap_view(whole, whole._storage_, geom, None, -1)

    def _copied_with_raw(self, memo: dict[Any, Any]) -> torch.Tensor | None:
        """A copy on the copy of a raw storage, which may be copied, too; None where nobody holds one."""
        recorder, storage, geom = self.recorder, self._storage_, self._geometry
        is_on_lazy = geom.device == LAZY
        if recorder.capture is not None:
            return None
        if not (is_lent(storage, recorder.target) if is_on_lazy else storage.pinned):
            return None
        real = recorder.real(self, "__deepcopy__")
        with recorder.apart():
            raw = copy.deepcopy(real.untyped_storage(), memo)
            window = (real.storage_offset(), geom.shape, geom.strides)
            twin = torch.empty(0, dtype=geom.dtype, device=real.device).set_(raw, *window)  # type: ignore[call-overload]
            if not is_on_lazy:
                return twin  # type: ignore[no-any-return]
            return wrap(storage_on(recorder, raw, geom.dtype, LAZY), geometry_like(twin, LAZY, geom.compute), None, -1)

    def __copy__(self) -> torch.Tensor:
        """As in eager: a leaf of its own over the same memory, with a version of its own."""
        twin = self._on_same_memory()
        if isinstance(self, torch.nn.Parameter):
            return torch.nn.Parameter(twin, self.requires_grad)
        return twin.requires_grad_(self.requires_grad)

    def _on_same_memory(self) -> LazyTensor:
        return wrap(self._storage_, self._geometry, None, -1)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Saved as a view of host memory and a device: such files load with `weights_only`, and without torchlazy."""
        if isinstance(self, torch.nn.Parameter):
            return torch._utils._rebuild_parameter, (self.detach(), self.requires_grad, OrderedDict())
        if self._geometry.device != LAZY:  # made under `lazy_mode`: saved as the ordinary tensor that it stands for
            real = self._shared("save")
            with self.recorder.apart():
                return real.detach().requires_grad_(self.requires_grad).__reduce_ex__(protocol)
        storage = self._storage_
        refuse_old_files("_legacy_save")
        real = wrap_view(self, storage, storage.base, None, -1)._real("save")
        with self.recorder.apart():
            host = host_view(storage, self._geometry, real, self.recorder.epoch)
        return torch._utils._rebuild_device_tensor_from_cpu_tensor, (
            host,
            self.dtype,
            str(self.device),
            self.requires_grad,
        )

    # ---------------------------------------------------------------- changes that `changes` counts

    @property
    def requires_grad(self) -> bool:
        return _requires_grad.__get__(self)  # type: ignore[no-any-return]

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        note_change(self)
        _requires_grad.__set__(self, value)

    def requires_grad_(self, requires_grad: bool = True) -> Any:
        note_change(self)
        return _set_requires_grad(self, requires_grad)

    def register_hook(self, hook: Any) -> Any:
        note_change(self)
        return super().register_hook(hook)

    def register_post_accumulate_grad_hook(self, hook: Any) -> Any:
        note_change(self)
        return super().register_post_accumulate_grad_hook(hook)

    # ---------------------------------------------------------------- in-place changes of identity

    def _become(self, other: LazyTensor) -> None:
        """Take over another tensor's geometry and storage, keeping this object, its version counter and its grad."""
        note_change(self)
        if other.is_inference() != self.is_inference():  # torch sets data of its own kind only
            with torch.inference_mode(self.is_inference()):
                seen, other = other._seen, wrap(other._storage_, other._geometry, other._slot, other._epoch)
            other._seen = seen
        _plain_data.__set__(self, other)  # type: ignore[attr-defined]
        self._storage_, self._geometry = other._storage_, other._geometry
        self._slot, self._epoch, self._seen = other._slot, other._epoch, other._seen

    @property  # type: ignore[override]
    def data(self) -> torch.Tensor:
        return _plain_data.__get__(self)  # type: ignore[attr-defined]

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        if not isinstance(value, torch.Tensor):
            raise TypeError(f"Variable data has to be a tensor, but got {type(value).__name__}")
        if not isinstance(value, LazyTensor) and LAZY not in (self.device, value.device):  # made under `lazy_mode`
            value = self.recorder.view_of_plain(value, self.recorder.storage_of_plain(value))
        if not isinstance(value, LazyTensor):
            raise RuntimeError(
                f"incompatible tensor type: cannot set .data of a tensor on {self.device} to one on {value.device}; "
                "move it first with .to('lazy'), or, for fully_shard, keep the module on the mesh's device"
            )
        self._become(value)

    @data.deleter
    def data(self) -> None:
        raise RuntimeError("cannot delete the data of a tensor")


def any_of_others(kinds: Iterable[type]) -> bool:
    """Whether a class with rules of its own for operators is among these, which torch asks where ours gives no answer.

    Such a class holds lazy tensors (`TwoTensor`): it calls operators on them in turn.
    """
    return not all(issubclass(kind, LazyTensor) for kind in kinds)


def _with_facts(text: str, facts: list[str]) -> str:
    """A tensor's text with further facts, broken into lines of the print width as torch does."""
    indent = len("tensor(")
    width = torch._tensor_str.PRINT_OPTS.linewidth
    used = len(text) - text.rfind("\n") + 1
    for fact in facts:
        if used + len(fact) + 2 > width:
            text, used = f"{text},\n{' ' * indent}{fact}", indent + len(fact)
        else:
            text, used = f"{text}, {fact}", used + len(fact) + 2
    return text


# Makes the dictionary of a tensor with default values.
unknown: Callable[[], dict[str, Any]] = {
    "_storage_": None, "_geometry": None, "_slot": slot(0), "_epoch": -1, "_seen": 0
}.copy  # fmt: skip
OWN_ATTRIBUTES = frozenset({*unknown(), "_is_param"})


def attributes_of(tensor: torch.Tensor) -> list[str]:
    """The names of the attributes that the user gave a tensor object."""
    return [name for name in tensor.__dict__ if name not in OWN_ATTRIBUTES]


def wrap(storage: LazyStorage, geom: Geometry, value: Slot | None, epoch: int) -> LazyTensor:
    """A new tensor object: the view `geom` of `storage`, whose slot in trace `epoch` is `value` (None: not known)."""
    tensor: LazyTensor = make_tensor(*(geom.making or making(geom)))
    tensor.__dict__ = unknown()
    tensor._storage_ = storage
    tensor._geometry = geom
    if value is not None:
        tensor._slot, tensor._epoch = value, epoch
    tensor._seen = storage.version
    return tensor


def making(geom: Geometry) -> tuple[object, ...]:
    """The arguments of `make_tensor`, by position and without redundant ones: half its time is spent parsing them."""
    keys = _AUTOCAST if geom.device == LAZY else None
    if geom.bits:
        keys = _keys_of(geom.bits, keys)
    rest = (None, geom.dtype, torch.strided, geom.device, False, False, None, False, False, keys)
    made: tuple[object, ...] = (LazyTensor, geom.shape, None, None, *rest)
    if not geom.is_plain or make_tensor(*made).stride() != geom.strides:
        made = (LazyTensor, geom.shape, geom.strides, geom.offset or None, *rest)  # parsing None costs next to nothing
    geom.making = made
    return made


def _keys_of(bits: int, keys: Any) -> Any:
    """`keys` and the dispatch keys of a tensor that shows its memory conjugated or negated."""
    made_with_bits[0] = True
    for bit, key in ((CONJUGATED, torch._C.DispatchKey.Conjugate), (NEGATED, torch._C.DispatchKey.Negative)):
        if bits & bit:
            found = torch._C.DispatchKeySet(key)  # type: ignore[attr-defined]
            keys = found if keys is None else keys | found
    return keys


def wrap_view(source: torch.Tensor, storage: LazyStorage, geom: Geometry, value: Slot | None, epoch: int) -> LazyTensor:
    """`wrap` for a view of `source`: it is an inference tensor if the source is one, whatever the mode is now."""
    is_on = is_inference_mode()
    if source.is_inference() is not is_on:
        with torch.inference_mode(not is_on):
            return wrap(storage, geom, value, epoch)
    return wrap(storage, geom, value, epoch)
