"""Exported programs on disk: a zip of JSON and raw tensor bytes, without pickle.

Members: `manifest.json` (format, version, the SHA-256 of every other member), `graph.json`, `tensors.json` (name ->
dtype, shape, offset, bytes), `tensors.bin`. Reading builds data only: it imports nothing and calls nothing that the
file names, and it trusts no byte whose hash it did not check.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import struct
import tempfile
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import torch
from torchlazy.runtime.errors import RuntimeLayerError
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
# What zipfile, zlib and json say of bytes that are none of theirs (RuntimeError: "encrypted", by a changed flag).
_UNREADABLE = (
    zipfile.BadZipFile, zlib.error, EOFError, KeyError, ValueError, AttributeError, TypeError, NotImplementedError,
    RuntimeError, struct.error,
)  # fmt: skip
_TORCH_CONSTANTS = (torch.dtype, torch.layout, torch.memory_format)


class ExportedFileError(RuntimeLayerError):
    """A file is no exported program that this version can read.

    Cause: another kind of file, a download that broke off, a changed byte, a newer format.
    Fix: save the program again with `exported.save(path)`; where the message names versions, with this torchlazy.
    """


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


def read(path: str | os.PathLike[str]) -> tuple[ExportedGraph, dict[str, torch.Tensor]]:
    """The graph and its state, on the CPU. ExportedFileError says what is wrong with a file that is no such thing."""
    path = _checked(path)
    try:
        with zipfile.ZipFile(path) as archive:
            names = set(archive.namelist())
            if "manifest.json" not in names:
                raise ExportedFileError(f"{path} is a zip file, but no exported program: it has no manifest.json")
            manifest = json.loads(archive.read("manifest.json"))
            _check_manifest(path, manifest)
            members = {}
            for name in _MEMBERS:
                if name not in names:
                    raise ExportedFileError(f"{path} is incomplete: {name} is missing; save the program again")
                members[name] = bytearray(archive.read(name))
                if hashlib.sha256(members[name]).hexdigest() != manifest["sha256"].get(name):
                    raise ExportedFileError(f"{path} is damaged: {name} is not what was saved; save the program again")
    except ExportedFileError:
        raise
    except _UNREADABLE as error:
        raise ExportedFileError(
            f"{path} is no exported program, or is cut off ({type(error).__name__}: {error}); save the program again"
        ) from error
    try:
        graph = decode(json.loads(members["graph.json"]))
        if not isinstance(graph, ExportedGraph):
            raise ValueError(f"graph.json holds a {type(graph).__name__}")
        state = _get_tensors(json.loads(members["tensors.json"]), members["tensors.bin"])
        if missing := [held.key for held in graph.state if held.key not in state]:
            raise ValueError(f"the graph reads {', '.join(missing)}, of which there is no value")
        return graph, state
    except (KeyError, ValueError, TypeError, AttributeError, RuntimeError) as error:
        raise ExportedFileError(f"{path}: a graph or tensor in it is malformed ({error}); save it again") from error


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


def _get_tensors(index: dict[str, Any], content: bytearray) -> dict[str, torch.Tensor]:
    found = {}
    for name, (dtype_name, shape, offset, length) in index.items():
        dtype = decode({"torch": dtype_name})
        count = math.prod(shape)
        if count * dtype.itemsize != length or offset < 0 or offset + length > len(content):
            raise ValueError(f"tensor {name} of {shape} does not lie within the data")
        if count:
            # A copy: memory of its own, so that one tensor does not keep all others alive.
            flat = torch.frombuffer(content, dtype=dtype, count=count, offset=offset).clone()
        else:
            flat = torch.empty(0, dtype=dtype)
        found[name] = flat.reshape(shape)
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


def decode(value: Any) -> Any:
    """The value that `encode` wrote; ValueError, KeyError or TypeError for anything else."""
    if isinstance(value, list):
        return tuple(decode(item) for item in value)
    if not isinstance(value, dict):
        return value
    ((tag, content),) = value.items()
    if tag in _CLASSES:
        return _CLASSES[tag](**{name: decode(item) for name, item in content.items()})
    if tag == "torch":
        constant = getattr(torch, content)
        if not isinstance(constant, _TORCH_CONSTANTS):
            raise ValueError(f"torch.{content} is no dtype, layout or memory format")
        return constant
    if tag == "list":
        return [decode(item) for item in content]
    if tag == "float":
        return float(content)
    if tag == "complex":
        return complex(*(decode(part) for part in content))
    if tag == "device":
        return torch.device(content)
    raise ValueError(f"an unknown tag {tag!r}")


def _name(constant: Any) -> str:
    return str(constant).removeprefix("torch.")
