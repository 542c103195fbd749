"""`torchlazy.compile`: trace a call once, then replay it under guards without running its Python.

Invariant: a compiled callable gives what the callable itself would give. What cannot be replayed runs as ever, under
verified replay, and `report()` says why.
"""

from __future__ import annotations

import functools
import warnings
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torchlazy.lazy import audit
from torchlazy.lazy.capture_call import Call, Captured, capture_call, fixed_numbers
from torchlazy.lazy.compile_api import CompileSettings
from torchlazy.lazy.guard_walk import TooMuch
from torchlazy.lazy.guards import Guards, ambient
from torchlazy.lazy.mode import lazy_mode
from torchlazy.lazy.program_handle import ProgramHandle
from torchlazy.lazy.recorder import Recorder
from torchlazy.lazy.replay import CheckFailed, Replay
from torchlazy.lazy.tensor import LAZY, LazyTensor
from torchlazy.lazy.torch_private import flatten_tree, unflatten_tree

_MAX_SIGNATURES = 64  # argument structures and geometries with variants of their own
_MAX_VARIANTS = 8  # for one signature
_PATIENCE = 3  # captures in a row that gave no template before a signature is left to verified replay
_TENSOR = torch.Tensor


@dataclass(eq=False)
class Variant:
    """A template that holds under its guards."""

    guards: Guards
    replay: Replay
    schedule: audit.Schedule = field(default_factory=audit.Schedule)


@dataclass(eq=False)
class _Signature:
    """What is known of calls with arguments of one structure and geometry."""

    variants: list[Variant] = field(default_factory=list)
    refusals: int = 0


@dataclass(frozen=True)
class CompileReport:
    """What became of a compiled callable's calls so far.

    `captures` calls ran their Python to be captured, `replays` ran without it, `verified` ran as ever, recorded.
    `reasons` are why captures were made or refused, oldest first. `alarm` is what an audit found, or empty.
    """

    captures: int
    replays: int
    verified: int
    audits: int
    variants: int
    reasons: tuple[str, ...]
    alarm: str

    def __str__(self) -> str:
        lines = [
            f"{self.captures} captured, {self.replays} replayed ({self.audits} audited), {self.verified} ran as ever; "
            f"{self.variants} variants"
        ]
        lines += [f"  {reason}" for reason in self.reasons]
        if self.alarm:
            lines.append(f"  alarm: {self.alarm}")
        return "\n".join(lines)


