"""Programs drawn at random, as lines of source: tensors of many types and forms, views, writes, gradients, state.

Invariant: a seed is always the same program. While lines are drawn they run eagerly, so that most of them do; one in
ten of those that raise stays. A line is one of `LINES` with its `$names` filled in.
"""

from __future__ import annotations

import copy
import pickle
import random
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

F32, F64, HALF, BRAIN, LONG, INT, BOOL, BYTE, C64 = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.bool, torch.uint8,
    torch.complex64,
)  # fmt: skip
DTYPES = [*[F32] * 8, F64, F64, HALF, BRAIN, LONG, LONG, INT, BOOL, BYTE, C64, torch.int8, torch.int16]
SHAPES: list[Any] = [
    *[("n", "m")] * 8, *[("n",)] * 3, *[("m",)] * 3, *[()] * 2, *[("n", 1)] * 2, *[(1, "m")] * 2, *[("n", "m", 2)] * 3,
    *[(2, 3, "n", "m")] * 2, *[("n", "n")] * 2, *[(3,)] * 2, *[("m", "n")] * 2, (1,), ("n", 2), (0,), ("n", 0),
]  # fmt: skip
LAYOUTS = ["", "", "", "turned", "expanded", "every other", "of the last", "channels last"]

_UNARY = {
    "float": "sin cos tanh exp sigmoid relu abs neg sqrt log log1p floor ceil round trunc sign reciprocal square erf "
    "isnan clone detach positive logit atan nan_to_num contiguous exp2 isfinite",
    "int": "abs neg sign sin sqrt float double bool clone detach square half reciprocal exp contiguous",
    "complex": "sin abs neg angle exp clone real imag square reciprocal isnan",
    "bool": "logical_not bitwise_not float int clone sum any all detach",
}
_BINARY = (
    "add sub mul div floor_divide remainder fmod maximum minimum pow atan2 eq lt ge logical_and bitwise_and "
    "bitwise_xor copysign hypot xlogy logaddexp "
)
_WRITES = (
    "sin_() tanh_() exp_() sigmoid_() relu_() abs_() neg_() zero_() square_() clamp_(-1,1) sqrt_() fill_(2) "
    "trunc_() erf_() reciprocal_() add_($n) mul_($y) sub_($y) div_($n) pow_(2) copy_($o) fill_($n) clamp_min_($n) "
    "masked_fill_($x>0,$n) addcmul_($x,$y,value=$n) lerp_($x,0.5) eq_($y) logical_and_($y) remainder_($n) "
    "detach().zero_() data.mul_(2) data.zero_() squeeze_() unsqueeze_(0) resize_(0) detach_() "
    "resize_as_($o).fill_(1) "
)
_NUMBERS = "k0 k1 k2 k0*2 k1+1 2 0.5 -1 True 1.5 3 (1+2j) S.k S.k*k0 float(k1) 0 -0.5 $x.shape[0] $x.dim() float('inf')"
_INDICES = (
    "... None $x>0 : ::2 -1 k1%2 [0,-1] $at $at :,$at None,:,[0,-1] $x.argmax(0)%$x.shape[0] 0,1: $at,[0,1,0][:1]"
)

