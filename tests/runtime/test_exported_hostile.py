"""Exported files that somebody made to do harm: each is refused with ExportedFileError, before anything of it runs.

Invariant: the files' hashes are right; only what they say is not.
"""

from __future__ import annotations

import copy
import hashlib
import json
import os
import random
import resource
import struct
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torchlazy
from torch import nn
from torchlazy.runtime.errors import ExportedFileError

Members = dict[str, Any]


def dynamic_program(path: Path, dialect: str = "aten") -> Path:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 2)
            self.register_buffer("mask", torch.tensor([True, False]))

        def forward(self, x: torch.Tensor, scale: float = 2.0, *, extra: Any = None) -> Any:
            y = self.linear(x) * scale + extra["add"]
            return {"y": y.reshape(-1), "rows": x.shape[0], "masked": y.masked_fill(self.mask, float("-inf"))}

    extra = {"add": torch.ones(2)}
    exported = torchlazy.export(
        Net(), (torch.ones(4, 3),), {"scale": 2.0, "extra": extra}, dynamic={"x": {0: "n"}}, dialect=dialect
    )
    exported.save(path)
    return path


@pytest.fixture(scope="module", params=["aten", "prims"])
def sound(request: Any, tmp_path_factory: Any) -> Path:
    return dynamic_program(tmp_path_factory.mktemp("sound") / "sound.tlz", request.param)


def parts(path: Path) -> Members:
    with zipfile.ZipFile(path) as archive:
        found: Members = {name: archive.read(name) for name in archive.namelist()}
    return {name: content if name.endswith(".bin") else json.loads(content) for name, content in found.items()}


def put_together(path: Path, members: Members, compression: int = zipfile.ZIP_STORED) -> Path:
    contents = {name: c if isinstance(c, bytes) else json.dumps(c).encode() for name, c in members.items()}
    if isinstance(members["manifest.json"], dict):
        hashes = {name: hashlib.sha256(c).hexdigest() for name, c in contents.items() if name != "manifest.json"}
        contents["manifest.json"] = json.dumps({**members["manifest.json"], "sha256": hashes}).encode()
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, content in contents.items():
            archive.writestr(name, content)
    return path


def graph_of(members: Members) -> dict[str, Any]:
    return members["graph.json"]["ExportedGraph"]  # type: ignore[no-any-return]


def node(members: Members, number: int = 0) -> dict[str, Any]:
    return graph_of(members)["nodes"][number]["Node"]  # type: ignore[no-any-return]


def calls(op: str, *args: Any, **kwargs: Any) -> Callable[[Members], None]:
    def change(members: Members) -> None:
        node(members).update(op=op, args=list(args), kwargs=[list(pair) for pair in kwargs.items()])

    return change


def sets(part: Callable[[Members], Any], key: Any, value: Any) -> Callable[[Members], None]:
    def change(members: Members) -> None:
        part(members)[key] = value

    return change


def input_spec(members: Members) -> Any:
    return graph_of(members)["inputs"][0]["InputSpec"]


def held(members: Members) -> Any:
    return graph_of(members)["state"][0]["StateSpec"]


def size(members: Members) -> Any:
    return graph_of(members)["sizes"][0]["SizeSpec"]


def first_entry(members: Members) -> Any:
    return next(iter(members["tensors.json"].values()))


def deep(depth: int) -> Any:
    value: Any = {"SizeExpr": {"op": "size", "args": ["n"]}}
    for _ in range(depth):
        value = {"SizeExpr": {"op": "add", "args": [value, 1]}}
    return value


def second_copy_of_each_tensor(members: Members) -> None:
    members["tensors.json"].update({f"again{i}": list(first_entry(members)) for i in range(1000)})


def rename_everywhere(members: Members, old: str, new: str) -> None:
    text = json.dumps(members["graph.json"]).replace(json.dumps(old), json.dumps(new))
    members["graph.json"] = json.loads(text)


