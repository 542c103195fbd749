"""Tiers: when a trace is compiled, that the swap changes nothing, and that no worker can harm the program."""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
import warnings
from collections.abc import Callable, Iterator

import pytest
import torch
import torchlazy
from torchlazy.lazy.api import driver
from torchlazy.lazy.run import programs, workers
from torchlazy.lazy.run.driver import CutEvent
from torchlazy.lazy.run.workers import CompilePool
from torchlazy.lazy.trace import serialize
from torchlazy.lazy.trace.trace import CutTrace
from torchlazy.runtime.errors import ProgramError
from torchlazy.runtime.toolchains.target_facts import versions

pytestmark = pytest.mark.usefixtures("device_in_python")


@pytest.fixture(autouse=True)
def _background() -> None:
    torchlazy.config.tiers = "on"


@pytest.fixture
def outcomes() -> Iterator[list[CutEvent]]:
    events: list[CutEvent] = []
    driver.listeners.append(events.append)
    yield events
    driver.listeners.remove(events.append)


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> Iterator[CompilePool]:
    """A pool of the test's own."""
    own = CompilePool(workers=1)
    monkeypatch.setattr(driver.tiers, "pool", own)
    monkeypatch.setattr(driver.tiers, "_warned", set())
    yield own
    own.close()


def fake_worker(monkeypatch: pytest.MonkeyPatch, on_job: str) -> None:
    """Workers that start at once and do `on_job` with each line that they get."""
    ready = json.dumps({"ready": versions()})
    boot = f"import sys, os, json\nprint('''{ready}''', flush=True)\nfor line in sys.stdin:\n    {on_job}\n"
    monkeypatch.setattr(workers, "_BOOT", boot)


def train_step(seed: int = 7) -> Callable[[], tuple[torch.Tensor, torch.Tensor]]:
    """A step with dropout, in-place updates of a parameter and a momentum, and a gradient."""
    torch.manual_seed(seed)
    weight = torch.randn(16, 16).to("lazy").requires_grad_()
    momentum = torch.zeros(16, 16).to("lazy")
    x = torch.randn(8, 16).to("lazy")

    def step() -> tuple[torch.Tensor, torch.Tensor]:
        loss = torch.nn.functional.dropout(torch.tanh(x @ weight), 0.4).square().mean()
        loss.backward()
        with torch.no_grad():
            momentum.mul_(0.9).add_(weight.grad)
            weight.sub_(momentum, alpha=0.1)
        weight.grad = None
        torchlazy.flush()
        return loss.detach(), weight

    return step


def run_steps(count: int, wait_before: int = -1) -> list[list[float]]:
    step = train_step()
    seen = []
    for number in range(count):
        if number == wait_before:
            torchlazy.wait_for_compile()
        loss, weight = step()
        seen.append([float(loss), *weight.detach().cpu().flatten().tolist()])
    return seen


@pytest.mark.parametrize(("cores", "is_later"), [(2, True), (4, False)])
def test_on_few_cores_a_worker_starts_after_what_else_is_compiled(pool, monkeypatch, cores, is_later):
    events: list[str] = []
    begin = workers._Worker.__init__
    monkeypatch.setattr(workers, "available_cores", lambda: cores)
    monkeypatch.setattr(workers.native_code, "let_finish", lambda seconds: events.append("others"))
    monkeypatch.setattr(workers._Worker, "__init__", lambda worker: events.append("worker") or begin(worker))
    fake_worker(monkeypatch, """print('{"kind": "refused"}', flush=True)""")
    assert pool.wait_for(pool.submit({})).kind == "refused"
    assert events == ["others"] * is_later + ["worker"]


def test_second_sight_compiles_in_the_background_and_the_swap_changes_nothing(outcomes):
    swapped = run_steps(6, wait_before=3)
    kinds = [event.outcome for event in outcomes if event.cause == "flush"]
    assert kinds[0] == "tier 0: first sight"
    assert "tier 0: compiling in the background" in kinds
    assert kinds[-2:] == ["hit", "hit"]
    counts = torchlazy.metrics()
    assert counts["compiles"] >= 1
    assert counts["compile_seconds"] > 0
    driver.forget()
    torchlazy.config.tiers = "off"
    for ours, compiled in zip(swapped, run_steps(6), strict=True):
        assert ours == pytest.approx(compiled, rel=1e-5, abs=1e-6)


