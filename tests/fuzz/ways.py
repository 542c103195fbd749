"""Runs a program eagerly and in other ways, and tells the first difference.

Invariant: each run begins with equal state, arguments and random numbers; what is compared after a call is all that it
could have changed. After every other call each tensor is written to: who shares memory shows.
"""

from __future__ import annotations

import contextlib
import signal
import traceback
import types
import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
import torchlazy
from torchlazy.lazy.api import driver
from torchlazy.lazy.compiled import callable as compiled_callable
from torchlazy.lazy.compiled import race
from torchlazy.lazy.compiled.ordinary import optimizer_to_begin
from torchlazy.lazy.joint.graphs import JointGraphs
from torchlazy.lazy.native.sizes import KnownSizes
from torchlazy.lazy.numbers.matcher import Matcher
from torchlazy.lazy.numbers.unify import CannotUnify, unify
from torchlazy.lazy.run.driver import WhichTrace
from torchlazy.lazy.run.dynamic_program import Template
from torchlazy.lazy.run.interpreter import run_entries
from torchlazy.lazy.run.programs import KnownTrace
from torchlazy.lazy.trace.skeleton import decompose_trace
from torchlazy.lazy.trace.trace import CutTrace
from torchlazy.prims.meta import TensorMeta
from torchlazy.runtime.native import recorder_library

from tests.fuzz.compare import Difference, Seen, difference, leaves, objects, seen, write_to_all
from tests.fuzz.program import Program
from tests.fuzz.world import NAMES, World, arguments
from tests.lazy.cpu_graphs import cpu_graphs

WAYS = ("device", "mode", "compile", "module")
MORE_WAYS = (
    "native",
    "native_device",
    "compile_lazy",
    "compile_mode",
    "compile_native_device",
    "bridge",
    "module_graphs",
)
_MOST_PIECES = 16
_LATE = ("out of range", "out of bounds", "bounds", "ZeroDivisionError")  # lies in the values: raised at the cut


class Failure(NamedTuple):
    """A program differs from eager in a way: at which call, and how."""

    way: str
    call: int
    found: Difference

    def __str__(self) -> str:
        return f"{self.way}, call {self.call}: {self.found.text}"

    def is_like(self, other: Failure | None) -> bool:
        """Whether both are of one kind."""
        return other is not None and (self.way, self.signature()) == (other.way, other.signature())

    def signature(self) -> str:
        """The kind of the difference, and the error's type where one was raised that eager does not raise."""
        return self.found.text.split("]")[0] if self.found.kind == "raised" else self.found.kind