class CompiledCallable:
    """What `torchlazy.compile` returns. Calls take and give what the callable itself does."""

    def __init__(self, function: Callable[..., Any], settings: CompileSettings) -> None:
        self._function = function
        self.recorder: Recorder = LazyTensor.recorder
        self.driver: Any = self.recorder.driver
        self._settings = settings
        self._signatures: dict[Any, _Signature] = {}
        self._free: set[str] = set()
        self._fixed: set[str] = set()
        self._counts = dict.fromkeys(("captures", "replays", "verified", "audits"), 0)
        self._reasons: list[str] = []
        self._alarm = ""
        self._last_leaves: Any = None
        self._writes_windows = False
        if not isinstance(function, torch.nn.Module):
            functools.update_wrapper(self, function, updated=())

    def __getattr__(self, name: str) -> Any:
        """What is asked of a compiled module (`parameters`, `train`, `state_dict`, ...) is answered by the module."""
        if name.startswith("__") or name == "_function":
            raise AttributeError(name)
        return getattr(self._function, name)

    # ---------------------------------------------------------------- calling

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        recorder = self.recorder
        if self._alarm or recorder.capture is not None or recorder.busy:
            return self._as_ever(args, kwargs)
        with recorder.lock:
            given, spec = flatten_tree((args, kwargs))
            leaves = self._compact(given)
            free = self._free - self._fixed
            key = (spec, *_facts(leaves, free))
            signature = self._signatures.get(key)
            if signature is None:
                self._learn_arguments(leaves, spec)
                signature = self._signature(key)
            for variant in signature.variants:
                if variant.guards.holds() and variant.replay.holds(leaves):
                    if self._settings.audit and variant.schedule.due():
                        return self._audit(variant, signature, leaves, given, spec)
                    try:
                        results = variant.replay.run(leaves, given)
                    except CheckFailed:
                        continue
                    self._counts["replays"] += 1
                    if variant is not signature.variants[0]:
                        signature.variants.remove(variant)
                        signature.variants.insert(0, variant)
                    return unflatten_tree(results, variant.replay.template.spec)
            if signature.refusals >= _PATIENCE:
                return self._as_ever(args, kwargs)
            return self._capture(signature, leaves, given, spec)

    def _compact(self, leaves: list[Any]) -> list[Any]:
        """Ordinary tensors that are windows on larger memory, as tensors of their own: a batch cut out of a data set
        lies elsewhere at each call. Not where the callable turned out to write to such an argument."""
        if self._writes_windows:
            return leaves
        found: list[Any] | None = None
        for position, leaf in enumerate(leaves):
            if type(leaf) is _TENSOR and not leaf.requires_grad and leaf.layout is torch.strided:
                memory = leaf.untyped_storage()
                if memory.nbytes() != leaf.numel() * leaf.element_size():
                    found = found if found is not None else list(leaves)
                    found[position] = leaf.clone(memory_format=torch.preserve_format)
        return leaves if found is None else found

    def _as_ever(self, args: Any, kwargs: Any) -> Any:
        self._counts["verified"] += 1
        leaves, _ = flatten_tree((args, kwargs))
        if not self._is_plain(leaves) or self.recorder.mode_depth:
            return self._function(*args, **kwargs)
        with lazy_mode():
            value = self._function(*args, **kwargs)
        return _ordinary(self.recorder, value)

    def _is_plain(self, leaves: Sequence[Any]) -> bool:
        """Whether the call is about ordinary tensors, which are recorded under `lazy_mode`."""
        tensors = [leaf for leaf in leaves if isinstance(leaf, _TENSOR)]
        modules = [leaf for leaf in (*leaves, self._function) if isinstance(leaf, torch.nn.Module)]
        owner = getattr(self._function, "__self__", None)
        if isinstance(owner, torch.nn.Module):
            modules.append(owner)
        for cell in getattr(self._function, "__closure__", None) or ():
            try:
                value = cell.cell_contents
            except ValueError:
                continue
            if isinstance(value, torch.nn.Module):
                modules.append(value)
            elif isinstance(value, _TENSOR):
                tensors.append(value)
        tensors += [next(module.parameters()) for module in modules if any(True for _ in module.parameters())]
        code = getattr(self._function, "__code__", None)
        for name in code.co_names if code is not None else ():
            value = self._function.__globals__.get(name)
            if isinstance(value, torch.nn.Module):
                first = next(value.parameters(), None)
                tensors += [] if first is None else [first]
            elif isinstance(value, _TENSOR):
                tensors.append(value)
        return bool(tensors) and not any(isinstance(t, LazyTensor) and t._geometry.device == LAZY for t in tensors)

    def _signature(self, key: Any) -> _Signature:
        if len(self._signatures) >= _MAX_SIGNATURES:
            oldest = next(iter(self._signatures))
            del self._signatures[oldest]
        found = self._signatures[key] = _Signature()
        return found

    # ---------------------------------------------------------------- capturing

    def _capture(self, signature: _Signature, leaves: Sequence[Any], given: Sequence[Any], spec: Any) -> Any:
        self._learn(signature)
        self._counts["captures"] += 1
        try:
            captured = self._run_captured(leaves, given, spec)
        except TooMuch as why:
            signature.refusals = _PATIENCE
            self._note(f"not captured: {why}")
            args, kwargs = unflatten_tree(list(leaves), spec)
            return self._as_ever(args, kwargs)
        template = captured.template
        if template is None:
            signature.refusals += 1
            self._note(f"not replayed: {captured.refused}")
            if signature.refusals == _PATIENCE:
                warnings.warn(
                    f"torchlazy.compile: {self._label()} runs its Python at each call: {captured.refused}",
                    RuntimeWarning,
                    stacklevel=4,
                )
            return captured.value
        self._add(signature, captured)
        return captured.value

    def _add(self, signature: _Signature, captured: Captured) -> None:
        template = captured.template
        assert template is not None
        signature.refusals = 0
        self._fixed |= fixed_numbers(template)
        replay = Replay(
            self.recorder, template, lambda segment: ProgramHandle(
                self.driver, segment, self._settings.backend, graphs=self._settings.mode != "default"
            )
        )
        signature.variants.insert(0, Variant(captured.guards, replay))
        if len(signature.variants) > _MAX_VARIANTS:
            del signature.variants[_MAX_VARIANTS:]
            self._note(f"more than {_MAX_VARIANTS} variants for one kind of arguments: the oldest is dropped")

    def _run_captured(self, leaves: Sequence[Any], given: Sequence[Any], spec: Any) -> Captured:
        call = Call(
            self._function,
            tuple(leaves),
            tuple(given),
            tuple(f"argument {i}" for i in range(len(leaves))),
            spec,
            frozenset(self._free - self._fixed),
            frozenset(self._fixed),
            self._settings.dynamic is not False,
            self._is_plain(leaves) and not self.recorder.mode_depth,
            self._settings.fullgraph,
        )
        captured = capture_call(self.recorder, call)
        if captured.wrote_windows:
            self._writes_windows = True
            self._signatures.clear()
        return captured

    def _learn_arguments(self, leaves: Sequence[Any], spec: Any) -> None:
        """Arguments that are numbers and were others in the last new kind of call vary."""
        last, self._last_leaves = self._last_leaves, (leaves, spec)
        if self._settings.dynamic is False or last is None or last[1] != spec:
            return
        for position, (then, now) in enumerate(zip(last[0], leaves, strict=True)):
            if type(then) is float and type(now) is float and then != now:
                self._free.add(f"argument {position}")

    def _learn(self, signature: _Signature) -> None:
        """Why no variant served, and which numbers vary from call to call."""
        for variant in signature.variants:
            changed = variant.guards.broken()
            for name, then, now in changed[:1]:
                self._note(f"captured again: {name} was {_short(then)}, is {_short(now)}")
            if self._settings.dynamic is not False:
                self._free |= set(variant.guards.changed_numbers()) - self._fixed

    # ---------------------------------------------------------------- audits

    def _audit(
        self, variant: Variant, signature: _Signature, leaves: Sequence[Any], given: Sequence[Any], spec: Any
    ) -> Any:
        """Run the Python after all, recorded, and compare with the template."""
        self._counts["audits"] += 1
        captured = self._run_captured(leaves, given, spec)
        if captured.template is not None and audit.took_another_way(variant.replay.template, captured.template):
            self._add(signature, captured)
            return captured.value
        difference = audit.difference(variant.replay.template, captured)
        if difference:
            self._alarm = difference
            self._signatures.clear()
            warnings.warn(
                f"torchlazy.compile: {self._label()} does not do the same at each call, although everything that "
                f"guards see is as it was: {difference}. From now on its Python runs at each call, and is recorded.",
                RuntimeWarning,
                stacklevel=4,
            )
        return captured.value

    # ---------------------------------------------------------------- telling

    def report(self) -> CompileReport:
        """What became of the calls so far."""
        variants = sum(len(signature.variants) for signature in self._signatures.values())
        return CompileReport(**self._counts, variants=variants, reasons=tuple(self._reasons), alarm=self._alarm)

    def _note(self, reason: str) -> None:
        if reason not in self._reasons:
            self._reasons.append(reason)
            del self._reasons[:-50]

    def _label(self) -> str:
        name: str = getattr(self._function, "__qualname__", None) or type(self._function).__name__
        return name

    def __get__(self, owner: Any, kind: Any = None) -> Any:
        """A compiled method: one compiled callable for each object, as bound methods are."""
        if owner is None:
            return self
        bound = self._function.__get__(owner, kind)
        made = CompiledCallable(bound, self._settings)
        if hasattr(owner, "__dict__") and getattr(self._function, "__name__", ""):
            kept = _BOUND.setdefault(owner, {}) if _is_weakly_referable(owner) else {}
            return kept.setdefault(self, made)
        return made


