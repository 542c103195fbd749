"""Private torch API that is called or entered: dispatch keys, modes, settings and hooks. Works on torch 2.11 to 2.13.

What is changed in torch is in torch_private/patches.py. Beyond dispatch keys and operator objects, private names of
torch are in these two modules only.
"""

from __future__ import annotations

import _thread
import contextlib
import ctypes
import functools
import gc
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import overrides as _overrides
from torch.nn.modules import module as _module
from torch.optim import optimizer
from torch.utils import _python_dispatch
from torch.utils import _pytree as _pytree
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _disable_current_modes
from torchlazy.lazy.torch_private.autograd_layout import place_of_graph, places_of_gradients
from torchlazy.lazy.torch_private.saved import unseen_by_hooks
from torchlazy.runtime.native.identity_check import TensorReaders

_BITS = (torch._C.DispatchKey.Conjugate, torch._C.DispatchKey.Negative, torch._C.DispatchKey.ZeroTensor)


@contextlib.contextmanager
def below_autograd() -> Iterator[None]:
    """Run real operators with no autograd, autocast, inference flag or Python dispatch around them.

    Why private: a cut may happen anywhere (a hook, a `print`, under autocast or inference_mode); there is no public
    way to run just the kernels, and tensors made under inference_mode could never be written again. Within a dispatch
    to Python torch leaves out the keys that resolve lazy conjugation and negation: kernels that conjugate a tensor
    would use the numbers as they were.
    """
    keys = torch._C._dispatch_tls_local_exclude_set()
    for key in _BITS:
        keys = keys.remove(key)
    with (
        torch.inference_mode(False),
        torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), keys),
        torch._C._AutoDispatchBelowAutograd(),
        torch._C._DisableAutocast(),
        torch._C._DisableTorchDispatch(),
        torch._C.DisableTorchFunction(),
    ):
        yield


@contextlib.contextmanager
def with_our_dispatch() -> Iterator[None]:
    """Operators reach `__torch_dispatch__`, where torch left that out, and keep their tensors out of ours otherwise.

    Why private: `torch.tensor([t])` reads `t` with the Python keys left out, and there is no public way to take part.
    """
    if not torch._C._dispatch_tls_is_dispatch_key_excluded(torch._C.DispatchKey.Python):
        yield
        return
    keys = torch._C._dispatch_tls_local_exclude_set()
    for key in (torch._C.DispatchKey.Python, torch._C.DispatchKey.PythonTLSSnapshot):
        keys = keys.remove(key)
    with torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), keys):
        yield