class OutOfTime(BaseException):
    """A program took too long."""


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raises OutOfTime after that long."""

    def stop(*_: object) -> None:
        raise OutOfTime

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@contextlib.contextmanager
def settings(tier0: bool, races: bool = False, audit: str = "spaced") -> Iterator[None]:
    """Eager's random numbers and roundings; each cut runs operator by operator, or is compiled at first sight. `races`:
    replays and Python have turns of one call each, without an end. `audit`: the setting of this name."""
    names = ("rng", "precision", "tiers", "strict", "store", "audit")
    kept = {name: getattr(torchlazy.config, name) for name in names}
    torchlazy.config.rng = torchlazy.config.precision = "eager"
    torchlazy.config.store, torchlazy.config.audit = "off", audit
    look_up = driver.tiers.look_up
    never = 1 << 60
    turns = {"BEGINS": 0, "_TURN": 1, "_TURNS": never, "_FIRST_LOOK": never} if races else {"BEGINS": never}
    raced = {name: getattr(race, name) for name in turns}
    for name, value in turns.items():
        setattr(race, name, value)
    compiled_callable.optimizer_to_begin = lambda *_: None  # type: ignore[assignment]  # replayed as early as may be
    if tier0:
        known: dict[Any, KnownTrace] = {}

        def look_up_none(trace: CutTrace, device: str, frame: str) -> tuple[KnownTrace, str]:
            return known.setdefault(trace.signature(), KnownTrace(seen=1)), "tier 0: first sight"

        driver.tiers.look_up = look_up_none  # type: ignore[method-assign]
    else:
        torchlazy.config.tiers, torchlazy.config.strict = "off", True
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        driver.tiers.look_up = look_up  # type: ignore[method-assign]
        compiled_callable.optimizer_to_begin = optimizer_to_begin
        for name, value in kept.items():
            setattr(torchlazy.config, name, value)
        for name, value in raced.items():
            setattr(race, name, value)


@contextlib.contextmanager
def _set(name: str, value: str) -> Iterator[None]:
    """Inside, this setting has the value."""
    kept = getattr(torchlazy.config, name)
    setattr(torchlazy.config, name, value)
    try:
        yield
    finally:
        setattr(torchlazy.config, name, kept)


def recorded_in_python() -> contextlib.AbstractContextManager[None]:
    """Inside, `lazy_mode` defers everything: the definition that the native recorder follows."""
    return _set("native", "off")


class _Interpreted:
    """Programs that run operator by operator: of traces, and of traces that differ in sizes only."""

    def __init__(self) -> None:
        options = types.SimpleNamespace(language="")
        # There is no form for a CUDA graph.
        self.programs = {"": types.SimpleNamespace(fallbacks=(), run=None, options=options)}
        self.samples: dict[Any, list[Any]] = {}  # by skeleton

    def look_up(self, trace: CutTrace, device: str, frame: str, form: str = "") -> tuple[KnownTrace, str]:
        parts = decompose_trace(trace)
        samples = self.samples.setdefault(parts.skeleton, [])
        if all(parts.ints != other.ints for _, other in samples):
            samples.append((trace, parts))
        known = KnownTrace(seen=3, compiled=self.programs.get(form))
        known.family = types.SimpleNamespace(templates=[], pending=None, stored=None, failure="")
        if len(samples) > 1:
            try:
                known.family.templates.append(self._template(samples))
            except CannotUnify as error:
                known.family.failure = str(error)
        return known, "hit"

    def _template(self, samples: list[Any]) -> Template:
        nothing: Any = types.SimpleNamespace()
        return Template(nothing, nothing, Matcher(unify(samples[-3:])), lambda *sizes: True)

    @staticmethod
    def run(compiled: Any, trace: WhichTrace, memory: Any, scalars: Any) -> list[Any]:
        return run_entries(trace() if callable(trace) else trace, memory, scalars)


@contextlib.contextmanager
def followed() -> Iterator[None]:
    """Inside, `lazy_mode` is native, and each trace that came twice has a program, which runs operator by operator."""
    config, tiers, run_compiled = torchlazy.config, driver.tiers, driver.run_compiled
    kept = config.native, config.tiers, tiers.look_up
    library = recorder_library.LIBRARY.wait()
    assert library is not None, recorder_library.LIBRARY.reason
    config.native, config.tiers = "on", "on"
    interpreted = _Interpreted()
    tiers.look_up = interpreted.look_up
    driver.real().run_compiled = interpreted.run
    library.for_tests(1, False)
    try:
        yield
    finally:
        library.forget()
        library.for_tests(4, True)
        driver.real().run_compiled = run_compiled
        config.native, config.tiers, tiers.look_up = kept


@contextlib.contextmanager
def _sizes_at_once() -> Iterator[None]:
    """Inside, the path for traces that differ in sizes only is there once enough of them came: its pieces of work are
    not one for each call, of which a program makes few."""
    plan = KnownSizes.plan

    def all_pieces(*args: Any) -> Any:
        found = (plan(*args) for _ in range(_MOST_PIECES))
        return next((one for one in found if one is not None), None)

    KnownSizes.plan = all_pieces  # type: ignore[method-assign]
    try:
        yield
    finally:
        KnownSizes.plan = plan  # type: ignore[method-assign]


@contextlib.contextmanager
def _followed_at_all_sizes() -> Iterator[None]:
    with followed(), _sizes_at_once():
        yield


def _on_native_device() -> contextlib.AbstractContextManager[None]:
    """Inside, tensors on the lazy device are recorded natively."""
    return _set("native_device", "on")


@contextlib.contextmanager
def _followed_on_device() -> Iterator[None]:
    with followed(), _sizes_at_once(), _on_native_device():
        yield


class _OperatorsAsProgram:
    """A trace's operators in the guise of a program that reads its numbers from memory."""

    def __init__(self, trace: CutTrace) -> None:
        self.trace = trace
        self.tensors = [geom.meta for _, geom in trace.inputs]
        dtypes = [torch.float64 if kind is float else torch.int64 for kind in trace.scalar_kinds]
        numbers = [TensorMeta((), dtype, (), "cpu") for dtype in dtypes]
        self.program = types.SimpleNamespace(
            inputs=[(f"in{n}", meta) for n, meta in enumerate([*self.tensors, *numbers])], scalars=(), steps=(),
            donations=trace.donations, output_metas=[geom.meta for _, geom in trace.outputs],
        )  # fmt: skip

    def run(self, inputs: list[torch.Tensor], scalars: Any) -> list[Any]:
        count = len(self.tensors)
        memory, numbers = inputs[:count], [number.item() for number in inputs[count:]]
        inputs.clear()
        found = run_entries(self.trace, memory, numbers)
        for value in found:
            if isinstance(value, BaseException):
                raise value
        return found