def test_only_gaps_in_the_rules_count_as_fallbacks():
    torchlazy.config.tiers = "off"
    x = torch.eye(4, device="lazy")
    (torch.addmm(x, x, x) + x.cumsum(0)).tolist()
    counts = torchlazy.metrics()
    assert counts["extern_calls"] == {"aten.addmm.default": 1, "aten.cumsum.default": 1}
    assert counts["fallbacks"] == {}
    foreign = torch.library.custom_op(
        "torchlazy_test_tiers::twice", lambda x: x * 2, mutates_args=(), schema="(Tensor x) -> Tensor"
    )
    foreign.register_fake(torch.empty_like)
    foreign(x + x @ x).tolist()
    assert torchlazy.metrics()["fallbacks"] == {"torchlazy_test_tiers.twice.default: no rule": 1}


def test_workers_compile_under_the_programs_default_dtype():
    x = torch.arange(1, 6, device="lazy")
    torch.set_default_dtype(torch.float64)
    try:
        for _ in range(3):
            found = (x / 3 + torch.sqrt(x)).tolist()
            torchlazy.wait_for_compile()
        assert found == pytest.approx((x.cpu() / 3 + torch.sqrt(x.cpu())).tolist(), rel=1e-15)
        assert torchlazy.metrics()["fallbacks"] == {}
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("draw", ["rand", "dropout", "randint"])
def test_random_numbers_are_the_same_in_all_tiers(draw):
    def numbers() -> list[float]:
        torch.manual_seed(3)
        if draw == "rand":
            value = torch.rand(100, device="lazy")
        elif draw == "dropout":
            value = torch.nn.functional.dropout(torch.ones(100, device="lazy"), 0.5)
        else:
            value = torch.randint(0, 1000, (100,), device="lazy")
        return value.tolist()

    seen = [numbers(), numbers()]
    torchlazy.wait_for_compile()
    seen.append(numbers())
    assert torchlazy.metrics()["compiles"] == 1
    torchlazy.config.tiers = "off"
    driver.forget()
    seen.append(numbers())
    assert all(other == seen[0] for other in seen)


def test_what_is_seen_once_is_never_compiled(pool):
    for count in range(2, 12):  # each of another structure: sizes alone would be generalised
        x = torch.ones(4, device="lazy")
        for _ in range(count):
            x = x * 3
        x.tolist()
    torchlazy.wait_for_compile()
    assert torchlazy.metrics()["compiles"] == 0
    assert not pool.process_ids()


@pytest.mark.parametrize(("operators", "cores", "is_early"), [(80, 8, True), (80, 2, False), (10, 8, False)])
def test_a_worker_is_started_before_there_is_a_job_where_a_core_is_free(pool, monkeypatch, operators, cores, is_early):
    fake_worker(monkeypatch, "pass")
    monkeypatch.setattr(programs, "available_cores", lambda: cores)
    x = torch.randn(3).to("lazy")
    for _ in range(operators):
        x = x * 1.25 + 1  # what no other test records
    torchlazy.sync()
    assert torchlazy.metrics()["compiles"] == 0
    assert bool(pool._threads) == is_early
    while is_early and not pool.process_ids():
        time.sleep(0.01)


def test_a_worker_that_cannot_be_started_ahead_is_tried_again_with_the_job(pool, monkeypatch):
    monkeypatch.setattr(workers, "_BOOT", "raise SystemExit('not yet')")
    pool.start_ahead()
    while pool._idle == 0:
        time.sleep(0.01)
    assert not pool.process_ids()
    fake_worker(monkeypatch, """print(json.dumps({"kind": "refused", "message": "here"}), flush=True)""")
    assert pool.wait_for(pool.submit({})).message == "here"


def test_memory_is_updated_in_place_in_every_tier():
    weight = torch.zeros(64, device="lazy")
    places = set()
    for number in range(5):
        weight.add_(1.5)
        torchlazy.flush()
        places.add(weight._storage_.real.data_ptr())
        if number == 2:
            torchlazy.wait_for_compile()
    assert torchlazy.metrics()["hits"] >= 1
    assert len(places) <= 2  # the first cut makes the memory, later ones keep it
    assert weight.tolist() == [7.5] * 64


def test_foreground_tiers_compile_at_second_or_first_sight(outcomes):
    def cut() -> None:
        (torch.ones(5, device="lazy") + 4).tolist()

    torchlazy.config.tiers = "foreground"
    cut(), cut(), cut()
    driver.forget()
    torchlazy.config.tiers = "off"
    cut(), cut()
    assert [event.outcome for event in outcomes] == ["tier 0: first sight", "compiled", "hit", "compiled", "hit"]
    assert torchlazy.metrics()["compiles"] == 2