LINES: dict[str, str] = {
    "view": """
        $x.detach() | $x.unsqueeze($e) | $x.reshape(-1) | $x.flatten() | $x.squeeze() | $x.data | $x.view_as($x)
        $x[None] | $x[...] | torch.atleast_2d($x) | $x.select($d, $i) | $x.narrow($d, 0, $p) | $x.transpose($d, $d)
        $x.permute($perm) | $x.expand(2, *[-1] * $x.dim()) | $x[$i] | $x[::2] | $x[$e:] | $x[..., -1] | $x[..., ::$p]
        $x.unbind($d)[-1] | $x.split($p, $d)[-1] | $x.chunk(2, $d)[0] | $x.unfold($d, $p, 1) | $x.flip($d)
        $x.roll(1, $d) | $x.view(-1) | $x.movedim(0, -1) | $x.tile(2) | $x.repeat_interleave(2, $d) | $x[1:-1]
        $x[-2:] | $x.view($x.shape[0], -1) | $x.unflatten($d, (1, -1)) | $x.tensor_split(2, $d)[1]
        torch.broadcast_to($x, (2, *$x.shape)) | $x[:, None] | $x.as_strided(($p,), ($p,))
        torch.as_strided($x, (1, 2), (1, $e), $e) | $x.diagonal() | $x.mT | $x.tril() | $x.t() | $x.flatten(0, 1)
        $x[:, 1:] | $x.contiguous(memory_format=torch.channels_last) | torch.view_as_real($x)
        torch.view_as_complex($x) | $x.view(torch.int32) * 0 | $x.conj() * 1
    """,
    "set": """
        $x.$write | $x.$write | $x.$write | $x.$write | $x.$write | $x.$write | $x[$ix] = $n | $x[$ix] = $o
        $x[$ix] += $n | $x[$ix] *= 2 | $x += $y | $x *= $n | $x -= $n | with torch.no_grad(): $x.add_($n)
        $x.index_add_($d, $at, $x.detach().index_select($d, $at) * 0.5) | $x.index_fill_($d, $at, k0)
        $x.scatter_add_($d, $where, $x.detach().clone()) | $x.masked_fill_($x > 0, k0)
        $x.scatter_($d, torch.zeros_like($x, dtype=torch.long), k0) | $x.index_put_(($at,), $o, accumulate=True)
        $x.scatter_reduce_($d, $where, $x.detach().clone(), 'amax') | $x.fill_diagonal_(k0)
        $x.data = $x.detach() * 2 | $x.put_(torch.tensor([0], device=dev), $x.detach().reshape(-1)[:1].clone())
        del $x | $x.data = $o.data
    """,
    "new": """
        torch.zeros($e, $p, device=dev, dtype=$t) | torch.ones_like($x) | torch.full(($p,), $n, device=dev)
        torch.arange($e, device=dev) | torch.arange(k1, k1 + 4, device=dev) | torch.tensor($n, device=dev)
        torch.tensor([1.5, k0], device=dev) | $x.new_zeros(3) | torch.zeros_like($x, dtype=$t)
        torch.full_like($x, k1) | torch.linspace(0, k0, 4, device=dev) | torch.zeros($x.shape, device=dev).t()
        $x.new_full($x.shape, k0) | torch.tensor(k0) | torch.empty_like($x).fill_(k0)
        torch.as_tensor([k0, k1], device=dev) | $x.to($t) | $x.to($o)
        torch.zeros(2, 3, 2, 2, device=dev).to(memory_format=torch.channels_last) | $x.float() | $x.long() | $x.bool()
        $x.to(torch.float32, copy=True) | $x.half() | $x.bfloat16()
    """,
    "take": """
        $x[$ix] | $x.index_select($d, $at) | torch.gather($x, $d, $where) | $x.masked_select($x > 0) | $x.nonzero()
        torch.take_along_dim($x, $x.argsort($d, stable=True), $d) | torch.where($x)[0] | torch.where($x > 0, $x, $y)
        torch.select_scatter($x.contiguous() * 2, $x.detach().select($d, 0), $d, 0) | torch.diag_embed($x)
        torch.slice_scatter($x * 2, $x.detach().narrow($d, 0, 1), $d, 0, 1) | torch.isin($x, $o) | torch.unique($x)
        torch.diagonal_scatter($x * 1, $x.detach().diagonal() * 2) | torch.bucketize($x, torch.arange(3., device=dev))
        $x.index_add($d, $at, $x.detach().index_select($d, $at)) | $x.scatter($d, $where, k0) | $x.lerp($y, 0.5)
    """,
    "reduce": """
        $x.sum() | $x.mean() | $x.amax() | $x.sum($d) | $x.mean($d, keepdim=True) | $x.prod($d) | $x.amin($d)
        $x.argmax($d) | torch.var($x, $d, correction=k1) | torch.std($x, $d) | $x.any($d) | $x.all()
        torch.logsumexp($x, $d) | torch.linalg.vector_norm($x, k0, $d) | torch.max($x, $d)[0]
        torch.median($x, $d)[0] | $x.cumsum($d) | torch.cumprod($x, $d) | torch.cummax($x, $d)[0]
        torch.sort($x, dim=$d, stable=True)[1] | torch.topk($x, 1, $d)[0] | torch.aminmax($x, dim=$d).max
        torch.diff($x, dim=$d) | torch.softmax($x, $d) | torch.unique_consecutive($x) | $x.sum(dtype=torch.float64)
        $x.count_nonzero($d) | torch.logcumsumexp($x, $d) | torch.msort($x)
    """,
    "nn": """
        F.softmax($f, $d) | F.layer_norm($f, $f.shape[-1:]) | F.gelu($f) | F.leaky_relu($f, k0)
        F.pad($f, (1, 1), value=k0) | F.normalize($f, dim=-1) | F.mse_loss($f, $f.detach() * 0.5)
        F.max_pool2d($f, 2, 1) | F.avg_pool2d($f, 2) | F.scaled_dot_product_attention($f, $f, $f)
        F.interpolate($f, scale_factor=2, mode='bilinear') | F.silu($f)
        F.conv2d($f, torch.ones(2, $f.shape[1], 1, 1, device=dev, dtype=$f.dtype) * k0) | F.embedding($x, S.a)
        F.batch_norm($f, None, None, training=True) | F.one_hot($x.abs().long()) | F.cross_entropy($f, $f.argmax(1))
        $f @ $w | $f @ $f.mT | torch.einsum('...i,...i->...', $f, $f) | F.linear($f, $f) | torch.outer($f, $f)
        torch.addmm($o, $f, $w, beta=k0) | torch.bmm($f, $f.mT) | torch.fft.rfft($f).abs() | S.m($f)
        torch.kron($f, $f) | torch.cat([$x, $z], $d) | torch.stack([$x, $z], $d)
        torch.meshgrid($x, $z, indexing='ij')[0] | torch.hstack([$x, $z]) | torch._foreach_mul([$x, $z], k0)[1]
        torch.cdist($f, $f) | torch.cat([$x, torch.zeros(0, device=dev)])
    """,
    "out": """
        torch.add($x, $y, out=$o) | torch.mul($x, $n, out=$o) | torch.sin($x, out=$o) | torch.cat([$x, $x], out=$o)
        torch.clamp($x, -1, 1, out=$o) | torch.arange(4, out=$o) | torch.cumsum($x, $d, out=$o)
        torch.where($x > 0, $x, $x, out=$o)
    """,
    "grad": """
        $x.requires_grad_() | $x.requires_grad_() | $g.sum().backward(retain_graph=True) | ($g * $g).sum().backward()
        $v = torch.autograd.grad($g.sum(), $leaf, retain_graph=True, create_graph=True, allow_unused=True)[0]
        $v = torch.autograd.grad(($g ** 2).sum(), $leaf, retain_graph=True)[0] | $v = Scaled.apply($g, k0)
        $v = Doubled.apply($g) | $g.register_hook(lambda g: g * 2) | $g.retain_grad() | $leaf.grad = None
        $v = $leaf.grad | $leaf.grad.zero_() | $leaf.requires_grad_(False) | with torch.no_grad(): $v = $g * 2
        $v = $g.detach().requires_grad_() | $v = checkpoint(lambda t: (t * k0).sin(), $g, use_reentrant=False)
        with torch.no_grad(): $leaf.sub_($leaf.grad * 0.1) | torch.autograd.backward([$g.sum(), ($g * k0).sum()])
        $v = nn.Parameter($x.detach()) | with torch.set_grad_enabled(k1 > 2): $v = $g + 1
        $leaf.register_post_accumulate_grad_hook(lambda p: p.grad.mul_(0.5))
        $v = torch.func.grad(lambda t: (t * k0).sin().sum())($x) | $v = torch.func.vmap(lambda t: t * 2 + t.sum())($x)
        $v = torch.func.jvp(lambda t: t.sin(), ($x,), ($x,))[1] | $leaf.grad = torch.ones_like($leaf)
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t * 1, lambda t: t): $v = $g.sin()
    """,
    "python": """
        $v = sum($x * i for i in range(int(k1) % 3 + 1)) | for i in range($x.shape[0]): $x[i].add_(i)
        $v = copy.deepcopy($x) | $v = torch.stack([row * k0 for row in $x]) | $v = [$x * 2, $o][k1 % 2] | $v, *_ = $x
        $x, $o = $o, $x | $v = $x * 2 if $x.sum() > 0 else $x - 1 | $v = $x * int(($x > 0).sum())
        $v = $x[: int(($x > 0).sum())] | with torch.autocast(dev, dtype=torch.bfloat16): $v = $x @ $x.mT
        $v = pickle.loads(pickle.dumps($x)).contiguous() | while $x.abs().max() > 3: $x.mul_(0.5)
        assert $x.sum() > 0 | $v = torch.tensor($x.tolist(), device=dev) | $v = $x.cpu().contiguous().mul(2).to(dev)
        tell(bool(($x > 0).any())) | tell(($x > 0).tolist()) | tell(len($x)) | tell(torch.equal($x, $o))
        tell(int($x.argmax())) | tell(($x + $y).dtype) | tell($x.stride()) | tell($x._is_view())
        tell($x.requires_grad) | tell($x.is_leaf) | tell(torch.result_type($x, $n)) | tell($x._base is $o)
        tell($x.is_set_to($o))
    """,
    "state": """
        S.a = $x.detach() | $v = S.a * 2 | S.a.add_(1) | S.b.mul_(k0) | $v = S.b[:2] | $v = S.l[-1] + 1 | S.n += 1
        $v = $x * S.n | S.l.append($x.detach()); S.l[:] = S.l[-2:] | S.b.copy_($x) | $v = S.p * $x
        (S.p * k0).sum().backward() | $v = S.m($x) | S.m(S.a).sum().backward(); S.o.step(); S.o.zero_grad()
        S.d['x'] = $x.detach() * 2 | $v = S.d.get('x', $x) | S.k = k0 * 2 | (S.p * S.p).sum().backward(); S.o.step()
        S.b[0] = k0 | S.a, S.b = S.b, S.a | with torch.no_grad(): S.p.add_(k0) | $v = S.p.grad | S.b = S.b.clone()
        S.a.data = S.a * 2 | S.o.param_groups[0]['lr'] *= 0.5 | S.m.train(k1 > 2)
        torch.nn.utils.clip_grad_norm_([S.p], k0) | S.o.zero_grad(set_to_none=False)
    """,
    "random": """
        torch.manual_seed(int(k1)) | $v = torch.randn($p, 3, device=dev) | $v = torch.rand_like($x)
        $v = F.dropout($x, 0.5) | $v = torch.bernoulli(torch.full_like($x, 0.5)) | $x.normal_() | $x.uniform_(-1, k0)
        $v = torch.randperm(4, device=dev) | $v = torch.randint(0, 5, (3,), device=dev)
        $v = torch.multinomial($x.detach().abs() + 0.1, 1) | $x.random_(0, 3) | $x.exponential_()
        with torch.random.fork_rng(devices=[]): $v = torch.rand(2, device=dev)
    """,
}
_VALUES = ("view", "new", "take", "reduce", "nn")  # whose lines give a new tensor
CHANGES = [
    line.strip()
    for line in """
    S.k = 0.75 | S.k = S.k + 1 | S.a = torch.ones(4, 3, device=dev) | S.a.mul_(0.5) | S.b = S.a | S.n = 3 | S.m.eval()
    S.p.requires_grad_(False) | S.p.requires_grad_(True) | S.p.grad = torch.ones_like(S.p) | S.p.data = S.p.data * 2
    S.m.train() | S.l.append(S.b) | S.d['x'] = S.b * 3 | S.o.param_groups[0]['lr'] = 0.05
    S.b = torch.arange(4., device=dev) | S.a = S.b.view(2, 2) | S.b = S.b.detach()
    S.p.register_hook(lambda g: g * 3) | S.m.weight.data.mul_(0.9) | S.k = 2
    S.m.register_forward_hook(lambda m, i, o: o * 2) | S.o.zero_grad() | S.a = S.a.double() | S.b.resize_(4).fill_(2)
    S.m.load_state_dict({k: v * 0.5 for k, v in S.m.state_dict().items()}) | S.o.load_state_dict(S.o.state_dict())
""".replace("\n", "|").split("|")
    if line.strip()
]


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, k: float) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.k = k
        return x * x * k

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return grad * 2 * x * ctx.k, None


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * 2


