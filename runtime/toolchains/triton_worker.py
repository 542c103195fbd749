"""A child process that compiles Triton kernels into Triton's own cache, where its parent then finds them.

Invariant: needs the standard library and triton only, so it starts fast. Run as a script it reads jobs from standard
input, each a line of JSON, and answers each with a line that says nothing: what fails here fails again in the parent,
which can say more.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import importlib.util
import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any


def compile_job(job: dict[str, Any], function: Any = None) -> Any:
    """The compiled kernel of one job; `function` is the loaded @triton.jit function where the caller has it."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    function = function or load_function(job["path"], job["entry"])
    attributes = {(position,): [["tt.divisibility", 16]] for position in job["aligned"]}
    source = ASTSource(function, job["signature"], job["constexprs"], attributes)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # which floating-point options Triton's next version will change
        return triton.compile(source, target=GPUTarget(*job["target"]), options=job["options"])


def build_launcher(compiled: Any) -> None:
    """Have Triton compile its C launcher of this kernel into its cache, as some versions do for each kernel when it is
    first launched (3.6: 0.2 s each). Needs no GPU; versions that need one here have nothing to compile."""
    with contextlib.suppress(Exception):
        from triton.backends.nvidia.driver import CudaLauncher

        CudaLauncher(compiled.src, compiled.metadata)


def prepare_cache_keys() -> None:
    """Have Triton hash its own files, which it does once a process before it looks into its cache: 0.4 s for 3.6."""
    with contextlib.suppress(Exception):
        from triton.runtime.cache import triton_key

        triton_key()


def load_function(path: str, entry: str) -> Any:
    """The function `entry` of the module in the file `path`; the module's name is part of Triton's cache key.

    So is a hash of the function and of those that it calls, for which Triton reads their syntax trees each time that a
    process loads the kernel. Here all that it calls is in the same file or is Triton's, which has a hash of its own in
    the key: the file's text stands for it.
    """
    spec = importlib.util.spec_from_file_location(f"torchlazy_triton_{Path(path).stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    function = getattr(module, entry)
    if hasattr(function, "hash"):  # not in Triton's interpreter
        function.hash = hashlib.sha256(f"{entry}\n{Path(path).read_text()}".encode()).hexdigest()
    return function


def _serve() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a compiler prints must not meet the answers
    with contextlib.suppress(Exception):  # while the parent plans yet
        importlib.import_module("triton.backends.compiler")
    prepare_cache_keys()
    for line in sys.stdin:
        with contextlib.suppress(Exception):
            build_launcher(compile_job(json.loads(line)))
        answers.write("done\n")
        answers.flush()


if __name__ == "__main__":
    _serve()
