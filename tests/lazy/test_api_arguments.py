"""Wrong arguments of our own functions: each is refused at the call, with what is wrong and what to write instead."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
import torchlazy
from torchlazy.lazy.config import Config
from torchlazy.lazy.export.front_door import ExportError


def double(x):
    return x * 2


def _counted():
    return torchlazy.flops(lambda x, y: x @ y, torch.ones(2, 3), torch.ones(3, 4))


REFUSED = {
    "compile mode": (lambda: torchlazy.compile(double, mode="fast"), ValueError, "none of default"),
    "compile fullgraph": (lambda: torchlazy.compile(double, fullgraph="no"), TypeError, "fullgraph is True or False"),
    "compile audit": (lambda: torchlazy.compile(double, audit=1), TypeError, "audit is True or False"),
    "compile no callable": (lambda: torchlazy.compile(torch.ones(99)), TypeError, "a Tensor cannot be called"),
    "compile class": (lambda: torchlazy.compile(torch.nn.Linear), TypeError, r"torchlazy.compile\(Linear\(...\)\), or"),
    "target None": (lambda: torchlazy.set_target(None), TypeError, 'use "cpu"'),
    "target name": (lambda: torchlazy.set_target("gpu"), ValueError, 'use "cpu"'),
    "no_sync bare": (lambda: torchlazy.no_sync(double), TypeError, r"not double; as a decorator write @no_sync\(\)"),
    "sync_budget bare": (lambda: torchlazy.sync_budget(double), TypeError, r"write sync_budget\(2\)"),
    "sync_budget text": (lambda: torchlazy.sync_budget("2"), TypeError, r"write sync_budget\(2\)"),
    "sync_budget negative": (lambda: torchlazy.sync_budget(-1), ValueError, "use 0 or more"),
    "lazy_mode bare": (lambda: torchlazy.lazy_mode(double), TypeError, r"as a decorator @lazy_mode\(\)"),
    "lazy_mode left": (lambda: torchlazy.lazy_mode().__exit__(None, None, None), RuntimeError, "not open"),
    "dump None": (lambda: torchlazy.dump(None), TypeError, "give a path"),
    "dump empty": (lambda: torchlazy.dump(""), ValueError, "give a path"),
    "dump stages": (lambda: torchlazy.dump("x", stages=3), TypeError, "give their names"),
    "dump left": (lambda: torchlazy.dump("x").__exit__(None, None, None), RuntimeError, "not open"),
    "shadow None": (lambda: torchlazy.shadow(None), TypeError, "give a path"),
    "shadow left": (lambda: torchlazy.shadow("x").__exit__(None, None, None), RuntimeError, "not open"),
    "explain value": (lambda: torchlazy.explain(double(torch.ones(2))), TypeError, "arguments separately"),
    "flops value": (lambda: torchlazy.flops(3), TypeError, "arguments separately"),
    "flops name": (lambda: _counted().at(z=3), ValueError, "there are x_0"),
    "flops size": (lambda: _counted().at(x_0=-3), ValueError, "ints that are not negative"),
    "flops text": (lambda: _counted().at(x_0="a"), ValueError, "ints that are not negative"),
    "export value": (lambda: torchlazy.export(3, (torch.ones(2),)), TypeError, "pass a function"),
    "export tensor": (lambda: torchlazy.export(double, torch.ones(2)), TypeError, "pass a tuple"),
    "export None": (lambda: torchlazy.export(double, None), TypeError, "pass a tuple"),
    "export kwargs": (lambda: torchlazy.export(double, (torch.ones(2),), [3]), TypeError, "pass a dict"),
    "export fixed size": (
        lambda: torchlazy.export(double, (torch.ones(3),), dynamic={"x": {0: 5}}), ExportError, "it is 3 in the",
    ),
    "export dimension text": (
        lambda: torchlazy.export(double, (torch.ones(3),), dynamic={"x": {"0": "n"}}), ExportError, "as ints",
    ),
    "export dimensions": (
        lambda: torchlazy.export(double, (torch.ones(3),), dynamic=[0]), ExportError, "dynamic says 0 of x; write its",
    ),
    "dump file": (lambda: torchlazy.dump(__file__), FileExistsError, "is a file; give a folder"),
    "shadow file": (lambda: torchlazy.shadow(__file__), FileExistsError, "is a file; give a folder"),
    "load None": (lambda: torchlazy.load(None), TypeError, "give its path"),
    "config name": (lambda: setattr(torchlazy.config, "presicion", "eager"), AttributeError, "it has enabled"),
    "config read": (lambda: torchlazy.config.presicion, AttributeError, "it has enabled"),
    "config deleted": (lambda: delattr(torchlazy.config, "precision"), AttributeError, "assign"),
    "config bool": (lambda: setattr(torchlazy.config, "max_trace_length", True), ValueError, "positive int"),
    "config recompute": (lambda: setattr(torchlazy.config, "recompute", True), ValueError, "recompute must be 'on' or"),
    "config recompute text": (lambda: setattr(torchlazy.config, "recompute", "no"), ValueError, "recompute must be"),
    "config debug": (lambda: setattr(torchlazy.config, "debug", True), ValueError, "one of"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    call, kind, remedy = REFUSED[name]
    with pytest.raises(kind, match=remedy):
        call()


def test_paths_of_programs(tmp_path):
    path = tmp_path / "it.pt2"
    torch.export.save(torchlazy.export(double, (torch.ones(3),), dynamic={"x": {0: 3}}), path)
    for given in (path, str(path), os.fsencode(path)):
        assert torchlazy.load(given)(torch.ones(3)).tolist() == [2, 2, 2]
    with pytest.raises(IsADirectoryError):
        torchlazy.load(tmp_path)


def test_a_dump_that_cannot_begin_leaves_everything_as_it_was(tmp_path):
    (tmp_path / "file").touch()
    kept = torchlazy.dump.recorder.keep_frames
    with pytest.raises(OSError, match="file"), torchlazy.dump(tmp_path / "file" / "x"):
        pass
    assert torchlazy.dump.recorder.keep_frames is kept


WRONG = {
    "TORCHLAZY_PRECISION": "exact", "TORCHLAZY_MAX_TRACE_LENGTH": "many", "TORCHLAZY_STRICT": "yes",
    "TORCHLAZY_DEBUG": "9", "TORCHLAZY_MEMORY_BUDGET": "3 bananas", "TORCHLAZY_DYNAMIC": "maybe",
}  # fmt: skip


@pytest.mark.parametrize("variable", WRONG)
def test_a_wrong_variable_is_named(variable, monkeypatch):
    monkeypatch.setenv(variable, WRONG[variable])
    with pytest.raises(ValueError, match=f"the environment has {variable}='{WRONG[variable]}'.*mend or unset"):
        Config()


def test_variables(monkeypatch):
    for name in ("PRECISION", "MAX_TRACE_LENGTH", "STRICT", "DEBUG", "STORE", "TIERS", "RECOMPUTE"):
        monkeypatch.setenv(f"TORCHLAZY_{name}", "")
    monkeypatch.setenv("TORCHLAZY_DYNAMIC", "0")
    text = str(Config())
    assert text.startswith("torchlazy.config(enabled='on', precision='fused', rng='philox', tiers='on', store='on', ")
    for setting in ("max_trace_length=20000", "recompute='on'", "dynamic='off'", "strict=False", "debug=0"):
        assert setting in text
    monkeypatch.setenv("TORCHLAZY_STRICT", "1")
    monkeypatch.setenv("TORCHLAZY_MEMORY_BUDGET", "0.5")
    assert Config().strict is True and Config().memory_budget == 0.5
    monkeypatch.setenv("TORCHLAZY_PRECISON", "eager")
    with pytest.warns(RuntimeWarning, match="TORCHLAZY_PRECISON, .* did you mean TORCHLAZY_PRECISION"):
        Config()


def test_a_wrong_target_names_its_variable():
    given = {**os.environ, "TORCHLAZY_TARGET": "gpu"}
    run = subprocess.run([sys.executable, "-c", "import torch"], env=given, capture_output=True, text=True, timeout=600)
    assert "TORCHLAZY_TARGET='gpu'" in run.stderr and run.returncode != 0