CODE = "x=__import__('os').system('touch HARM')"
HOSTILE: dict[str, Callable[[Members], Any]] = {
    "a file is read": calls("aten.from_file.default", "HARM", True, 100),
    "an operator that writes": calls("aten.add_.Tensor", 1, 1),
    "an operator of another library": calls("mylib.read.default", "HARM"),
    "no operator": calls("aten.add"),
    "not even a name": calls(3),  # type: ignore[arg-type]
    "torch.ops itself": calls("load_library.__call__.default", "HARM"),
    "a storage": calls("aten.set.source_Storage", 1),
    "a method": calls("prims.__class__"),
    "a keyword that is code": calls("aten.ones.default", [2], **{CODE: 1}),
    "too many arguments": calls("aten.neg.default", 1, 2, 3, 4),
    "a value from later": lambda m: node(m).update(args=[{"Ref": {"name": "v99"}}]),
    "an input that is code": lambda m: rename_everywhere(m, input_spec(m)["name"], CODE),
    "a state that is code": lambda m: (
        m["tensors.json"].update({f'a"),{CODE},("': m["tensors.json"].pop(held(m)["key"])}),
        held(m).update(key=f'a"),{CODE},("'),
    ),
    "a state in a class": lambda m: (
        m["tensors.json"].update({"__class__.x": m["tensors.json"].pop(held(m)["key"])}),
        held(m).update(key="__class__.x"),
    ),
    "a parameter that is code": lambda m: rename_everywhere(m, "scale", CODE),
    "a named tuple that is code": sets(
        graph_of, "results", {"Tree": {"kind": "namedtuple", "children": [], "keys": [], "name": CODE, "value": None}}
    ),
    "a structure of no kind": lambda m: graph_of(m)["results"]["Tree"].update(kind="eval"),
    "keys that are lists": lambda m: graph_of(m)["results"]["Tree"].update(keys=[[1], [2], [3]]),
    "an unknown class": sets(graph_of, "results", {"Popen": {"args": "true"}}),
    "an unknown field": lambda m: graph_of(m).update(more=1),
    "no nodes": lambda m: graph_of(m).pop("nodes"),
    "nodes that are text": sets(graph_of, "nodes", "abc"),
    "a function of torch": lambda m: node(m)["args"].append({"torch": "load"}),
    "a lazy module of torch": lambda m: node(m)["args"].append({"torch": "_inductor"}),
    "no dtype": sets(lambda m: input_spec(m)["spec"]["TensorSpec"], "dtype", {"torch": "strided"}),
    "a device of no kind": sets(lambda m: input_spec(m)["spec"]["TensorSpec"], "device", "lazy"),
    "a rank of a thousand": lambda m: input_spec(m)["spec"]["TensorSpec"].update(shape=[1] * 1000, strides=[1] * 1000),
    "a shape that is true": lambda m: input_spec(m)["spec"]["TensorSpec"].update(shape=[True, 3]),
    "a negative shape": lambda m: input_spec(m)["spec"]["TensorSpec"].update(shape=[-1, 3]),
    "a huge shape": lambda m: input_spec(m)["spec"]["TensorSpec"].update(shape=[10**30, 3]),
    "a size that nobody tells": sets(lambda m: input_spec(m)["spec"]["TensorSpec"], "shape", [4, 3]),
    "a step of nothing": sets(size, "step", 0),
    "a bound that is text": sets(size, "low", "2"),
    "an unknown size": lambda m: rename_everywhere(m, "n", "k") or size(m).update(name="j"),
    "an expression of no kind": lambda m: input_spec(m)["spec"]["TensorSpec"].update(
        shape=[{"SizeExpr": {"op": "exec", "args": ["true"]}}, 3]
    ),
    "a deep expression": lambda m: input_spec(m)["spec"]["TensorSpec"].update(shape=[deep(60), 3]),
    "a very deep expression": lambda m: input_spec(m)["spec"]["TensorSpec"].update(shape=[deep(200), 3]),
    "a state of another shape": sets(lambda m: held(m)["spec"]["TensorSpec"], "shape", [9, 9]),
    "a state of another dtype": sets(lambda m: held(m)["spec"]["TensorSpec"], "dtype", {"torch": "int64"}),
    "two of one name": lambda m: graph_of(m)["inputs"].append(graph_of(m)["inputs"][0]),
    "a result from nowhere": lambda m: graph_of(m)["outputs"][0].__setitem__(0, "nowhere"),
    "an update from nowhere": sets(graph_of, "updates", [["nowhere", "nowhere"]]),
    "fewer results than promised": lambda m: graph_of(m)["outputs"].pop(),
    "tensors that are a list": sets(lambda m: m, "tensors.json", [1, 2]),
    "tensors that overlap": second_copy_of_each_tensor,
    "a negative offset": lambda m: first_entry(m).__setitem__(2, -64),
    "an offset behind the end": lambda m: first_entry(m).__setitem__(2, 10**12),
    "an offset that is no number": lambda m: first_entry(m).__setitem__(2, "0"),
    "a float as length": lambda m: first_entry(m).__setitem__(3, 24.0),
    "negative sizes that multiply": lambda m: first_entry(m).__setitem__(1, [-2, -3]),
    "a huge tensor": lambda m: first_entry(m).__setitem__(1, [2**62, 2**62]),
    "a quantised dtype": lambda m: first_entry(m).__setitem__(0, "qint8"),
    "a tensor of strided": lambda m: first_entry(m).__setitem__(0, "strided"),
    "more data than tensors": lambda m: m.update({"tensors.bin": m["tensors.bin"] + bytes(64)}),
    "less data than tensors": lambda m: m.update({"tensors.bin": m["tensors.bin"][:-64]}),
    "bools of other bytes": lambda m: m.update({"tensors.bin": bytes([7]) * len(m["tensors.bin"])}),
    "not a number": lambda m: m.update({"graph.json": b"[NaN]"}),
    "a number of a million digits": lambda m: m.update({"graph.json": b"[" + b"9" * 1_000_000 + b"]"}),
    "nested without end": lambda m: m.update({"graph.json": b"[" * 200_000 + b"]" * 200_000}),
    "nested tags without end": lambda m: m.update({"graph.json": b'{"list":' * 100_000 + b"[]" + b"}" * 100_000}),
    "bytes that are no text": lambda m: m.update({"graph.json": b"\xff\xfe\xfd"}),
    "a manifest that is a list": sets(lambda m: m, "manifest.json", [1]),
    "a member outside of it": lambda m: m.update({"../../HARM": b"x"}),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_what_a_file_may_not_say(name: str, sound: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    members = parts(sound)
    torchlazy.load(put_together(tmp_path / "file.tlz", members))  # as it is, put together anew
    HOSTILE[name](members)
    before = sorted(os.listdir(tmp_path))
    with pytest.raises(ExportedFileError, match=r"file\.tlz"):
        torchlazy.load(put_together(tmp_path / "file.tlz", members))
    assert sorted(os.listdir(tmp_path)) == before


LIBRARY = torch.library.Library("tlzfiles", "DEF")
LIBRARY.define("scaled(Tensor x, float by) -> Tensor")
LIBRARY.impl("scaled", lambda x, by: x * by, "CompositeExplicitAutograd")


def test_an_operator_that_is_asked_for(tmp_path: Path) -> None:
    torch.library.register_fake("tlzfiles::scaled", lambda x, by: torch.empty_like(x), lib=LIBRARY)
    exported = torchlazy.export(lambda x: torch.ops.tlzfiles.scaled(x, 3.0), (torch.ones(2),))
    exported.save(tmp_path / "own.tlz")
    with pytest.raises(ExportedFileError, match=r"operators=\['tlzfiles\.scaled\.default'\]"):
        torchlazy.load(tmp_path / "own.tlz")
    loaded = torchlazy.load(tmp_path / "own.tlz", operators=["tlzfiles.scaled.default"])
    assert loaded(torch.ones(2)).tolist() == [3, 3]
    with pytest.raises(TypeError, match="pass a list of names"):
        torchlazy.load(tmp_path / "own.tlz", operators="tlzfiles.scaled.default")


def test_nothing_is_written_to_even_where_it_is_asked_for(sound: Path, tmp_path: Path) -> None:
    members = parts(sound)
    node(members)["op"] = "aten.add_.Tensor"
    file = put_together(tmp_path / "file.tlz", members)
    with pytest.raises(ExportedFileError, match="writes to its arguments"):
        torchlazy.load(file, operators=["aten.add_.Tensor"])


# ---------------------------------------------------------------- the zip itself


def test_members_that_are_compressed(sound: Path, tmp_path: Path) -> None:
    with pytest.raises(ExportedFileError, match="compressed"):
        torchlazy.load(put_together(tmp_path / "small.tlz", parts(sound), zipfile.ZIP_DEFLATED))


LOADER = """
import resource, sys, torch, torchlazy
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    torchlazy.load(sys.argv[1])
except RuntimeError as error:
    print(type(error).__name__, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="counts memory in KiB")
@pytest.mark.parametrize("name", ["tensors.bin", "graph.json", "manifest.json"])
def test_a_small_file_that_unpacks_to_much(name: str, sound: Path, tmp_path: Path) -> None:
    assert resource.RUSAGE_SELF == 0
    members = parts(sound)
    members[name] = bytes(1 << 30) if name == "tensors.bin" else b"[" + b" " * (1 << 29) + b"]"
    path = put_together(tmp_path / "bomb.tlz", members, zipfile.ZIP_DEFLATED)
    del members
    assert path.stat().st_size < 3 << 20
    done = subprocess.run([sys.executable, "-c", LOADER, str(path)], capture_output=True, text=True, timeout=300)
    word, megabytes = done.stdout.split()
    assert word == "ExportedFileError" and int(megabytes) < 100, done.stdout + done.stderr


def test_a_size_that_is_a_lie(sound: Path, tmp_path: Path) -> None:
    """The directory says four gigabytes of a part that has some hundred bytes."""
    content = bytearray(sound.read_bytes())
    at = content.rfind(b"PK\x01\x02")
    for offset in (20, 24):
        content[at + offset : at + offset + 4] = struct.pack("<I", 0xFFFFFFF0)
    (tmp_path / "file.tlz").write_bytes(content)
    with pytest.raises(ExportedFileError, match="larger than the file"):
        torchlazy.load(tmp_path / "file.tlz")


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_a_member_that_is_there_twice(sound: Path, tmp_path: Path) -> None:
    path = tmp_path / "file.tlz"
    path.write_bytes(sound.read_bytes())
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("graph.json", b"3")
    with pytest.raises(ExportedFileError, match="there twice"):
        torchlazy.load(path)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs pipes")
def test_a_pipe_does_not_wait(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.tlz")
    with pytest.raises(ExportedFileError, match="no regular file"):
        torchlazy.load(tmp_path / "pipe.tlz")


# ---------------------------------------------------------------- at random


def loads_or_is_refused(path: Path) -> bool:
    try:
        torchlazy.load(path)
    except ExportedFileError:
        return False
    return True


def test_bytes_at_random(sound: Path, tmp_path: Path) -> None:
    content, dice = sound.read_bytes(), random.Random(0)
    path, refused = tmp_path / "file.tlz", 0
    for _ in range(1500):
        damaged = bytearray(content)
        for _ in range(dice.choice((1, 1, 2, 8))):
            place = dice.randrange(len(damaged))
            way = dice.randrange(4)
            if way == 0:
                damaged[place] ^= 1 << dice.randrange(8)
            elif way == 1:
                damaged[place] = dice.choice((0, 0x7F, 0x80, 0xFF))
            elif way == 2:
                del damaged[place : place + dice.randrange(1, 200)]
            else:
                damaged[place:place] = damaged[dice.randrange(len(damaged)) :][: dice.randrange(100)]
        path.write_bytes(damaged)
        refused += not loads_or_is_refused(path)
    assert refused > 1000


STRANGE = (
    None, True, -1, 0, 2**63, 10**40, 1.5, "", "x", "../x", "\0", [], [[]], {}, {"torch": "float16"}, {"list": [1]},
    {"float": "nan"}, {"float": "x"}, {"complex": [1]}, {"device": "cuda:5"}, {"Ref": {"name": "v1"}}, {"Ref": {}},
    {"SizeExpr": {"op": "size", "args": ["n"]}}, {"SizeExpr": {"op": "size", "args": [[]]}}, "aten.from_file.default",
    {"Tree": {"kind": "leaf"}}, {"device": "nowhere"}, {"float": []}, {"torch": []},
)  # fmt: skip


def places(value: Any) -> list[tuple[Any, Any]]:
    """Every (container, key) of a JSON value."""
    if isinstance(value, dict):
        keys: Any = list(value)
    elif isinstance(value, list):
        keys = range(len(value))
    else:
        return []
    return [(value, key) for key in keys] + [found for key in keys for found in places(value[key])]


def test_values_at_random(sound: Path, tmp_path: Path) -> None:
    """One value of the graph, of the tensors' table or of the manifest is another one, or gone."""
    whole, dice = parts(sound), random.Random(1)
    path, refused = tmp_path / "file.tlz", 0
    for _ in range(1500):
        members = copy.deepcopy(whole)
        name = dice.choice(("graph.json", "graph.json", "graph.json", "tensors.json", "manifest.json"))
        container, key = dice.choice(places(members[name]))
        if dice.randrange(6) == 0:
            del container[key]
        elif dice.randrange(6) == 0 and isinstance(container, dict):
            container[str(dice.choice(STRANGE))] = container.pop(key)
        else:
            container[key] = copy.deepcopy(dice.choice(STRANGE))
        refused += not loads_or_is_refused(put_together(path, members))
    assert refused > 700