SPACE = {
    "torch": torch, "nn": nn, "F": F, "copy": copy, "pickle": pickle, "checkpoint": checkpoint, "Scaled": Scaled,
    "Doubled": Doubled,
}  # fmt: skip


@dataclass(frozen=True)
class Call:
    """The sizes "n" and "m" of a call, its numbers, the seed of its tensors, and what changes before it."""

    sizes: dict[Any, int]
    numbers: tuple[Any, Any, Any]
    seed: int
    change: str


@dataclass(frozen=True)
class Program:
    """What `body` does with its arguments `inputs` (name, dtype, shape, needs a gradient, layout), and its calls."""

    seed: int
    inputs: tuple[tuple[str, torch.dtype, tuple[Any, ...], bool, str], ...]
    lines: tuple[str, ...]
    calls: tuple[Call, ...]

    def source(self) -> str:
        """The body; an error of a line is told, and the next line runs."""
        found = [f"def body(dev, tell, S, k0, k1, k2, {', '.join(name for name, *_ in self.inputs)}):"]
        for line in self.lines:
            found += ["    try:", f"        {line}", "    except Exception as e: tell(type(e).__name__)"]
        return "\n".join([*found, "    return {n: t for n, t in locals().items() if n[0] == 'v'}"])

    def __str__(self) -> str:
        return "\n".join([f"# seed {self.seed}", *map("# {}".format, (*self.inputs, *self.calls)), *self.lines])


