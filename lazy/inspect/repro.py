"""A repro script: a piece of a trace and its inputs as a program of torch's own operators that runs by itself.

Invariant: the script imports torch and torchlazy and nothing else of ours, builds its inputs from the bytes beside it
(no pickle), runs the operators eagerly and compiled, prints where they differ, and exits with 1 if they do.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torchlazy.lazy.inspect.compare import TOLERANCES, defined_outputs
from torchlazy.lazy.run.text import graph_text
from torchlazy.lazy.trace.to_fx import trace_to_graph
from torchlazy.lazy.trace.trace import CutTrace

_BODY = '''

HERE = pathlib.Path(__file__).resolve()
DATA = HERE.with_suffix(".bin").read_bytes()
# (dtype, shape, strides, first byte, elements of memory, device) of each input
INPUTS = {inputs}
SCALARS = {scalars}
TOLERANCES = {tolerances}  # dtype: (relative, absolute)
COMPARED = {compared}  # positions of the outputs that are defined
OVERWRITTEN = {donations}  # (output, input): the new value of an input


def make_inputs():
    made = []
    for dtype, shape, strides, start, count, device in INPUTS:
        size = count * dtype.itemsize
        flat = torch.empty(0, dtype=dtype)
        if count:
            flat = torch.frombuffer(bytearray(DATA[start : start + size]), dtype=dtype)
        made.append(flat.to(device).as_strided(shape, strides))
    return made


def run():
    inputs = make_inputs()
    results = program(*inputs, *SCALARS)
    for output, given in OVERWRITTEN:
        inputs[given].copy_(results[output].reshape(inputs[given].shape))
    return [inputs[dict(OVERWRITTEN)[i]] if i in dict(OVERWRITTEN) else value for i, value in enumerate(results)]


def report(position, compiled, expected):
    """Print where one output differs; 1 if it does."""
    relative, absolute = TOLERANCES.get(expected.dtype, (0.0, 0.0))
    wide = torch.complex128 if expected.dtype.is_complex else torch.float64
    a, b = compiled.cpu().to(wide), expected.cpu().reshape(compiled.shape).to(wide)
    wrong = ~torch.isclose(a, b, rtol=relative, atol=absolute, equal_nan=True)
    count = int(wrong.sum())
    if not count:
        print(f"output {{position}}: equal within tolerance")
        return 0
    distance = torch.where(wrong, (a - b).abs().nan_to_num(float("inf"), float("inf")), 0.0).reshape(-1)
    worst = int(distance.argmax())
    index = [int(i) for i in torch.unravel_index(torch.tensor(worst), a.shape)]
    values = a.reshape(-1)[worst].item(), b.reshape(-1)[worst].item()
    print(f"output {{position}}: {{count}} of {{a.numel()}} elements differ, most at {{index}}:")
    print(f"    compiled {{values[0]!r}}, operator by operator {{values[1]!r}}")
    return 1


def main():
    torchlazy.config.precision = {precision!r}
    torchlazy.config.recompute = {recompute!r}
    torchlazy.config.tiers, torchlazy.config.store, torchlazy.config.strict = "off", "off", True
    expected = run()
    with torchlazy.lazy_mode():
        compiled = run()
    differing = sum(report(position, compiled[position], expected[position]) for position in COMPARED)
    print(f"torch {{torch.__version__}}, torchlazy {{torchlazy.__version__}}: {{differing}} outputs differ")
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
'''


def write_script(
    path: Path, about: str, trace: CutTrace, values: Sequence[torch.Tensor], scalars: Sequence[Any], settings: Any
) -> Path:
    """Write `path` (a .py file) and the inputs' bytes beside it (.bin); returns `path`.

    `about` is the text at its top; `settings` has `precision` and `recompute`.
    """
    rows, data = [], bytearray()
    for tensor in values:
        flat = _memory_of(tensor)
        device = "cpu" if tensor.device.type == "cpu" else str(tensor.device)
        rows.append((tensor.dtype, tuple(tensor.shape), tensor.stride(), len(data), flat.numel(), device))
        data += flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
        data += bytes(-len(data) % 16)
    # The inputs come with strides of their own: what the graph says of them is not needed.
    lines = graph_text(trace_to_graph(trace), "torchlazy.shadow").splitlines()
    text = "\n".join(["import pathlib", "import sys", *lines[1:]]).replace(
        "import torch\n", "import torch\nimport torchlazy\n", 1
    )
    body = _BODY.format(
        inputs=_listed(rows),
        scalars=list(scalars),
        tolerances=TOLERANCES,
        compared=defined_outputs(trace),
        donations=list(trace.donations),
        precision=settings.precision,
        recompute=settings.recompute,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.with_suffix(".bin").write_bytes(bytes(data))
    quoted = about.replace("\\", "\\\\").replace('"""', "'''")
    path.write_text(f'"""{quoted}"""\n\n{text}{body}', encoding="utf-8")
    return path


def _listed(rows: Sequence[Any]) -> str:
    return "[\n" + "".join(f"    {row!r},\n" for row in rows) + "]" if rows else "[]"


def _memory_of(tensor: torch.Tensor) -> torch.Tensor:
    """The elements of memory that a tensor spans, on the CPU, as one dimension."""
    if tensor.numel() == 0:
        return torch.empty(0, dtype=tensor.dtype)
    span = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.detach().as_strided((span,), (1,), tensor.storage_offset()).cpu().contiguous()