@contextlib.contextmanager
def _graphs_of_halves() -> Iterator[None]:
    """Inside, the halves of a joint are CUDA graphs from the second call on, which are stood in for on the CPU."""
    with pytest.MonkeyPatch.context() as patched:
        cpu_graphs(patched)
        patched.setattr(JointGraphs, "_is_time", lambda *_: True)
        as_program = lambda trace, frame: (types.SimpleNamespace(run=_OperatorsAsProgram(trace)), "")  # noqa: E731
        patched.setattr(driver.real(), "program_for_replay", as_program)
        assert recorder_library.LIBRARY.wait() is not None, recorder_library.LIBRARY.reason
        yield


_AROUND = {
    "native": _followed_at_all_sizes,
    "mode": recorded_in_python,
    "native_device": _followed_on_device,
    "compile_native_device": _on_native_device,
    "module_graphs": _graphs_of_halves,
}


def _raised(phase: str, error: Exception, program: Program) -> list[Any]:
    """What a call raised: where in the program, and of which type."""
    lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == f"<fuzz {program.seed}>"]
    return [phase, type(error).__name__, lines[-1] if lines else 0]


_OF_TORCH = {"captured by torch": "eager", "differentiated by torch": "aot_eager"}  # backends of `torch.compile`


def _backward(result: Any) -> None:
    found = [t for _, t in leaves(result, "") if isinstance(t, torch.Tensor) and t.requires_grad and t.grad_fn]
    if found:
        sum((t.abs().float().square().sum() for t in found), found[0].new_zeros((), dtype=torch.float32)).backward()


def _first(result: Any) -> torch.Tensor:
    return next(t for _, t in leaves(result, "") if isinstance(t, torch.Tensor))


def _settle_graphs(args: dict[str, torch.Tensor], S: World) -> None:
    """Ask each view for its graph, which torch makes anew at the first question behind a write. Guards ask, too."""
    for _, t in [*leaves(args, ""), *leaves(S.state(), "")]:
        if isinstance(t, torch.Tensor):
            with contextlib.suppress(RuntimeError):  # a view that torch gives no graph
                t.grad_fn  # noqa: B018


def _drop_gradients(args: dict[str, torch.Tensor], S: World) -> None:
    """How many branches a backward that raises has accumulated gradients of depends on their order."""
    for _, t in [*leaves(args, ""), *leaves(S.state(), "")]:
        if isinstance(t, torch.Tensor) and t.is_leaf:
            t.grad = None


_ON_DEVICE = ("device", "compile_lazy", "native_device", "compile_native_device")


def _under_autocast(program: Program) -> bool:
    """Whether calls are under autocast, whose casts on the lazy device are CUDA's and not those of the CPU."""
    return program.seed % 10 == 7


