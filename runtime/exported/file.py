"""Exported programs on disk: a zip of JSON and raw tensor bytes, without pickle.

Members: `manifest.json` (format, version, the SHA-256 of every other member), `graph.json`, `tensors.json` (name ->
dtype, shape, offset, bytes), `tensors.bin`. Reading builds data only: it imports nothing and calls nothing that the
file names, and it trusts no byte whose hash it did not check. The hashes find accidents; what a hostile file may say
is bounded by `check`, and by sizes that are checked before they are used (docs/exported_files.md).
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import stat
import tempfile
import zipfile
from collections.abc import Collection, Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import IO, Any

import torch
from torchlazy.runtime.errors import ExportedFileError
from torchlazy.runtime.exported.check import DTYPES, MOST_DIMENSIONS, check_graph
from torchlazy.runtime.exported.graph import ExportedGraph, InputSpec, Node, Ref, SizeSpec, StateSpec, TensorSpec
from torchlazy.runtime.exported.sizes import SizeExpr
from torchlazy.runtime.exported.tree import Tree

FORMAT = "torchlazy exported program"
VERSION = 1
_ALIGNMENT = 64
_MEMBERS = ("graph.json", "tensors.json", "tensors.bin")
_CLASSES: dict[str, Any] = {
    cls.__name__: cls for cls in (ExportedGraph, InputSpec, Node, Ref, SizeSpec, StateSpec, TensorSpec, SizeExpr, Tree)
}
# The most bytes of each JSON member, and how deep its values may be nested.
_MOST_BYTES = {"manifest.json": 1 << 20, "graph.json": 1 << 28, "tensors.json": 1 << 26}
_MOST_NESTED = 150
_TORCH_CONSTANTS = (torch.dtype, torch.layout, torch.memory_format)
_CONSTANT_OF = {name: value for name, value in vars(torch).items() if isinstance(value, _TORCH_CONSTANTS)}


def write(path: str | os.PathLike[str], graph: ExportedGraph, state: Mapping[str, torch.Tensor]) -> None:
    """Write the file in one piece: it is there whole, or not at all."""
    target = Path(_checked(path))
    if target.is_dir():
        raise IsADirectoryError(f"exported.save: {target} is a folder; give the name of a file in it")
    if not target.parent.is_dir():
        raise FileNotFoundError(f"exported.save: there is no folder {target.parent}; make it first")
    handle, temporary = tempfile.mkstemp(dir=target.parent or ".", prefix=target.name, suffix=".part")
    os.close(handle)
    try:
        with zipfile.ZipFile(temporary, "w", zipfile.ZIP_STORED) as archive:
            hashes = {"graph.json": _put(archive, "graph.json", json.dumps(encode(graph), allow_nan=False).encode())}
            index, hashes["tensors.bin"] = _put_tensors(archive, state)
            hashes["tensors.json"] = _put(archive, "tensors.json", json.dumps(index).encode())
            manifest = {"format": FORMAT, "version": VERSION, "torch": str(torch.__version__), "sha256": hashes}
            _put(archive, "manifest.json", json.dumps(manifest, indent=1).encode())
        os.chmod(temporary, 0o644)
        os.replace(temporary, target)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _checked(path: Any) -> str | os.PathLike[str]:
    if isinstance(path, bytes):
        return os.fsdecode(path)
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(f"an exported program is kept in a file: give its path, not a {type(path).__name__}")
    return path


def read(
    path: str | os.PathLike[str], operators: Collection[str] = ()
) -> tuple[ExportedGraph, dict[str, torch.Tensor]]:
    """The graph and its state, on the CPU. ExportedFileError says what is wrong with a file that is no such thing.

    `operators` are names of operators that the graph may call beside those of `operators`.
    """
    path = _checked(path)
    if not stat.S_ISREG(os.stat(path).st_mode) and not os.path.isdir(path):  # opening a pipe would wait for a writer
        raise ExportedFileError(f"{path} is no exported program: it is no regular file")
    with open(path, "rb") as file:
        try:
            members = _members(path, file)
        except ExportedFileError:
            raise
        # zipfile, zlib and json have many words for bytes that are none of theirs.
        except Exception as error:
            raise ExportedFileError(
                f"{path} is no exported program, or is cut off ({type(error).__name__}: {str(error)[:300]}); save the "
                "program again"
            ) from error
    try:
        graph = decode(_from_json(members.pop("graph.json")))
        if not isinstance(graph, ExportedGraph):
            raise ValueError(f"graph.json holds a {type(graph).__name__}")
        state = _get_tensors(_from_json(members["tensors.json"]), members["tensors.bin"])
        check_graph(graph, state, operators)
        return graph, state
    except Exception as error:
        raise ExportedFileError(
            f"{path}: a graph or tensor in it is malformed ({str(error)[:600]}); save it again"
        ) from error


def _members(path: Any, file: IO[bytes]) -> dict[str, bytes | bytearray]:
    """The members, each checked against its hash; none is read before its size was found to be possible."""
    with zipfile.ZipFile(file) as archive:
        infos = archive.infolist()
        names = [info.filename for info in infos]
        if "manifest.json" not in names:
            raise ExportedFileError(f"{path} is a zip file, but no exported program: it has no manifest.json")
        length = os.fstat(file.fileno()).st_size
        # Members are stored as they are: none can be larger than the file, and none grows while it is read.
        if sum(info.file_size for info in infos) > length or any(i.file_size != i.compress_size for i in infos):
            raise ExportedFileError(f"{path} is no exported program: its parts are compressed, or larger than the file")
        if len(set(names)) < len(names) or any(info.compress_type != zipfile.ZIP_STORED for info in infos):
            raise ExportedFileError(f"{path} is no exported program: a part of it is there twice, or compressed")
        for info in infos:
            if info.file_size > _MOST_BYTES.get(info.filename, length):
                raise ExportedFileError(f"{path} is no exported program: {info.filename} has {info.file_size} bytes")
        manifest = _from_json(archive.read("manifest.json"))
        _check_manifest(path, manifest)
        for name in _MEMBERS:
            if name not in names:
                raise ExportedFileError(f"{path} is incomplete: {name} is missing; save the program again")
        if surplus := sorted(set(names) - {"manifest.json", *_MEMBERS}):
            raise ExportedFileError(f"{path} is no exported program: it holds {surplus[0][:100]!r} too")
        members: dict[str, bytes | bytearray] = {}
        for name in _MEMBERS:
            members[name] = bytearray(archive.read(name)) if name == "tensors.bin" else archive.read(name)
            if hashlib.sha256(members[name]).hexdigest() != manifest["sha256"].get(name):
                raise ExportedFileError(f"{path} is damaged: {name} is not what was saved; save the program again")
        return members


def _from_json(content: bytes | bytearray) -> Any:
    """JSON without the "NaN" and "Infinity" that Python's reader also takes."""

    def refuse(word: str) -> Any:
        raise ValueError(f"{word} is no JSON")

    return json.loads(content, parse_constant=refuse)