def cut_twice() -> None:
    for _ in range(2):
        assert (torch.ones(6, device="lazy") * 5).tolist() == [5.0] * 6


def test_a_crash_is_counted_and_warned_of_once(pool, monkeypatch):
    fake_worker(monkeypatch, "print('out of luck', file=sys.stderr, flush=True); os._exit(9)")
    cut_twice()
    with pytest.warns(RuntimeWarning, match=r"crashed.*exit status 9.*out of luck"):
        torchlazy.wait_for_compile()
    cut_twice()
    assert torchlazy.metrics()["fallbacks"]["compile worker crashed"] == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            (torch.ones(7, device="lazy") * 5).tolist()
        torchlazy.wait_for_compile()
    assert torchlazy.metrics()["fallbacks"]["compile worker crashed"] == 2
    assert torchlazy.metrics()["compiles"] == 0


def test_without_workers_the_foreground_compiles(pool, monkeypatch):
    monkeypatch.setattr(workers, "_BOOT", "raise SystemExit(4)")
    cut_twice()
    with pytest.warns(RuntimeWarning, match="no compile worker"):
        torchlazy.wait_for_compile()
    assert torchlazy.metrics()["compiles"] == 1
    cut_twice()
    assert torchlazy.metrics()["hits"] == 2


@pytest.mark.parametrize("answer", ["no json", '{"kind": "compiled", "program": "damaged"}', '{"surprise": 1}'])
def test_a_strange_answer_does_no_harm(pool, monkeypatch, answer):
    fake_worker(monkeypatch, f"print('''{answer}''', flush=True)")
    cut_twice()
    with pytest.warns(RuntimeWarning):
        torchlazy.wait_for_compile()
    cut_twice()


def test_the_compilers_own_error_is_told(pool, monkeypatch):
    answer = json.dumps({"kind": "refused", "error": "OverflowError", "message": "too much", "traceback": "line 1"})
    fake_worker(monkeypatch, f"print('''{answer}''', flush=True)")
    cut_twice()
    with pytest.warns(RuntimeWarning, match="cannot be compiled .*OverflowError: too much"):
        torchlazy.wait_for_compile()
    assert torchlazy.metrics()["fallbacks"]["cannot compile: OverflowError"] == 1
    driver.forget()
    torchlazy.config.strict = True
    cut_twice()
    with pytest.raises(RuntimeError, match="line 1"):
        torchlazy.wait_for_compile()


def test_a_killed_worker_is_replaced():
    cut_twice()
    torchlazy.wait_for_compile()
    processes = driver.tiers.pool.process_ids()  # one on two cores
    assert processes
    for process in processes:
        os.kill(process, signal.SIGKILL)
    for _ in range(2):
        torch.arange(9, device="lazy").square().tolist()
    torchlazy.wait_for_compile()
    assert torchlazy.metrics()["compiles"] == 2
    assert not {*driver.tiers.pool.process_ids()} & {*processes}


def test_closing_the_pool_answers_what_waits(pool, monkeypatch):
    fake_worker(monkeypatch, "import time; time.sleep(3600)")
    jobs = [pool.submit({"number": number}) for number in range(3)]
    while not pool.process_ids():
        time.sleep(0.01)
    pool.close()
    pool.wait()
    assert not pool.process_ids(), "the worker would sleep on"
    assert [job.answer.kind for job in jobs[1:]] == ["unavailable"] * 2