def play(program: Program, way: str, places: dict[int, list[str]]) -> Iterator[Seen]:
    """What is seen after each call. It ends where eager raises what the lazy ways raise later."""
    device = "lazy" if way in _ON_DEVICE else "cpu"
    torch.manual_seed(program.seed)
    step = program.step()
    S = World(device, program.seed, step)
    audit = program.seed % 3 == 0
    called: Any = step
    report: Any = None
    if way.startswith("compile"):
        called = torchlazy.compile(step, audit=audit)
        report = called.report
    elif way == "bridge":
        called = torch.compile(step, backend="torchlazy")
    elif way in _OF_TORCH:
        called = torch.compile(step, backend=_OF_TORCH[way])
    elif way in ("module", "module_graphs"):
        module = torchlazy.compile(S, audit=audit, mode="default" if way == "module" else "reduce-overhead")
        called = lambda _, *rest: module(*rest)  # noqa: E731
        report = module.report
    around = torchlazy.lazy_mode if way in ("mode", "compile_mode", "native") else contextlib.nullcontext
    autocast = torch.autocast("cpu", dtype=torch.bfloat16, enabled=_under_autocast(program))
    for number, call in enumerate(program.calls):
        args, result, raised, versions = dict[str, torch.Tensor](), None, None, dict[str, int]()
        phase = "before"
        names = {**NAMES, "S": S, "dev": device}
        try:
            exec(call.before, names)
            args = arguments(program.inputs, call, device, S)
            versions = {name: t._version for name, t in args.items()}
            _settle_graphs(args, S)
            phase = "call"
            with autocast, around():
                packed = program.packed([args[item.name] for item in program.inputs])
                result = called(S, device, *call.numbers, *packed)
            phase = "after"
            names |= {"backward": lambda r=result: _backward(r), "first": lambda r=result: _first(r)}
            exec(call.after, names)
        except Exception as error:
            raised = _raised(phase, error, program)
            if any(text in str(error) for text in _LATE):
                return
        if raised and phase == "after":
            _drop_gradients(args, S)
        items = [*leaves(args, "argument"), *leaves({"result": result, **S.state()}, "")]
        written = [name for name, version in versions.items() if args[name]._version != version]
        found = [
            ("raised", raised, None),
            ("written", written, None),
            ("alarm", _alarm(report), None),
            *seen(items),
            ("generator", None, torch.get_rng_state()),
        ]
        if (program.seed + number) % 2:
            found += write_to_all(items, places.setdefault(number, objects(items)))
        yield found


def _alarm(report: Any) -> str:
    """What an audit found to differ; not where its capture was only refused."""
    alarm = str(report().alarm) if report is not None else ""
    return alarm if " was " in alarm else ""


def _run(program: Program, way: str, want: list[Seen], places: dict[int, list[str]]) -> Failure | None:
    run = play(program, way, places)
    number = 0
    try:
        for number, theirs in enumerate(want):
            mine = next(run, None)
            if mine is None:  # raised what lies in the values, behind what it compares
                return None
            # A replay raises the version of what it writes to, if not as often as its operators would.
            found = difference(
                mine, theirs, () if way in ("device", "mode", "native", "native_device") else ("version",)
            )
            if found:
                return Failure(way, number, found)
    except Exception as error:
        if any(text in str(error) for text in _LATE):
            return None
        place = traceback.extract_tb(error.__traceback__)[-1]
        text = f"raised outside of the call: {error!r} ({place.filename}:{place.lineno})"
        return Failure(way, number, Difference(f"raised {type(error).__name__}", text))
    finally:
        run.close()
        with contextlib.suppress(Exception):
            torchlazy.sync()
        driver.forget()
        if way == "bridge" or way in _OF_TORCH:
            torch._dynamo.reset()
    return None


def failures(program: Program, ways: tuple[str, ...], tier0: bool = True) -> list[Failure]:
    """How the program differs from eager, in each way that does."""
    places: dict[int, list[str]] = {}  # that are written to after a call: an object each, eagerly
    found = []
    with settings(tier0, races=program.seed % 4 == 1, audit="all" if program.seed % 6 == 0 else "spaced"):
        want = list(play(program, "eager", places))
        again = _run(program, "eager", want, places)
        if again is not None:
            return []  # it depends on what no seed holds (uninitialized memory, addresses)
        for way in ways:
            if way in _ON_DEVICE and _under_autocast(program):
                continue
            with _AROUND.get(way, contextlib.nullcontext)():
                failure = _run(program, way, want, places)
            if failure is None:
                continue
            if way == "bridge":  # torch's own capture may differ
                theirs = [_run(program, way, want, places) for way in _OF_TORCH]
                if any(one is not None and one.signature() == failure.signature() for one in theirs):
                    continue
            found.append(failure)
    return found


def check(text: str, ways: tuple[str, ...] = WAYS) -> None:
    """Raises if the program of this text differs from eager: what a saved program's test calls."""
    from tests.fuzz.program import load

    found = failures(load(text), ways)
    assert not found, "\n".join(map(str, found))