def without_bits(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as it is in memory, without the conjugation and negation bits.

    Why private: `conj` clears its bit; the negation bit of an imaginary part is cleared only by the operator that sets
    it.
    """
    if tensor.is_conj():
        tensor = tensor.conj()
    return negative_view(tensor) if tensor.is_neg() else tensor


def negative_view(tensor: torch.Tensor) -> torch.Tensor:
    """A view with the negation bit flipped. Why private: torch makes it of imaginary parts only."""
    return torch._neg_view(tensor)


def memory_key(tensor: torch.Tensor) -> int:
    """A key of the tensor's storage, read without the active function modes.

    Why private: such a mode, ours among them, would see a read by the user.
    """
    with torch._C.DisableTorchFunction():
        return tensor.untyped_storage()._cdata


def address_of(tensor: torch.Tensor) -> int:
    """The address of the tensor's first element, read as by `memory_key`, for the same reason."""
    with torch._C.DisableTorchFunction():
        return tensor.data_ptr()


_WITHOUT_VIEWS = 4
"""The most that `_use_count` gives, inside of an operator on it, for a tensor without views and saved values."""


def views_of(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The autograd views of `tensor` that are alive.

    Why private: a base does not know its views; its reference count, which has no public name, saves the search
    through all objects where there can be none.
    """
    count = getattr(tensor, "_use_count", None)
    if count is not None and count() <= _WITHOUT_VIEWS:
        return []
    kind = type(tensor)
    return [one for one in gc.get_objects() if type(one) is kind and one._is_view() and one._base is tensor]


def refuse_gradients_by_view(view: torch.Tensor) -> None:
    """From now on autograd raises where a write to `view`, or to its base, would be differentiated through the view.

    Why private: this depends on how a view was created, and torch changes it only for its own tracers.
    """
    if not view.is_inference():
        autograd = torch._C._autograd
        autograd._set_creation_meta(view, autograd.CreationMeta.NO_GRAD_MODE)


@contextlib.contextmanager
def above_dispatch() -> Iterator[None]:
    """The opposite of `below_autograd`: run code in the dispatch state of a fresh thread, but without gradients or
    hooks of saved tensors.

    Why private: another back end traces with modes of its own, which do not work below autograd and the Python keys,
    where programs run; there is no public way back to that state.
    """
    include, exclude = _fresh_keys()
    with (
        torch.inference_mode(False),
        torch._C._ForceDispatchKeyGuard(include, exclude),
        _disable_current_modes(),
        torch._C._EnableTorchFunction(),
        torch.no_grad(),
        unseen_by_hooks(),
    ):
        yield


@functools.cache
def _fresh_keys() -> tuple[Any, Any]:
    """The dispatch keys that a fresh thread includes and excludes."""
    found: list[Any] = []
    done = _thread.allocate_lock()
    done.acquire()

    def look() -> None:
        found.append(torch._C._dispatch_tls_local_include_set())
        found.append(torch._C._dispatch_tls_local_exclude_set())
        done.release()

    _thread.start_new_thread(look, ())  # not by `threading`, which reports threads of the program to a capture
    done.acquire()
    return found[0], found[1]


def flatten_tree(value: Any, is_leaf: Callable[[Any], bool] | None = None) -> tuple[list[Any], Any]:
    """The leaves of nested containers (lists, dicts, named tuples, registered classes), and their structure.

    Why private: torch's pytree module has no public name, and containers of other libraries are registered there.
    """
    # torch's function leaves what it is given in a reference cycle: tensors would stay until the collector runs.
    asked = [is_leaf]
    held, spec = _pytree.tree_flatten(value, is_leaf and (lambda node: asked[0](node)))  # type: ignore[misc]
    leaves = held.copy()
    held.clear()
    asked.clear()
    return leaves, spec


def unflatten_tree(leaves: Any, spec: Any) -> Any:
    """The nested containers with these leaves; a torch.Size stays one, unlike with torch's own pytree."""
    if _holds_sizes(spec):
        return _with_sizes(iter(leaves), spec)
    return _pytree.tree_unflatten(leaves, spec)


_known_specs: dict[int, tuple[Any, bool]] = {}  # with whether a torch.Size is in them; alive, so that identities hold


def _holds_sizes(spec: Any) -> bool:
    known = _known_specs.get(id(spec))
    if known is None:
        if len(_known_specs) >= 4096:
            _known_specs.clear()
        known = _known_specs[id(spec)] = (spec, _has_size(spec))
    return known[1]


def _has_size(spec: Any) -> bool:
    return spec.type is torch.Size or any(map(_has_size, spec.children()))


def _with_sizes(leaves: Iterator[Any], spec: Any) -> Any:
    if spec.type is None:
        return next(leaves)
    children = [_with_sizes(leaves, child) for child in spec.children()]
    if spec.type is torch.Size:
        return torch.Size(children) if all(type(n) is int for n in children) else tuple(children)
    return _pytree.SUPPORTED_NODES[spec.type].unflatten_fn(children, spec.context)


@contextlib.contextmanager
def exporting_flags() -> Iterator[None]:
    """`torch.compiler.is_exporting()` and `is_compiling()` are true inside.

    Why private: libraries call these to avoid branches on a tensor's values (attention masks that may be skipped);
    they read flags that only torch's own export is meant to set.
    """
    compiler: Any = torch.compiler
    before = compiler._is_compiling_flag, compiler._is_exporting_flag
    compiler._is_compiling_flag = compiler._is_exporting_flag = True
    try:
        yield
    finally:
        compiler._is_compiling_flag, compiler._is_exporting_flag = before


def any_autocast() -> bool:
    """Whether autocast is on for any device.

    Why private: it is called at each compiled call, and the public function needs the name of each device.
    """
    return bool(torch._C._is_any_autocast_enabled())


def settings_of_kernels() -> tuple[Any, ...]:
    """Users' settings of kernels, which Python may read, too: precision of matrix products, back ends of attention and
    convolutions, threads; and the code of the saved-tensor hooks.

    Why private: it is called at each compiled call; half of these have no public getter, others take a microsecond.
    """
    c = torch._C
    try:
        precision: Any = c._get_float32_matmul_precision()
    except RuntimeError:  # the old and the new interface contradict each other
        precision = None
    hooks = c._autograd._top_saved_tensors_default_hooks(True)
    return (
        precision, c._get_flash_sdp_enabled(), c._get_mem_efficient_sdp_enabled(), c._get_math_sdp_enabled(),
        c._get_cudnn_sdp_enabled(), c._get_cudnn_enabled(), c._get_cudnn_benchmark(), c._get_cudnn_deterministic(),
        c._get_mkldnn_enabled(), c._get_deterministic_algorithms_warn_only(), torch.get_num_threads(),
        hooks and tuple(getattr(hook, "__code__", None) or id(hook) for hook in hooks),
    )  # fmt: skip


def questions_of_settings() -> tuple[tuple[Any, ...], ...]:
    """The getters of `settings_of_kernels`, of a call's other settings, and of active modes and functorch transforms:
    functions in C, each with its argument if it has one. Empty where they do not cover everything: under a default
    device, with saved-tensor hooks, where two interfaces contradict each other on the precision of products.

    Why private: as above; and modes and transforms have no public getter.
    """
    c: Any = torch._C
    try:
        c._get_float32_matmul_precision()
    except RuntimeError:
        return ()
    if c._len_torch_function_stack() or c._autograd._top_saved_tensors_default_hooks(True) is not None:
        return ()
    autocast: tuple[tuple[Any, ...], ...] = ()
    if any_autocast():
        autocast = tuple((ask, x) for x in _autocast_devices() for ask in (c.is_autocast_enabled, c.get_autocast_dtype))
    asked = (
        torch.is_grad_enabled, torch.is_inference_mode_enabled, torch.is_anomaly_enabled, torch.get_default_dtype,
        torch.get_num_threads, c._len_torch_function_stack, c._len_torch_dispatch_stack,
        c._functorch.peek_interpreter_stack, c._is_any_autocast_enabled, c._get_deterministic_algorithms,
        c._get_deterministic_algorithms_warn_only, c._get_float32_matmul_precision, c._get_flash_sdp_enabled,
        c._get_mem_efficient_sdp_enabled, c._get_math_sdp_enabled, c._get_cudnn_sdp_enabled, c._get_cudnn_enabled,
        c._get_cudnn_benchmark, c._get_cudnn_deterministic, c._get_mkldnn_enabled,
    )  # fmt: skip
    return *((function,) for function in asked), (c._autograd._top_saved_tensors_default_hooks, True), *autocast


def questions_of_autocast() -> tuple[tuple[Any, ...], ...]:
    """The getters of autocast's dtype on each device, and of its cache setting: functions in C with their arguments.

    Why private: the public functions are wrapped in Python to know the lazy device.
    """
    c: Any = torch._C
    return ((c.is_autocast_cache_enabled,), *((c.get_autocast_dtype, device) for device in _autocast_devices()))


def _autocast_devices() -> tuple[str, ...]:
    """The device types with autocast; the lazy device uses the settings of PrivateUse1."""
    return ("cpu", "cuda", torch._C._get_privateuse1_backend_name())


def saved_tensor_hooks_are_allowed() -> bool:
    """Whether saved-tensor hooks are enabled (`torch.autograd.graph.disable_saved_tensors_hooks`).

    Why private: torch has no public getter for it.
    """
    return bool(_autograd._saved_tensors_hooks_is_enabled())


def questions_of_saved_tensor_hooks() -> tuple[tuple[Any, ...], ...]:
    """The same as functions in C, which native code can call."""
    return ((_autograd._saved_tensors_hooks_is_enabled,),)


_autograd: Any = torch._C._autograd  # its stubs lack the getter


def default_device_of() -> torch.device | None:
    """The device that `torch.set_default_device` or `with torch.device(...)` chose; None where neither did.

    Why private: the public `torch.get_default_device` makes a tensor to find out.
    """
    for position in range(torch._C._len_torch_function_stack() - 1, -1, -1):
        mode = torch._C._get_function_stack_at(position)
        if isinstance(mode, DeviceContext):
            return mode.device
    return None


_TRACERS = tuple(
    getattr(torch._C._TorchDispatchModeKey, name) for name in ("PROXY", "FAKE", "FUNCTIONAL")
)  # fmt: skip


def torch_is_tracing() -> bool:
    """Whether a mode of torch's own tracing is active (make_fx, fake tensors).

    Why private: torch calls such modes after all others, whichever was entered first, and lists them nowhere in public.
    """
    if not torch._C._len_torch_dispatch_stack():
        return False
    return any(torch._C._get_dispatch_mode(key) is not None for key in _TRACERS)


def dispatch_modes() -> list[Any]:
    """The dispatch modes that are active, torch's own tracing among them; inside one, those below it.

    Why private: torch has no public view of its mode stacks.
    """
    return [torch._C._get_dispatch_stack_at(place) for place in range(torch._C._len_torch_dispatch_stack())]


def unseen_by_functions() -> contextlib.AbstractContextManager[None]:
    """Inside, neither a mode nor a class sees calls of torch's functions.

    Why private: torch's public switch leaves the modes on.
    """
    return torch._C.DisableTorchFunction()


def uppermost_mode() -> Any:
    """The dispatch mode that the next operator comes to; None where there is none.

    Why private: torch has no public view of its mode stacks.
    """
    count = torch._C._len_torch_dispatch_stack()
    return torch._C._get_dispatch_stack_at(count - 1) if count else None


def handed_to(mode: Any, answer: Callable[..., Any], *args: Any) -> Any:
    """`answer(*args)` of the uppermost dispatch mode, which is off meanwhile, as it is when torch calls it.

    Why private: inside a mode the way to the next one leads through the dispatcher, which takes as long as our part.
    """
    try:  # an interrupt may come behind the next line
        torch._C._pop_torch_dispatch_stack(None)
        return answer(*args)
    finally:
        torch._C._push_on_torch_dispatch_stack(mode)


def uppermost_function_mode() -> Any:
    """The function mode that the next function comes to; None where there is none.

    Why private: torch has no public view of its mode stacks.
    """
    count = torch._C._len_torch_function_stack()
    return torch._C._get_function_stack_at(count - 1) if count else None


def past_function_mode(mode: Any, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """`function(*args, **kwargs)` as the uppermost function mode, which is off meanwhile, would call it.

    Why private: a mode that only passes calls on takes 5 us for each.
    """
    try:  # an interrupt may come behind the next line
        torch._C._pop_torch_function_stack()
        return function(*args, **kwargs)
    finally:
        torch._C._push_on_torch_function_stack(mode)


def has_foreign_modes() -> bool:
    """Whether a dispatch or function mode is active that is neither torchlazy's nor a default device.

    Why private: torch has no public view of its mode stacks.
    """
    if not torch._C._len_torch_dispatch_stack() and not torch._C._len_torch_function_stack():
        return False
    stacks = dispatch_modes() + [
        torch._C._get_function_stack_at(i) for i in range(torch._C._len_torch_function_stack())
    ]
    return any(not isinstance(m, DeviceContext) and not type(m).__module__.startswith("torchlazy.") for m in stacks)


@contextlib.contextmanager
def without_our_modes() -> Iterator[None]:
    """Inside, no mode of torchlazy is active; those of others and a default device are.

    Why private: a mode can only be left by the block that entered it, and torch's own switch turns off all of them.
    """
    taken: list[tuple[Any, list[Any], list[Any]]] = []
    sides = (
        (_python_dispatch, torch._C._len_torch_dispatch_stack), (_overrides, torch._C._len_torch_function_stack)
    )  # fmt: skip
    try:
        for side, length in sides:
            modes = [side._pop_mode() for _ in range(length())][::-1]
            others = [mode for mode in modes if not type(mode).__module__.startswith("torchlazy.")]
            taken.append((side, modes, others))
            for mode in others:
                side._push_mode(mode)
        yield
    finally:
        for side, modes, others in taken:
            for _ in others:
                side._pop_mode()
            for mode in modes:
                side._push_mode(mode)


def functorch_is_active() -> bool:
    """Whether the call is inside `torch.func.grad`, `vmap` or the like.

    Why private: torch has no public getter for it.
    """
    return torch._C._functorch.peek_interpreter_stack() is not None


def global_hooks() -> list[tuple[str, dict[Any, Any]]]:
    """The hooks of all modules and all optimizers, by name.

    Why private: torch registers them through public functions, and has none that lists them.
    """
    return [
        *((name, getattr(_module, name)) for name in _GLOBAL_MODULE_HOOKS),
        *((name, getattr(optimizer, name)) for name in _GLOBAL_OPTIMIZER_HOOKS),
    ]


_GLOBAL_MODULE_HOOKS = (
    "_global_forward_pre_hooks", "_global_forward_hooks", "_global_backward_pre_hooks", "_global_backward_hooks",
    "_global_parameter_registration_hooks", "_global_buffer_registration_hooks", "_global_module_registration_hooks",
)  # fmt: skip
_GLOBAL_OPTIMIZER_HOOKS = ("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks")


def any_requires_grad(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether any of the tensors requires a gradient.

    Why private: in Python this costs a tenth of a microsecond a tensor, and guards test thousands.
    """
    return bool(torch._C._any_requires_grad(*tensors))


def without_torch_function() -> Any:
    """A context in which attributes of tensor subclasses are read without looking for `__torch_function__`.

    Why private: for each attribute of each lazy tensor torch first looks this method up, which costs as much as the
    attribute itself; the switch has no public name.
    """
    return torch._C.DisableTorchFunctionSubclass()


@functools.cache
def tensor_readers() -> TensorReaders | None:
    """How native code reads a tensor's memory, dtype, sizes, strides, hooks and gradient; None where it cannot.

    Why private: in Python shape and strides are new tuples at each read, 70 ns each, the other facts take 30 to 40,
    and guards read hundreds of tensors at each call. The functions are those that torch offers to compiled programs,
    with a stable C interface, and two methods without arguments of a tensor's implementation. Its address is in the
    tensor's Python object at an offset that no header gives: it is searched, and everything found is tried.
    """
    library = ctypes.CDLL(torch._C.__file__)
    functions: list[Any] = [getattr(library, name, None) for name in _READ_OF_TENSORS]
    if not all(functions):
        return None
    requires_grad, grad = functions[-2:]
    requires_grad.restype, requires_grad.argtypes = ctypes.c_bool, [ctypes.c_void_p]
    grad.restype, grad.argtypes = ctypes.c_void_p, [ctypes.c_void_p]

    def number_of(tensor: torch.Tensor) -> int:
        here, number = ctypes.c_void_p(tensor._cdata), ctypes.c_int32()
        functions[1](ctypes.byref(here), ctypes.byref(number))
        return number.value

    def gradient_of(tensor: torch.Tensor) -> int:
        return ctypes.c_int64.from_address(grad(tensor._cdata)).value

    with above_dispatch(), torch._C.DisableTorchFunction():  # the first call may come from anywhere, in any mode
        words = _words_of_tensors()
        with torch.inference_mode(False):  # else they have no versions
            counter, gradients = _counter_of_versions(), places_of_gradients()
            graph = place_of_graph(gradients)
        bare, weight = torch.zeros(2, device="cpu"), torch.nn.Parameter(torch.zeros(3, device="cpu"))
        if words is None or requires_grad(bare._cdata) or not requires_grad(weight._cdata):
            return None
        none = gradient_of(weight)
        weight.grad = torch.zeros(3, device="cpu")
        if gradient_of(weight) != weight.grad._cdata or gradient_of(bare) != none:
            return None
    addresses: Any = tuple(ctypes.cast(function, ctypes.c_void_p).value for function in functions)
    return TensorReaders(addresses, words, number_of, gradient_of, counter, gradients, graph)


_READ_OF_TENSORS = (
    *(f"aoti_torch_get_{name}" for name in ("data_ptr", "dtype", "dim", "sizes", "strides")),
    "_ZNK3c1010TensorImpl13requires_gradEv",
    "_ZNK3c1010TensorImpl4gradEv",
)


def _counter_of_versions() -> int:
    """The offset in a tensor's implementation of the address of its version counter; -1 if it is not found."""
    tensor, other = torch.zeros(2, device="cpu"), torch.zeros(2, device="cpu")
    alias = tensor.detach()  # shares the counter, and the storage
    count = 16  # words, fewer than an implementation has

    def words(of: torch.Tensor) -> list[int]:
        return list((ctypes.c_int64 * count).from_address(of._cdata))

    rows = list(zip(words(tensor), words(alias), words(other), strict=True))
    shared = [place for place, (a, b, c) in enumerate(rows) if place and a == b and a != c and _may_be_address(a)]
    version = lambda place: ctypes.c_uint32.from_address(words(tensor)[place] + 16).value  # noqa: E731
    for written in (3, 5):
        shared = [place for place in shared if version(place) == tensor._version]
        for _ in range(written):
            alias.add_(1)
    shared = [place for place in shared if version(place) == tensor._version == 8]
    return shared[0] if len(shared) == 1 else -1


def _may_be_address(word: int) -> bool:
    return word > 1 << 20 and not word % 8


def _words_of_tensors() -> tuple[int, int, int] | None:
    """Offsets in a tensor's Python object of the address of its implementation and of its two tables of hooks."""
    count = torch._C.TensorBase.__basicsize__ // 8

    def words(tensor: torch.Tensor) -> list[int]:
        return list((ctypes.c_int64 * count).from_address(id(tensor)))

    bare, hooked = torch.zeros(2, device="cpu"), torch.nn.Parameter(torch.zeros(3, device="cpu"))
    hooked.register_hook(lambda grad: None)
    hooked.register_post_accumulate_grad_hook(lambda tensor: None)
    wanted = (hooked._cdata, id(hooked._backward_hooks), id(hooked._post_accumulate_grad_hooks))
    found = words(hooked)
    if any(found.count(word) != 1 for word in wanted):
        return None
    places = (found.index(wanted[0]), found.index(wanted[1]), found.index(wanted[2]))
    other = words(bare)
    return places if [other[place] for place in places] == [bare._cdata, 0, 0] else None


def readers_of_devices() -> list[Any]:
    """The functions in C behind `torch.cuda.memory_allocated()` and its kind, and methods of events."""
    owners = torch._C, getattr(torch._C, "_CudaEventBase", None)
    names = "_cuda_memoryStats", "_cuda_getMemoryInfo", "_cuda_memorySnapshot", "query", "elapsed_time"
    return [getattr(owner, name) for owner in owners for name in names if hasattr(owner, name)]