def test_a_forked_child_starts_afresh(pool, monkeypatch):
    fake_worker(monkeypatch, "import time; time.sleep(3600)")
    cut_twice()
    assert driver.tiers._pending
    child = os.fork()
    if child == 0:
        fresh = driver.tiers.pool is not pool and not driver.tiers._pending
        gc.collect()
        cut_twice()
        os._exit(0 if fresh else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    end = time.monotonic() + 60
    while not pool.process_ids() and time.monotonic() < end:  # a thread starts it
        time.sleep(0.01)
    assert pool.process_ids()


def recorded_trace() -> CutTrace:
    events: list[CutEvent] = []
    driver.listeners.append(events.append)
    x = torch.randn(4, 6, device="lazy").to(torch.bfloat16)
    y = torch.nn.functional.dropout(x.t().reshape(3, 8) * -0.0, 0.25)
    y = y.to(torch.float64, memory_format=torch.preserve_format)
    torch.stack([y.amax(0), torch.full((8,), float("inf"), device="lazy", dtype=torch.float64)]).tolist()
    driver.listeners.remove(events.append)
    return events[-1].trace


def test_a_trace_survives_the_way_to_a_worker():
    trace = recorded_trace()
    back = serialize.from_json(serialize.to_json(trace))
    assert back.signature() == trace.signature()
    assert back == trace
    assert all(a is b for a, b in zip(back.geometries, trace.geometries, strict=True))
    assert serialize.canonical_text(back) == serialize.canonical_text(trace)


def test_a_trace_of_unknown_operators_or_constants_is_refused():
    text = serialize.to_json(recorded_trace())
    with pytest.raises(ProgramError, match="no operator"):
        serialize.from_json(text.replace("aten.amax.default", "aten.amax.nothing"))
    with pytest.raises(ProgramError, match="no constant of a trace"):
        serialize._decode({"t": "load"}, ())


PROGRAM = """
    import os, sys
    import torch, torchlazy
    from torchlazy.lazy.api import driver
    from torchlazy.runtime.toolchains import target_facts
    target_facts.package_fingerprint = lambda: "the test's"  # files may be edited while the test runs

    def step():
        x = torch.ones(32, device="lazy")
        return (x.tanh() * 2 + x).sum().item()
"""


def script(body: str) -> list[str]:
    return [sys.executable, "-c", textwrap.dedent(PROGRAM) + textwrap.dedent(body)]


def environment(folder: object, **settings: str) -> dict[str, str]:
    """With an empty cache; without the native recorder, which would be compiled into it."""
    kept = {"TORCHLAZY_CACHE_DIR": str(folder), "TORCHLAZY_STORE": "on", "TORCHLAZY_NATIVE": "off"}
    return os.environ | kept | settings


def is_alive(process: int) -> bool:
    try:
        with open(f"/proc/{process}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize("ending", ["pass", "os.kill(os.getpid(), 9)"])
def test_a_process_that_ends_takes_its_workers_along(tmp_path, ending):
    body = f"""
    step(), step()
    while not driver.tiers.pool.process_ids():
        pass
    print(driver.tiers.pool.process_ids()[0], flush=True)
    {ending}
    """
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    settings = environment(tmp_path / "cache", TMPDIR=str(temporary))
    done = subprocess.run(script(body), env=settings, capture_output=True, text=True, timeout=600)
    assert not done.stderr.strip()
    worker = int(done.stdout)
    end = time.monotonic() + 600  # it looks for its parent once it is up, and gives way to everybody
    while is_alive(worker) and time.monotonic() < end:
        time.sleep(0.05)
    assert not is_alive(worker)
    assert not list(temporary.glob("torchlazy-worker-*"))


REPORT = """
    results = []
    for _ in range(3):
        results.append(step())
        torchlazy.wait_for_compile()
    counts = torchlazy.metrics()
    print(results, counts["compiles"], counts["hits"], flush=True)
"""


def run_reports(folder: object, count: int, tiers: str) -> list[str]:
    children = [
        subprocess.Popen(
            script(REPORT), env=environment(folder, TORCHLAZY_TIERS=tiers), stdout=subprocess.PIPE, text=True
        )
        for _ in range(count)
    ]
    return [child.communicate(timeout=600)[0].strip() for child in children]


def test_processes_share_what_one_of_them_compiled(tmp_path):
    folder = tmp_path / "cache"
    results = run_reports(folder, 2, "off")
    assert len({text.split("]")[0] for text in results}) == 1
    assert not list(folder.rglob(".tmp-*"))
    (stored,) = (folder / "programs").rglob("*.json")
    kept = stored.read_text()

    (again,) = run_reports(folder, 1, "on")  # the first sight has the stored program loaded
    assert again.split("]")[1].split() == ["0", "2"]
    assert again.split("]")[0] == results[0].split("]")[0]

    stored.write_text(kept[: len(kept) // 2])
    for library in (folder / "binaries").glob("*.so"):
        library.write_bytes(library.read_bytes()[:100])
    (repaired,) = run_reports(folder, 1, "off")
    assert repaired.split("]")[1].split() == ["1", "2"]
    assert repaired.split("]")[0] == results[0].split("]")[0]
    assert stored.read_text().splitlines()[2] == kept.splitlines()[2]
