"""The device "lazy": torch's builtin device type of that name, with our kernels behind it.

Invariant: every ATen overload that makes a tensor from no tensor has a kernel on the dispatch key `Lazy`; operators on
lazy tensors rarely reach that key, because the tensor subclass catches them first.
"""

from __future__ import annotations

import types
from typing import Any

import torch
from torchlazy.lazy.native.device import DEVICE
from torchlazy.lazy.ops.loading import LoadedMemory
from torchlazy.lazy.record.recorder import Recorder
from torchlazy.lazy.record.tensor import LAZY, LazyTensor
from torchlazy.lazy.torch_private.patches import exclude_from_dynamo, load_through_functions, share_loaded_memory
from torchlazy.lazy.trace.geometry import check_lazy_index
from torchlazy.lazy.trace.storage import LazyStorage

_KEEP: list[torch.library.Library] = []  # dropping a Library unregisters its kernels

# Beside the factories: what torch's own code calls below Python dispatch (`torch.tensor([x[0], x[1]])` reads that
# way), and `set_` with a geometry, which torch composes of operators on raw storages if the device has no kernel.
_TRANSFERS = (
    "_local_scalar_dense",
    "_to_copy",
    "copy_",
    "set_.source_Storage",
    "set_.source_Storage_storage_offset",
    "set_.source_Tensor_storage_offset",
    "_copy_from_and_resize",
)


def factory_overloads() -> list[str]:
    """Names of the ATen overloads that accept a device and no tensor, and are not composite."""
    found = []
    for name in torch._C._dispatch_get_all_op_names():
        if not name.startswith("aten::"):
            continue
        base, _, overload = name.removeprefix("aten::").partition(".")
        try:
            op = getattr(getattr(torch.ops.aten, base), overload or "default")
        except AttributeError:
            continue
        arguments = op._schema.arguments
        if not any(a.name == "device" for a in arguments):
            continue
        if any("Tensor" in str(a.type) or "Storage" in str(a.type) for a in arguments):
            continue
        if not any("Tensor" in str(r.type) for r in op._schema.returns):
            continue
        if torch._C._dispatch_has_kernel_for_dispatch_key(name, "CompositeImplicitAutograd"):
            continue
        found.append(name.removeprefix("aten::"))
    return found


def register(recorder: Recorder) -> None:
    """Make `device="lazy"` work: kernels, the device module, serialization."""
    DEVICE.install(recorder)
    library = torch.library.Library("aten", "IMPL")
    for name in (*factory_overloads(), *_TRANSFERS):
        base, _, overload = name.partition(".")
        packet = getattr(torch.ops.aten, base, None)
        if packet is None or (overload or "default") not in packet.overloads():
            continue
        library.impl(name, _kernel(recorder, getattr(packet, overload or "default")), "Lazy")
    _KEEP.append(library)
    if not hasattr(torch, "lazy"):
        torch._register_device_module("lazy", _device_module(recorder))
    # The stub demands functions of the old storage classes, which torch itself no longer passes.
    torch.serialization.register_package(17, _location_tag, _restore)  # type: ignore[arg-type]
    load_through_functions()
    memory = LoadedMemory(recorder)
    share_loaded_memory(lambda host: DEVICE.loaded(host) if DEVICE.is_on() else memory.tensor(host))


def _kernel(recorder: Recorder, op: torch._ops.OpOverload) -> Any:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        if "device" in kwargs and DEVICE.is_on():
            return DEVICE.made(op, args, kwargs)
        return recorder.dispatch(op, args, kwargs)

    exclude_from_dynamo(kernel)
    return kernel


def _location_tag(storage: Any) -> str | None:
    return "lazy" if getattr(storage, "device", None) is not None and storage.device.type == "lazy" else None


def _restore(storage: torch.UntypedStorage, location: str) -> torch.UntypedStorage | None:
    """`torch.load(map_location="lazy")`: the host's bytes, marked so that the tensor built on them becomes lazy."""
    if not str(location).startswith("lazy"):
        return None
    check_lazy_index(torch.device(location))
    target = DEVICE.target if DEVICE.is_on() else "cpu"
    bound = LazyBoundStorage(storage.nbytes(), device=target)
    bound.copy_(storage)
    return bound


class LazyBoundStorage(torch.UntypedStorage):
    """A host storage that claims to be on the lazy device: `torch.load` then builds lazy tensors on it, which share
    `lazily`."""

    lazily: LazyStorage | None = None

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return LAZY


def _device_module(recorder: Recorder) -> types.ModuleType:
    """`torch.lazy`: what torch requires of a device's module."""
    module = types.ModuleType("torch.lazy")
    members: dict[str, Any] = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": lambda index: None,
        "synchronize": lambda device=None: recorder.cut("synchronize"),
        "manual_seed": lambda seed: None,  # lazy random numbers follow the CPU generator, which torch seeds itself
        "manual_seed_all": lambda seed: None,
        "get_rng_state": lambda device=None: torch.get_rng_state(),
        "set_rng_state": lambda state, device=None: torch.set_rng_state(state),
        "_is_in_bad_fork": lambda: False,
        "get_amp_supported_dtype": lambda: [torch.bfloat16, torch.float16, torch.float32],
        "is_bf16_supported": lambda: True,
        "empty_cache": lambda: None,
    }
    for name, value in members.items():
        setattr(module, name, value)
    return module


__all__ = ["LAZY", "LazyTensor", "register"]