def _facts(leaves: Sequence[Any], free: set[str]) -> list[Any]:
    """What a variant depends on in the arguments."""
    found: list[Any] = [ambient()]
    storages: dict[int, int] = {}
    for position, leaf in enumerate(leaves):
        if isinstance(leaf, LazyTensor):
            storage = leaf._storage_
            first = storages.setdefault(id(storage), position)
            found.append((leaf._geometry, storage.base, leaf.requires_grad, leaf.is_leaf, first))
        elif isinstance(leaf, _TENSOR):
            if leaf.layout is not torch.strided:
                found.append((type(leaf), id(leaf)))
                continue
            first = storages.setdefault(leaf.untyped_storage()._cdata, position)
            found.append(
                (type(leaf), tuple(leaf.shape), leaf.stride(), leaf.storage_offset(), leaf.dtype, leaf.device,
                 leaf.requires_grad, leaf.is_leaf, leaf.untyped_storage().nbytes(), first)
            )  # fmt: skip
        elif type(leaf) in (int, float) and f"argument {position}" in free:
            found.append(type(leaf))
        elif type(leaf) is float:
            found.append((float, leaf.hex()))
        elif type(leaf) in (int, bool, str, bytes, complex, type(None), torch.dtype, torch.device):
            found.append((type(leaf), leaf))
        else:
            found.append((type(leaf), id(leaf)))
    return found


_BOUND: weakref.WeakKeyDictionary[Any, dict[CompiledCallable, CompiledCallable]] = weakref.WeakKeyDictionary()


def _is_weakly_referable(owner: Any) -> bool:
    try:
        weakref.ref(owner)
        hash(owner)
    except TypeError:
        return False
    return True


def _ordinary(recorder: Recorder, value: Any) -> Any:
    """What a call under `lazy_mode` gave, with the ordinary tensors that its lazy ones stand for."""
    leaves, spec = flatten_tree(value)

    def plainly(leaf: Any) -> Any:
        if isinstance(leaf, LazyTensor) and leaf._geometry.device != LAZY and leaf.grad_fn is None:
            real = recorder.real(leaf, "result of a compiled call")
            return real.requires_grad_() if leaf.requires_grad else real
        return leaf

    return unflatten_tree([plainly(leaf) for leaf in leaves], spec)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 80 else text[:77] + "..."
