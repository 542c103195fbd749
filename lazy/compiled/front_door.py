"""The entry point of `torchlazy.compile`: it checks the arguments, and imports the implementation at the first use.

Invariant: importing this imports nothing that a program without `torchlazy.compile` does not need.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torchlazy.lazy.deferred import DeferredModule

_MODES = ("default", "reduce-overhead", "max-autotune")
_compiled: Any = DeferredModule("torchlazy.lazy.compiled.callable")
_quantized: Any = DeferredModule("torchlazy.lazy.compiled.quantized")


@dataclass(frozen=True)
class CompileSettings:
    """The arguments of `torchlazy.compile`, checked."""

    mode: str
    dynamic: bool | None
    fullgraph: bool
    audit: bool
    backend: Callable[..., Any] | None


def _named(value: object) -> str:
    """The value in one line: its text where that is short, else its type."""
    text = repr(value)
    return text if len(text) <= 80 and "\n" not in text else f"a {type(value).__name__}"


def compile(
    function: Callable[..., Any] | None = None,
    *,
    mode: str = "default",
    dynamic: bool | None = None,
    fullgraph: bool = False,
    audit: bool = True,
    backend: Callable[..., Any] | None = None,
    quantize: str | None = None,
) -> Any:
    """Trace a function, module, method or whole training step once; then replay it without running its Python.

    The first calls run as they are, recorded, and become templates: programs, and what happens around them. A template
    serves later calls while its guards hold: arguments' structure, shapes, strides, dtypes, devices and aliasing;
    identity and metadata of the parameters, buffers and optimizer state reached, and what users wrote on them; classes,
    training flags and plain attributes of modules; closure cells, globals, defaults and code that the code names; grad
    mode, autocast, determinism, anomaly mode, default dtype. Numbers that turn out to vary (a learning rate) become
    inputs. Random seeds are drawn as the call itself draws them. A tensor argument that is a view of larger memory
    (a batch cut out of a data set) is copied first, unless the call writes to it, returns a view of it or reads its
    address.

    A call that asks what guards cannot tell again (a clock, a file) is not captured, and runs its Python. State that C
    code hides must not matter: audits catch it after a few calls, warn, and go back to running the Python at each call.
    Python's own side effects (printing, counting) happen only when the call is captured or audited.

    Args:
        mode: "default"; "reduce-overhead" and "max-autotune" also replay programs on CUDA as CUDA graphs, which keep
            their memory between calls.
        dynamic: for Python's numbers. None: those that changed between calls become inputs; True: all float arguments
            and learning rates do at once; False: each value has a template of its own. For sizes. None: three captures
            that differ in sizes (one more for each further size that varies independently) become one template for all
            sizes; True: two do; False: each combination of shapes is captured separately. Such a template serves a size
            only where all questions that Python asked about sizes (`if n > 512`) have the same answers, and operators
            give the expected sizes. C code may read a size unseen (a slice of a list, NumPy): what Python does with
            such a number is checked by audits only, so pass False where it matters. Programs are
            for all sizes as `torchlazy.config.dynamic` says ("on" unless TORCHLAZY_DYNAMIC=0).
        fullgraph: raise `SyncInside` where the call needs a value on the host, with the user's line.
        audit: compare now and then with what the Python does (`torchlazy.config.audit`).
        backend: `(torch.fx.GraphModule, inputs) -> callable` that compiles the programs instead of torchlazy.
        quantize: "int8-dynamic": linear layers of a module on the CPU, with weights of 2**19 elements and more, compute
            in int8, for inference (`lazy/compiled/quantized.py`). The model itself stays as it is.

    Returns a callable like `function`, with `report()`; for a module, one of a subclass of its class that shares all
    of its attributes; a decorator if `function` is not given. Raises ValueError for an unknown mode or `dynamic`,
    TypeError for what cannot be called and for settings of another type.
    """
    if mode not in _MODES:
        raise ValueError(f"torchlazy.compile: mode {mode!r} is none of {', '.join(_MODES)}")
    if dynamic not in (None, True, False):
        raise ValueError(f"torchlazy.compile: dynamic is None, True or False, not {dynamic!r}")
    for name, value in (("fullgraph", fullgraph), ("audit", audit)):
        if not isinstance(value, bool):
            raise TypeError(f"torchlazy.compile: {name} is True or False, not {value!r}")
    if quantize not in (None, "int8-dynamic"):
        raise ValueError(f'torchlazy.compile: quantize is None or "int8-dynamic", not {quantize!r}')
    if backend is not None and not callable(backend):
        raise TypeError(f"torchlazy.compile: backend must be callable with (GraphModule, inputs), not {backend!r}")
    settings = CompileSettings(mode, dynamic, fullgraph, audit, backend)
    if function is None:
        return lambda function: compile(
            function,
            mode=mode,
            dynamic=dynamic,
            fullgraph=fullgraph,
            audit=audit,
            backend=backend,
            quantize=quantize,
        )
    if quantize is not None:
        return _quantized.compile_quantized(function, settings)
    if isinstance(function, (staticmethod, classmethod)):  # the decorator stands above theirs
        return type(function)(_compiled.compile_callable(function.__func__, settings))
    if isinstance(function, property) and function.fget is not None:
        return function.getter(_compiled.compile_callable(function.fget, settings))
    if not callable(function):
        raise TypeError(
            f"torchlazy.compile: {_named(function)} cannot be called; give a function, a module or a method"
        )
    if isinstance(function, type) and issubclass(function, torch.nn.Module):
        raise TypeError(
            f"torchlazy.compile: {function.__name__} is a class of modules; compile what it makes, "
            f"torchlazy.compile({function.__name__}(...)), or decorate its forward"
        )
    return _compiled.compile_callable(function, settings)