def _check_manifest(path: str | os.PathLike[str], manifest: Any) -> None:
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise ExportedFileError(f"{path} is a zip file, but no exported program: its manifest names another format")
    if manifest.get("version") != VERSION:
        raise ExportedFileError(
            f"{path} has version {manifest.get('version')} of the format, this torchlazy reads version {VERSION}; "
            "export the program again with this version"
        )


def _put(archive: zipfile.ZipFile, name: str, content: bytes) -> str:
    archive.writestr(name, content)
    return hashlib.sha256(content).hexdigest()


def _put_tensors(archive: zipfile.ZipFile, state: Mapping[str, torch.Tensor]) -> tuple[dict[str, Any], str]:
    """Row-major bytes of every tensor, one after the other, each at a multiple of 64."""
    index: dict[str, Any] = {}
    digest = hashlib.sha256()
    offset = 0
    with archive.open("tensors.bin", "w", force_zip64=True) as out:
        for name, tensor in state.items():
            content = _bytes(tensor)
            padding = bytes(-len(content) % _ALIGNMENT)
            for piece in (content, padding):
                out.write(piece)
                digest.update(piece)
            index[name] = [_name(tensor.dtype), list(tensor.shape), offset, len(content)]
            offset += len(content) + len(padding)
    return index, digest.hexdigest()


