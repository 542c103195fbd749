"""The compiled kernels and programs on disk: `python -m torchlazy.cache prepare|stats|clear|verify [--folder F]`.

Invariant: the folder is the one that the package itself would use (TORCHLAZY_CACHE_DIR, else ~/.cache/torchlazy), and
only files named as the package names them are counted, checked or deleted.
"""

from __future__ import annotations

import argparse
import os
import stat
import sys
import time
from collections import Counter
from pathlib import Path

from torchlazy.runtime import cache_folder
from torchlazy.runtime.native import identity_check, launch, recorder_library
from torchlazy.runtime.program import store as program_store
from torchlazy.runtime.toolchains import kernel_cache

_COMMANDS = {
    "prepare": "compile the native code now, once for each version of torch (a minute), not at first use",
    "stats": "files and bytes of each kind, and the limit",
    "clear": "delete everything",
    "verify": "check every program and kernel against its hash, delete what is damaged",
}


def main(arguments: list[str] | None = None) -> int:
    """0; 1 if `verify` found damage or `clear` left files; 2 for a folder or setting that cannot be used."""
    parser = argparse.ArgumentParser(prog="python -m torchlazy.cache", description="torchlazy's cache on disk.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="{" + ",".join(_COMMANDS) + "}")
    for name, text in _COMMANDS.items():
        command = commands.add_parser(name, help=text, description=text)
        command.add_argument("--folder", type=Path, help="default: TORCHLAZY_CACHE_DIR, else ~/.cache/torchlazy")
    options = parser.parse_args(arguments)
    folder = options.folder or kernel_cache.default_folder()
    try:
        limit = cache_folder.size_limit()
        complaint = find_complaint(folder)
        if complaint:
            raise ValueError(complaint)
        if options.command == "prepare":
            return prepare(folder)
        if options.command == "stats":
            return print_stats(folder, limit)
        if options.command == "clear":
            return clear(folder)
        return verify(folder)
    except (OSError, ValueError) as error:
        print(f"torchlazy.cache {options.command}: {error}", file=sys.stderr)
        return 2


def find_complaint(folder: Path) -> str:
    """Why this folder is not touched; empty if it may be. A folder that is not there is an empty cache."""
    try:
        status = folder.stat()
    except FileNotFoundError:
        return ""
    if not stat.S_ISDIR(status.st_mode):
        return f"{folder} is no folder; name the cache with --folder or TORCHLAZY_CACHE_DIR"
    if hasattr(os, "getuid") and status.st_uid != os.getuid():
        return f"{folder} belongs to user {status.st_uid}, this process runs as user {os.getuid()}; it is left alone"
    return ""


def prepare(folder: Path) -> int:
    """0; 1 where something cannot be compiled: what it would do is done in Python then."""
    os.environ["TORCHLAZY_CACHE_DIR"] = str(folder)
    failed = 0
    for code in (recorder_library.LIBRARY, identity_check.CODE, launch.CODE):
        was_kept, begun = code.is_kept(), time.perf_counter()
        if code.wait() is not None:
            seconds = time.perf_counter() - begun
            print(f"{code.name}: " + ("kept already" if was_kept else f"compiled in {seconds:.1f} s"))
            continue
        failed = 1
        print(f"{code.name}: {code.reason}", file=sys.stderr)
    return failed


def print_stats(folder: Path, limit: int) -> int:
    """Counts and bytes of each kind."""
    files = cache_folder.list_files(folder)
    counts, sizes = Counter(file.kind for file in files), Counter[str]()
    for file in files:
        sizes[file.kind] += file.size
    total = sum(sizes.values())
    print(f"folder   {folder}{_note(folder)}")
    for kind in cache_folder.KINDS:
        print(f"{kind:8} {counts[kind]:6} files  {_mebibytes(sizes[kind])}")
    print(f"{'total':8} {len(files):6} files  {_mebibytes(total)} of {_mebibytes(limit).strip()}, {total / limit:.1%}")
    return 0


def _note(folder: Path) -> str:
    """What is to be said of the folder itself."""
    if not folder.exists():
        return " (not there yet)"
    complaint = kernel_cache.complaint_about(folder)
    return f" (not used: {complaint})" if complaint else ""


def clear(folder: Path) -> int:
    """Delete all files of the cache."""
    gone, errors = cache_folder.clear(folder)
    size = _mebibytes(sum(file.size for file in gone)).strip()
    print(f"deleted {len(gone)} files, {size}, from {folder}{_note(folder)}")
    for error in errors:
        print(f"not deleted: {error}", file=sys.stderr)
    return 1 if errors else 0


def verify(folder: Path) -> int:
    """Delete what is damaged, libraries first: an index entry whose library goes is damaged too."""
    checked, damaged, left = 0, 0, 0
    files = cache_folder.list_files(folder)
    for kind, find in (
        ("binaries", cache_folder.find_damage),
        ("index", cache_folder.find_damage),
        ("programs", program_store.find_damage),
    ):
        for file in sorted((file for file in files if file.kind == kind), key=lambda file: file.path):
            try:
                damage = find(file)
            except FileNotFoundError:  # evicted by another process
                continue
            except OSError as error:
                damage = f"unreadable ({error})"
            checked += 1
            if not damage:
                continue
            _, errors = cache_folder.delete([file])
            damaged, left = damaged + 1, left + len(errors)
            where = file.path.relative_to(folder)
            print(f"not deleted: {errors[0]}: {damage}" if errors else f"deleted {where}: {damage}")
    print(
        f"{checked} files checked, {damaged} damaged and {'deleted' if not left else f'{left} of them not deleted'}; "
        "they are compiled again when they are needed" + _note(folder)
    )
    return 1 if damaged else 0


def _mebibytes(size: int) -> str:
    return f"{size / (1 << 20):10.2f} MiB"


if __name__ == "__main__":
    sys.exit(main())