def tensor_of(dtype: torch.dtype, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """Numbers that suit the type."""
    if dtype is torch.bool:
        return torch.rand(shape, generator=generator) > 0.5
    if dtype.is_floating_point or dtype.is_complex:
        return torch.randn(shape, generator=generator, dtype=C64 if dtype.is_complex else F64).mul(1.5).to(dtype)
    return torch.randint(0 if dtype is BYTE else -4, 8, shape, generator=generator).to(dtype)


class Drawing:
    """One program being drawn; `names` are the tensors so far, as eager has them."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.names: dict[str, Any] = {}
        self.count = 0
        draw = self.random
        self.lengths = draw.choice([6, 12, 18])
        grad = draw.random() < 0.7
        kinds = ["value"] * 7 + [kind for kind in LINES if kind not in _VALUES and kind not in ("grad", "random")] * 2
        self.kinds = kinds + ["binary"] * 3 + ["grad"] * 4 * grad + ["random"] * 2 * (draw.random() < 0.3)
        inputs = []
        for _ in range(draw.randint(2, 4)):
            dtype, shape = draw.choice(DTYPES), draw.choice(SHAPES)
            leaf = grad and (dtype.is_floating_point or dtype.is_complex) and draw.random() < 0.4
            inputs.append((self.new(), dtype, shape, leaf, draw.choice(LAYOUTS)))
        base = (draw.choice([3, 4, 5]), draw.choice([2, 3, 4]))
        odd = (draw.choice([0, 1, 2, 6, 7]), draw.choice([0, 1, 2, 3, 5]))
        sizes = draw.choice([[base] * 3, [base, base, (base[0] + 1, base[1]), base, odd, base]])
        vary = draw.random() < 0.5
        numbers = [
            (draw.choice([0.5, 1.5, 2.0, 0.25]), draw.randrange(5), draw.choice([0.5, 1, True, 2])) for _ in sizes
        ]
        self.program = Program(seed, tuple(inputs), (), tuple(
            Call({"n": n, "m": m}, numbers[i * vary], draw.randrange(1000), draw.choice(["", draw.choice(CHANGES)]))
            for i, (n, m) in enumerate(sizes)
        ))  # fmt: skip

    def new(self) -> str:
        self.count += 1
        return f"v{self.count}"

    def tensor(self, fits: Callable[[torch.Tensor], bool] = lambda t: True) -> str:
        """The name of a tensor that fits, rather a late one. IndexError where none does."""
        found = [name for name, t in self.names.items() if isinstance(t, torch.Tensor) and fits(t)]
        return self.random.choice(found[-6:] if self.random.random() < 0.5 else found)

    def line(self) -> str:
        """A line that may fit; IndexError and LookupError where nothing does."""
        kind = self.random.choice(self.kinds)
        if kind == "value":
            kind = self.random.choice(["view", "view", *_VALUES, "unary"])
        if kind == "unary":
            template = "$v = $x.$unary()"
        elif kind == "binary":
            template = self.random.choice(
                ["$v = torch.$binary($x, $y)", "$v = torch.$binary($x, $n)", "$v = $n $sign $x"]
            )
        else:
            template = self.random.choice(
                [part for row in LINES[kind].strip().split("\n") for part in row.split(" | ")]
            )
            template = f"$v = {template.strip()}" if kind in _VALUES else template.strip()
        filled: dict[str, str] = {}
        while "$" in template:
            template = re.sub(r"\$(\w+)", lambda found: self.fill(found[1], filled), template)
        return template

    def fill(self, name: str, filled: dict[str, str]) -> str:
        """What stands for a `$name`: the same wherever it is in a line, but for numbers and axes."""
        if name in filled:
            return filled[name]
        if name not in ("x", "v", "t", "sign", "e", "p") and "x" not in filled:
            filled["x"] = filled["f"] if "f" in filled else self.tensor()
        draw, x = self.random, self.names.get(filled.get("x", ""))
        floating = torch.Tensor.is_floating_point
        match name:
            case "d":
                return str(draw.randrange(-1, max(1, x.dim())))
            case "e" | "p":
                return str(draw.randint(name == "p", 3))
            case "i":
                return str(draw.randrange(max(1, x.shape[0] if x.dim() else 1)))
            case "n":
                return draw.choice(_NUMBERS.split())
            case "t":
                return str(draw.choice(DTYPES))
            case "sign":
                return draw.choice(("+", "-", "*", "/", "//", "%", "==", "<", ">", "**"))
            case "binary":
                return draw.choice(_BINARY.split())
            case "write":
                return draw.choice(_WRITES.split())
            case "unary":
                kind = "bool" if x.dtype is BOOL else "complex" if x.is_complex() else "float" if floating(x) else "int"
                return draw.choice(_UNARY[kind].split())
            case "perm":
                return ", ".join(map(str, draw.sample(range(x.dim()), x.dim())))
            case "at":
                places = [draw.randrange(2) for _ in range(draw.randint(1, 3))]
                filled[name] = f"(torch.tensor({places}, device=dev) % max(1, min($x.shape, default=1)))"
            case "where":
                return "($x.detach().abs().nan_to_num().long() % max(1, min($x.shape, default=1)))"
            case "ix":
                return draw.choice(_INDICES.split())
            case "v":
                filled[name] = self.new()
            case "x" | "o":
                filled[name] = self.tensor()
            case "f":
                filled[name] = self.tensor(lambda t: floating(t) and t.dim() > 0)
            case "y":
                filled[name] = self.tensor(
                    lambda t: all(a == b or b == 1 for a, b in zip(x.shape[::-1], t.shape[::-1]))
                )
            case "z":
                filled[name] = self.tensor(lambda t: t.shape == x.shape)
            case "w":
                f = self.names[filled["f"]]
                filled[name] = self.tensor(
                    lambda t: t.dtype == f.dtype and t.dim() > 0 and f.shape[-1] in t.shape[-2:][:1]
                )
            case "g":
                filled[name] = self.tensor(lambda t: t.requires_grad and floating(t))
            case "leaf":
                filled[name] = self.tensor(lambda t: t.requires_grad and t.is_leaf)
            case _:
                raise AssertionError(name)
        return filled[name]


def drawn(seed: int, world: Callable[[Program, int, str], dict[str, Any]]) -> Program:
    """The program of a seed. `world` gives the names that the body of a call has."""
    drawing = Drawing(seed)
    program, lines = drawing.program, []
    drawing.names = world(program, 0, "cpu")
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(seed)
        for _ in range(drawing.lengths * 8):
            if len(lines) == drawing.lengths:
                break
            try:
                line = drawing.line()
            except (LookupError, RuntimeError):  # nothing fits; torch refuses to tell of a view
                continue
            names = {**SPACE, **drawing.names}
            try:
                exec(line, names)
            except Exception:
                if "out=" in line or drawing.random.random() < 0.9:  # `out` has another size then
                    continue
            if any(isinstance(value, torch.Tensor) and value.numel() > 3000 for value in names.values()):
                continue
            drawing.names = {n: value for n, value in names.items() if n in drawing.names or re.fullmatch(r"v\d+", n)}
            lines.append(line)
    return Program(seed, program.inputs, tuple(lines), program.calls)