def _bytes(tensor: torch.Tensor) -> Any:
    plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    return plain.reshape(-1).view(torch.uint8).numpy().data if plain.numel() else b""


def _get_tensors(index: Any, content: bytes | bytearray) -> dict[str, torch.Tensor]:
    """The tensors, which lie one after the other: together they take no more memory than the file has bytes."""
    found = {}
    expected = 0
    for name, (dtype_name, shape, offset, length) in index.items():
        dtype: Any = _CONSTANT_OF[dtype_name]
        whole = all(type(number) is int and number >= 0 for number in (*shape, offset, length))
        if dtype not in DTYPES or type(shape) is not list or len(shape) > MOST_DIMENSIONS or not whole:
            raise ValueError(f"tensor {name} has no dtype or no shape")
        count = math.prod(shape)
        if count * dtype.itemsize != length or offset != expected or offset + length > len(content):
            raise ValueError(f"tensor {name} of {shape} does not lie within the data")
        expected += length + -length % _ALIGNMENT
        if count and dtype is torch.bool:  # a byte that is neither 0 nor 1 is no bool: kernels count on it
            flat = torch.frombuffer(content, dtype=torch.uint8, count=count, offset=offset)
            if int(flat.max()) > 1:
                raise ValueError(f"tensor {name} is of other bytes than 0 and 1")
            flat = flat.bool()
        elif count:
            # A copy: memory of its own, so that one tensor does not keep all others alive.
            flat = torch.frombuffer(content, dtype=dtype, count=count, offset=offset).clone()
        else:
            flat = torch.empty(0, dtype=dtype)
        found[name] = flat.reshape(shape)
    if found and expected != len(content):
        raise ValueError("there is more data than tensors")
    return found


# ---- JSON


def encode(value: Any) -> Any:
    """JSON for a value of a graph: lists for tuples, tagged objects for what JSON lacks."""
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"float": repr(value)}
    if isinstance(value, complex):
        return {"complex": [encode(value.real), encode(value.imag)]}
    if isinstance(value, tuple):
        return [encode(item) for item in value]
    if isinstance(value, list):
        return {"list": [encode(item) for item in value]}
    if isinstance(value, _TORCH_CONSTANTS):
        return {"torch": _name(value)}
    if isinstance(value, torch.device):
        return {"device": str(value)}
    if is_dataclass(value) and type(value).__name__ in _CLASSES:
        return {type(value).__name__: {f.name: encode(getattr(value, f.name)) for f in fields(value)}}
    raise ExportedFileError(f"no form in a file for {value!r} of {type(value).__name__}; pass it as a tensor or number")


def decode(value: Any, depth: int = 0) -> Any:
    """The value that `encode` wrote; ValueError, KeyError or TypeError for anything else."""
    if depth > _MOST_NESTED:
        raise ValueError("its values are nested too deeply")
    if isinstance(value, list):
        return tuple(decode(item, depth + 1) for item in value)
    if not isinstance(value, dict):
        return value
    ((tag, content),) = value.items()
    if tag in _CLASSES:
        return _CLASSES[tag](**{name: decode(item, depth + 1) for name, item in content.items()})
    if tag == "torch":
        if content not in _CONSTANT_OF:
            raise ValueError(f"torch.{content} is no dtype, layout or memory format")
        return _CONSTANT_OF[content]
    if tag == "list":
        return [decode(item, depth + 1) for item in content]
    if tag == "float":
        return float(content)
    if tag == "complex":
        real, imaginary = (decode(part, depth + 1) for part in content)
        return complex(real, imaginary)
    if tag == "device":
        return torch.device(content)
    raise ValueError(f"an unknown tag {tag!r}")


def _name(constant: Any) -> str:
    return str(constant).removeprefix("torch.")
