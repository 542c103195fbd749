"""Generated Triton kernels against eager on a GPU: time, GB/s, ratio to eager.

    python benchmarks/triton_kernels.py [--tune] [part of a name]...

GB/s counts each input and output once. `--tune` also tries other block sizes for each kernel and prints the best: the
evidence for `inductor/codegen/triton_choices.py`. Each row is also checked against eager. Timed with
`triton.testing.do_bench` (median, L2 flushed before each run).
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from torchlazy.inductor.codegen.triton import emit
from torchlazy.inductor.codegen.triton_choices import Blocks
from torchlazy.inductor.ir import Kernel
from torchlazy.runtime.cuda.foreach_tables import foreach_block_table, scalar_bits

from tests.inductor.codegen.triton_case_list import adam_kernel, layer_norm_kernel, softmax_kernel
from tests.inductor.codegen.triton_cases import KernelBuilder, buffer, load_function

bf16, f32 = torch.bfloat16, torch.float32
HBM_GBPS = 4100  # what a copy reaches on an H200


@dataclass
class Job:
    """One kernel at one size: its tensors on the GPU, and eager on the same ones."""

    name: str
    kernel: Kernel
    tensors: dict[str, torch.Tensor]
    eager: Callable[[], Any]
    check: str  # the buffer to compare with eager's result
    tune: tuple[Blocks, ...] = ()

    def bytes(self) -> int:
        buffers = (*self.kernel.reads, *self.kernel.writes)
        return sum(self.tensors[b.name].numel() * self.tensors[b.name].element_size() for b in buffers)


def pointwise_blocks() -> tuple[Blocks, ...]:
    """Other ways to cut a flat axis."""
    return tuple(
        Blocks(x, 0, w, False, "tune") for x in (256, 512, 1024, 2048, 4096) for w in (2, 4, 8) if x // w >= 128
    )


def row_blocks(r: int) -> tuple[Blocks, ...]:
    """Whole rows and loops along them."""
    whole = 1 << (r - 1).bit_length()
    found = [
        Blocks(1, s, w, False, "tune") for s in (1024, 2048, 4096, 8192) for w in (4, 8, 16) if 4 <= s // (32 * w) <= 32
    ]
    for x in (1, 2, 4, 8):
        found += [Blocks(x, whole, w, True, "tune") for w in (1, 2, 4, 8, 16) if 2 <= x * whole // (32 * w) <= 64]
    return tuple(found)


def column_blocks() -> tuple[Blocks, ...]:
    """Tiles of columns."""
    return tuple(Blocks(x, s, w, False, "tune") for x in (16, 32, 64, 128) for s in (16, 32, 64, 128, 256)
                 for w in (4, 8) if 4 <= x * s // (32 * w) <= 32)  # fmt: skip


def softmax_job(n: int, m: int, dtype: torch.dtype) -> Job:
    """Softmax of rows."""
    x = torch.randn(n, m, device="cuda").to(dtype)
    kernel = softmax_kernel(n, m, dtype)
    name = f"softmax {n}x{m} {str(dtype).removeprefix('torch.')}"
    return Job(name, kernel, {"a": x, "out": torch.empty_like(x)}, lambda: x.softmax(1), "out", row_blocks(m))


def layer_norm_job(n: int, m: int, dtype: torch.dtype) -> Job:
    """Layer norm of rows, float32 weights."""
    x, w, b = torch.randn(n, m, device="cuda").to(dtype), torch.randn(m, device="cuda"), torch.randn(m, device="cuda")
    kernel = layer_norm_kernel(n, m, dtype)
    tensors = {"a": x, "w": w, "b": b, "out": torch.empty_like(x), "rstd": torch.empty(n, device="cuda")}
    low_w, low_b = w.to(dtype), b.to(dtype)
    eager = lambda: torch.nn.functional.layer_norm(x, (m,), low_w, low_b)  # noqa: E731
    name = f"layer_norm {n}x{m} {str(dtype).removeprefix('torch.')}"
    return Job(name, kernel, tensors, eager, "out", row_blocks(m))


def gelu_job(n: int, m: int) -> Job:
    """(gelu(x + bias) * 0.5 + residual), half precision, one pass."""
    k = KernelBuilder((n, m))
    x, bias, rest = k.read("x", (n, m), bf16), k.read("bias", (m,), bf16), k.read("rest", (n, m), bf16)
    k.sweep(False)

    def body(ops: Any, i: Any) -> Any:
        value = ops.add(ops.load("x", x.element(i)), ops.load("bias", bias.element(i[1:])))
        cdf = ops.add(ops.erf(ops.mul(value, ops.constant(0.7071067811865476, f32))), ops.constant(1.0, f32))
        gelu = ops.mul(ops.mul(value, ops.constant(0.5, f32)), cdf)
        return ops.add(ops.mul(gelu, ops.constant(0.5, f32)), ops.load("rest", rest.element(i)))

    k.point(buffer("out", (n, m), bf16), body)
    tensors = {name: torch.randn(shape, device="cuda").to(bf16)
               for name, shape in (("x", (n, m)), ("bias", (m,)), ("rest", (n, m)))}  # fmt: skip
    eager = lambda: torch.nn.functional.gelu(tensors["x"] + tensors["bias"]) * 0.5 + tensors["rest"]  # noqa: E731
    tensors["out"] = torch.empty_like(tensors["x"])
    return Job(f"bias+gelu+residual {n}x{m} bfloat16", k.build(), tensors, eager, "out", pointwise_blocks())


def column_sum_job(n: int, m: int, dtype: torch.dtype) -> Job:
    """Sum over the outer axis; the parallel one is contiguous."""
    k = KernelBuilder((m,), (n,))
    a = k.read("a", (n, m), dtype)
    k.sweep(True)
    k.reduce([buffer("out", (m,))], "sum", lambda ops, i, r: ops.load("a", a.element((r[0], i[0]))))
    x = torch.randn(n, m, device="cuda").to(dtype)
    tensors = {"a": x, "out": torch.empty(m, device="cuda")}
    eager = lambda: x.sum(0, dtype=f32)  # noqa: E731
    name = f"column_sum {n}x{m} {str(dtype).removeprefix('torch.')}"
    return Job(name, k.build(), tensors, eager, "out", column_blocks())


def row_sum_job(n: int, m: int, dtype: torch.dtype) -> Job:
    """Sum over the inner axis."""
    k = KernelBuilder((n,), (m,))
    a = k.read("a", (n, m), dtype)
    k.sweep(True)
    k.reduce([buffer("out", (n,))], "sum", lambda ops, i, r: ops.load("a", a.element((*i, *r))))
    x = torch.randn(n, m, device="cuda").to(dtype)
    tensors = {"a": x, "out": torch.empty(n, device="cuda")}
    name = f"row_sum {n}x{m} {str(dtype).removeprefix('torch.')}"
    return Job(name, k.build(), tensors, lambda: x.sum(1, dtype=f32), "out", row_blocks(m))


JOBS: dict[str, Callable[[], Job]] = {
    "softmax": partial(softmax_job, 16 * 12 * 512, 512, bf16),
    "softmax 1000": partial(softmax_job, 8192, 1000, f32),
    "softmax 4096": partial(softmax_job, 8192, 4096, bf16),
    "softmax vocabulary": partial(softmax_job, 4096, 50264, bf16),
    "softmax odd vocabulary": partial(softmax_job, 4096, 30522, f32),
    "layer_norm 768": partial(layer_norm_job, 8192, 768, bf16),
    "layer_norm 1024": partial(layer_norm_job, 4096, 1024, f32),
    "layer_norm 4096": partial(layer_norm_job, 8192, 4096, bf16),
    "layer_norm 96": partial(layer_norm_job, 64 * 56 * 56, 96, bf16),
    "gelu": partial(gelu_job, 8192, 3072),
    "column_sum 768": partial(column_sum_job, 8192, 768, bf16),
    "column_sum 3072": partial(column_sum_job, 8192, 3072, bf16),
    "column_sum 50264": partial(column_sum_job, 4096, 50264, bf16),
    "column_sum split": partial(column_sum_job, 128, 64 * 768, f32),
    "row_sum": partial(row_sum_job, 8192, 3072, bf16),
    "row_sum long": partial(row_sum_job, 256, 1 << 20, f32),
}


def launcher(job: Job, blocks: Blocks | None, folder: Path) -> tuple[Callable[[], Any], str]:
    """A call that runs the kernel, and its options as text."""
    emitted = emit(job.kernel, blocks=blocks)
    function = load_function(emitted.source, folder)
    options = dict(emitted.source.options)
    grid = (-(-emitted.sizes[0] // options["XBLOCK"]),)
    arguments = [*(job.tensors[name] for name in emitted.buffers), *emitted.sizes]
    kind = "" if "RBLOCK" not in options else " loop" if "for roffset" in emitted.source.text else " rows"
    text = f"{options['XBLOCK']}x{options.get('RBLOCK', 1)} w{options['num_warps']}{kind}"
    return lambda: function[grid](*arguments, **options), text


def measure(run: Callable[[], Any]) -> float:
    """Median milliseconds."""
    import triton

    return triton.testing.do_bench(run, warmup=10, rep=60, return_mode="median")


def report(name: str, size: int, ours: float, eager: float, note: str) -> None:
    """One line of the table."""
    rate = size / ours / 1e6
    numbers = f"{ours * 1e3:9.1f} {rate:7.0f} {rate / HBM_GBPS:5.0%} {eager * 1e3:9.1f} {eager / ours:6.2f}x"
    print(f"{name:38} {numbers}  {note}", flush=True)


def run_job(job: Job, tune: bool, folder: Path) -> None:
    """Check, time and print one kernel."""
    run, options = launcher(job, None, folder)
    run()
    torch.testing.assert_close(job.tensors[job.check].float(), job.eager().float(), rtol=2e-2, atol=2e-2)
    ours, eager = measure(run), measure(job.eager)
    report(job.name, job.bytes(), ours, eager, options)
    if not tune:
        return
    timed = []
    for blocks in job.tune:
        try:
            run, options = launcher(job, blocks, folder)
            timed.append((measure(run), options))
        except Exception as error:
            print(f"    {blocks}: {type(error).__name__}: {error}")
    for time, options in sorted(timed)[:4]:
        print(f"    {time * 1e3:9.1f} {ours / time:5.2f}x  {options}")


def parameter_shapes() -> Iterator[tuple[int, ...]]:
    """The parameters of gpt2 (124 M)."""
    yield from ((50257, 768), (1024, 768))
    for _ in range(12):
        yield from ((768,), (768,), (768, 2304), (2304,), (768, 768), (768,), (768,), (768,), (768, 3072), (3072,),
                    (3072, 768), (768,))  # fmt: skip
    yield from ((768,), (768,))


def run_adam(tune: bool, folder: Path) -> None:
    """One foreach launch over all parameters of gpt2 against torch's foreach and fused AdamW."""
    shapes = list(parameter_shapes())
    rows = []
    for shape in shapes:
        p, m, v = torch.randn(shape, device="cuda"), torch.zeros(shape, device="cuda"), torch.ones(shape, device="cuda")
        g = torch.randn(shape, device="cuda").to(bf16)
        rows.append({"g": g, "p": p, "m": m, "v": v, "p1": p, "m1": m, "v1": v})
    sizes = [row["p"].numel() for row in rows]
    eager = {}
    for flag in ("foreach", "fused"):
        parameters = [torch.nn.Parameter(row["p"].clone()) for row in rows]
        for parameter in parameters:
            parameter.grad = torch.randn_like(parameter)
        optimizer = torch.optim.AdamW(parameters, lr=1e-3, foreach=flag == "foreach", fused=flag == "fused")
        optimizer.step()
        eager[flag] = measure(optimizer.step)
    shapes_of_blocks = [Blocks(x, 0, w, False, "tune") for x in (512, 1024, 2048, 4096) for w in (4, 8)] if tune else []
    kernel = adam_kernel(4096).build()
    for blocks in (None, *shapes_of_blocks):
        emitted = emit(kernel, foreach=True, row_scalars=frozenset({"correction"}), blocks=blocks)
        options = dict(emitted.source.options)
        table = torch.tensor([[*(row[n].data_ptr() for n in emitted.buffers), size, scalar_bits(1.0, float)]
                              for row, size in zip(rows, sizes, strict=True)], device="cuda")  # fmt: skip
        block_table = foreach_block_table(sizes, options["XBLOCK"]).cuda()
        function = load_function(emitted.source, folder)
        ours = measure(partial(function[(len(block_table),)], table, block_table, 1e-3, **options))
        note = f"{options['XBLOCK']} w{options['num_warps']}; fused {eager['fused'] * 1e3:.1f}"
        report(f"adam foreach, {sum(sizes) / 1e6:.0f} M parameters", 26 * sum(sizes), ours, eager["foreach"], note)


def main() -> None:
    """Print the table."""
    if not torch.cuda.is_available():
        raise SystemExit(
            "benchmarks/triton_kernels.py needs a CUDA GPU and this process sees none: run it on a GPU machine"
        )
    arguments = sys.argv[1:]
    tune = "--tune" in arguments
    wanted = [argument for argument in arguments if not argument.startswith("--")]
    print(torch.cuda.get_device_name(), "torch", torch.__version__)
    print(f"{'kernel':38} {'us':>9} {'GB/s':>7} {'peak':>5} {'eager us':>9} {'ratio':>7}  blocks")
    with tempfile.TemporaryDirectory() as name:
        for title, make in JOBS.items():
            if not wanted or any(part in title for part in wanted):
                run_job(make(), tune, Path(name))
                torch.cuda.empty_cache()
        if not wanted or any(part in "adam" for part in wanted):
            run_adam(tune, Path(name))


if __name__ == "__main__":
    main()
