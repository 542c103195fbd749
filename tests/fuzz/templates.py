"""The lines and blocks of random programs that are not in tests/lazy/random_programs.py, which fills `$names`.

Invariant: each loop ends whatever its values are.
"""

from __future__ import annotations

CONDITIONS = [
    "$x.shape[0] > $p", "k1 > 2", "S.n % 2", "bool($x.sum() > 0)", "S.training", "S.flag", "k0 > S.k", "len(S.l) > 2",
    "$x.requires_grad", "$x.numel() > 3", "'x' in S.d", "S.name == 'a'", "$x.dim() and $x.shape[-1] == $e",
    "$x.is_contiguous()", "(($x > 0).sum() > 2).item()", "$x.dtype == torch.float32", "S.p.grad is None", "$x is $o",
    "isinstance(k2, int)", "S.block.calls > 2", "$x.stride() == $o.stride()", "torch.is_grad_enabled()",
    "S.block.cache is not None", "$x.abs().max() > 2", "$x._is_view()", "S.o.param_groups[0]['lr'] < 0.06",
    "hasattr(S, 'extra')", "k0 == 0.5",
]  # fmt: skip

LINES: dict[str, str] = {
    "containers": """
        parts = [$x, $o]; parts[0].mul_(2); $v = parts[-1] + 1
        box = Box($x, k0); box.t.add_(1); $v = box.t * box.k
        $v = {'a': $x, 'b': $o}; $v = $v['a'] * 1 | $v = Pair($x, $o).first * k0 | $v = dict(x=$x)['x'].sum()
        S.l.insert(0, $x.detach().clone()); $v = S.l[0] * 2; del S.l[3:] | $v = sum(t.sum() for t in S.l)
        S.d.update(x=$x.detach(), y=$o.detach()) | $v = S.d.pop('y', $x) * 1
        $v = S.d.setdefault('z', $x.detach()) + 1
        S.box.t = $x.detach(); S.box.k += 1 | $v = S.box.t * S.box.k | S.box = Box($x.detach(), k0)
        S.box.t.add_(k0)
        told.append(len(S.l)) | told.append(sorted(S.d)) | $v = S.l.pop() if len(S.l) > 1 else $x * 1
        S.d = {k: t * 0.5 for k, t in S.d.items()} | S.l = [t + 1 for t in S.l] | S.l.reverse() | S.d.clear()
        a, *rest = [$x, $o, $x]; $v = a + len(rest) | $v = [t * i for i, t in enumerate(($x, $o))][0]
        $v = next(t for t in [*S.l, $x] if t.dim() > 0) * 1 | $v = max([$x, $o], key=lambda t: t.numel()) * 1
        $v = copy.copy(S.box).t + 0 | $v = list(zip([$x], [k0]))[0][0] * 1
        S.l[-1:] = [$x.detach(), $x.detach() * 2]
    """,
    "closures": """
        $v = (lambda t, k=k0: t * k)($x) | $v = list(map(lambda t: t * S.k, [$x]))[0]
        $v = sum((t * i for i, t in enumerate([$x, $x])), $x * 0)
        $v = (lambda *a, **kw: a[0] * kw['k'])($x, k=S.k)
        $v = [(lambda: $x + i) for i in range(3)][k1 % 3]()
        $v = list(itertools.accumulate([$x, $x, $x], torch.add))[-1]
        told.append([i for i, s in enumerate($x.shape) if s > 1]) | told.append(f'{k0} {tuple($x.shape)}')
    """,
    "aliases": """
        $x.t().mul_(2) | $x.detach().add_(1) | $x.data[:1] = 3 | $x[1:].add_($x.detach()[:-1].clone())
        $x.view(-1)[::2] = k0
        with torch.no_grad(): $x[0].copy_($x[-1].clone()) | $v = $x.unsqueeze(0)[..., :1]; $v.data.mul_(2)
        $v = $x.view_as($x); $v.data.add_(1) | $v = $x.transpose(0, -1); $v.detach().mul_(k0)
        $x.squeeze(-1).data.add_(k0)
        $v = $x.unsqueeze(-1).expand(*$x.shape, 2) | $v = $x[:1].expand(3, *$x.shape[1:])
        $v = $x.narrow($d, 0, 1).squeeze($d)
        $v = $x.diagonal(); $v.data.zero_() | $v = $x.as_strided($x.shape, $x.stride(), $x.storage_offset())
        S.window.add_(k0) | S.base[2].mul_(2) | $v = S.window.t() * 1 | $v = S.window[0]
        S.base.t()[1].copy_(S.base[0] * 2)
        S.window = S.base[k1 % 3 : k1 % 3 + 3, 1:4] | $v = S.base.view(-1)[k1 : k1 + 4] | S.a.t().add_(1)
        $v = S.a[1:, :2]
        $v = $x.unflatten(-1, (1, -1)).squeeze(-2) | $v = $x.movedim(-1, 0); $v.data[...] = k0
        $v = $x.real if $x.is_complex() else $x.data
        $v = $x[:, :1].t() | $v = $x[:1].mT | $v = $x.swapaxes(0, -1)[:1]
        $v = torch.chunk($x, 2, -1)[0]; $v.data.neg_()
        $x.set_($o.detach()) | $x.swapaxes_(0, -1) | $x.t_() | $x.squeeze_().unsqueeze_(-1)
        $v = $x.unfold(0, 2, 1); $v.data[0] = 1
    """,
    "dtypes": """
        $v = $x.to(torch.bfloat16) * k0 | $v = $x.double() + $o | $v = $x.long() // 2 | $v = $x.bool() & True
        $v = $x.to(torch.complex64) * 1j
        $v = $x.float().sum(dtype=torch.bfloat16) | $v = $x + torch.tensor(k0, dtype=torch.float64)
        $v = $x * torch.tensor(2) | $v = $x.type_as($o)
        $v = torch.promote_types($x.dtype, $o.dtype); told.append($v); $v = $x * 1
        $v = torch.cat([$x.reshape(-1), $o.reshape(-1)])
        $v = $x.int().bitwise_and(3) | $v = $x.abs().sqrt().to(torch.float16) | $v = torch.where($x > 0, $x, k0)
        $v = torch.where($x > 0, 1, $x)
        $v = torch.complex($f, $f) | $v = torch.stack([$x, $x]).to($t) | $v = $x.mul(k1).sub(True)
    """,
    "activations": """
        F.leaky_relu_($x, -0.5) | F.elu_($x, -1.5) | F.threshold_($x, k0, -k0) | F.hardtanh_($x, -0.5, 0.25)
        F.celu_($x, -0.5)
        F.selu_($x) | F.relu_($x) | F.leaky_relu($x, 0.0, inplace=True) | F.elu($x, alpha=0.0, inplace=True)
        F.silu($x, inplace=True)
        F.relu6($x, inplace=True) | F.hardswish($x, inplace=True) | F.mish($x, inplace=True)
        F.hardsigmoid($x, inplace=True)
        $v = ($x * 1); F.leaky_relu_($v, -2.0) | $v = $x * 1; F.elu_($v, -0.5)
        $v = $x * 1; F.threshold_($v, 0.1, 7.)
        $v = $x * 1; F.celu_($v, 0.5) | $v = $x * 1; F.hardtanh_($v, 0.0, 0.0) | $v = $x * 1; torch.relu_($v)
        $v = F.dropout($x * 1, 0.0, inplace=True) | $v = F.dropout($x * 1, 1.0, True, True)
        $v = F.rrelu($x * 1, 0.5, 0.5)
    """,
    "modules": """
        $v = S.block($f) | S.block.factor += 0.5 | S.block.train(not S.block.training) | $v = S.block(S.a)
        told.append(S.block.calls)
        $v = nn.Sequential(S.m, nn.Tanh(), S.block)(S.a) | S.block.cache = None
        $v = S.block.inner.weight @ S.a.t()
        S.block(S.a).sum().backward(); S.o.step(); S.o.zero_grad()
        S.o.zero_grad(); S.m(S.a).square().mean().backward(); S.o.step()
        (S.block(S.a) * S.p).mean().backward(); S.o.step() | S.block.inner.requires_grad_(k1 > 1)
        S.extra = S.n | S.n += k1
        S.o.param_groups[0]['lr'] = 0.1 / (1 + S.n) | S.flag = not S.flag | S.name = 'b' if S.name == 'a' else 'a'
        with torch.no_grad(): S.m.weight.copy_(S.block.inner.weight) | S.block.mean = S.block.mean * 0.5
        S.m.weight.grad = None
        with torch.no_grad(): [p.mul_(0.9) for p in S.parameters()]
        $v = torch.cat([p.reshape(-1) for p in S.m.parameters()])
        $v = sum(p.square().sum() for p in S.parameters() if p.requires_grad) | nn.init.constant_(S.m.bias, k0)
    """,
    "storages": """
        s = $x.untyped_storage(); $x.mul_(2); told.append(read(s.clone(), $x.dtype))
        s = $x.untyped_storage(); $x.add_(k0); told.append(read(s, $x.dtype)); $v = $x * 1
        $v = $x.detach().clone(); s = $v.untyped_storage(); $v.mul_(2); s.resize_(s.nbytes() + 8); $v.add_(k0)
        old = $x.detach().clone(); told.append(float(old.abs().sum())); old.mul_(2); S.box.t = (S.box.t, old)[S.n % 2]
        old = $x * 1; told.append(bool(old.any())); old.data.add_(k0); $v = old if S.n % 3 else $x + 1
        told.append($x.detach()[:1].cpu().numpy().tolist())
        $v = $x.detach(); $v.as_strided((1, 1), (1, 1), 0).add_(1)
    """,
    "generators": """
        $v = torch.randn($p, generator=torch.Generator().manual_seed(k1)).to(dev) * 1
        $v = torch.rand($p, 2, generator=torch.Generator().manual_seed(3)).to(dev)
        g = torch.Generator(); g.manual_seed(k1); $v = torch.randperm(4, generator=g).to(dev)
        $v = $x * torch.empty(1).uniform_(generator=torch.Generator().manual_seed(7)).item()
    """,
    "gradients": """
        $x.register_hook(lambda g: g * k0) | $v = $x * 2; $v.register_hook(lambda g: g + 1)
        $v = $x.detach().clone().requires_grad_()
        $v = torch.autograd.grad(($x * $x).sum(), $x)[0] | ($x * k0).sum().backward()
        $v = ($x * 1).requires_grad_(); $v.retain_grad()
        with torch.enable_grad(): $v = ($x * S.p.sum()).tanh() | with torch.inference_mode(False): $v = $x + 1
        $v = $x.grad * 1 if $x.grad is not None else $x * 1 | $v = Doubled.apply($x * 1)
        $v = Scaled.apply($x, k0); $v.sum().backward(retain_graph=True)
        $v = ($x * 1).mul_(2); $v[:1].add_(1) | $v = $x * 1; $v.data = $v.data * 2 | $v = $x * 1; $v[...] = $o
        $v = $x.sum() * 1; $v.data = $v.data * 2 | torch.arange(4, out=S.box.t.data)
        $v = nn.Parameter($x.detach())
    """,
}  # fmt: skip

INNER = """
    $v = $v * k0 | $v = $v + $x | $v.add_(1) | $v = $v.clone() | $x.add_(1) | S.n += 1 | S.l.append($v.detach())
    $v = $v.neg()
    told.append(S.n) | S.k = S.k + 1 | $v = torch.where($v > 0, $v, $x) | S.b.mul_(k0) | $v = $v.detach()
    $v = $v * S.k
    with torch.no_grad(): $v.mul_(0.5) | $x.data.mul_(0.5) | $v = $v - S.p.sum() | S.a = S.a * k0
    $v[:1].zero_() | $v = $v / 2
    S.box.t = $v.detach() | S.d['x'] = $v.detach() * 1 | $v = $v * int(k1) | told.append($v.shape[0])
    told.append(bool($v.sum() > 1))
    $v, old = $v + 1, $v | $v = $v + len(S.l) | S.block.factor = k0 | $v = $v * ($v > 0) | $v = $v.square()
    $v = $v.requires_grad_()
    S.window.mul_(0.5) | $v = $v + 0 * $x.sum() | $v = $v.contiguous() * 1
"""

BLOCKS = [
    "$v = $x * 1\nif <c>:\n    <body>\nelse:\n    <body>",
    "$v = $x * 1\nif <c>:\n    <body>",
    "$v = $x + 0\nif <c>:\n    <body>\nelif <c>:\n    <body>\nelse:\n    <body>",
    "$v = $x * 1\nfor i in range(int(k1) % 3 + 1):\n    <body>",
    "$v = $x * 1\nfor i in range(min($x.shape[0], 5)):\n    <body>\n    if <c>:\n        break\nelse:\n    <body>",
    "$v = $x * 1\nfor i in range(4):\n    if i % 2 == k1 % 2:\n        continue\n    <body>",
    "$v = $x * 1\nfor i in range(3):\n    if not bool($v.abs().sum() < 9):\n        break\n    <body>",
    "$v = $x * 1\nfor t in [$x, $o]:\n    t.data.add_(1)\n    <body>",
    "$v = $x * 1\nfor name, t in list(S.d.items()):\n    S.d[name] = t * k0\n    <body>",
    "$v = $x * 1\ncount = 0\nwhile count < min(k1, $x.dim() + 1):\n    count += 1\n    <body>\ntold.append(count)",
    "$v = $x * 1\ntry:\n    <body>\n    if <c>:\n        raise ValueError('odd')\n    <body>\n"
    "except ValueError as error:\n    told.append(str(error))\n    <body>\nfinally:\n    <body>",
    "$v = $x * 1\ntry:\n    $v = $v.view(7, -1)\nexcept RuntimeError:\n    <body>",
    "$v = $x * 1\ntry:\n    $v = S.d['missing'] + 1\nexcept KeyError:\n    <body>",
    "$v = $x * 1\nwith torch.no_grad():\n    <body>",
    "$v = $x * 1\nwith torch.set_grad_enabled(<c>):\n    <body>",
    "$v = $x * 1\nwith torch.autocast(dev, dtype=torch.bfloat16, enabled=<c>):\n    <body>",
    "def inner(t, k=2):\n    if <c>:\n        return t * k\n    t = t + 1\n    return t * S.k\n"
    "$v = inner($x) + inner($x, k0)",
    "total = 0\ndef count(t):\n    nonlocal total\n    total = total + t\n    return total\nfor i in range(k1):\n"
    "    count(i)\n$v = $x * count(1)",
    "def pieces():\n    for i in range(3):\n        if <c>:\n            return\n        yield $x * i\n"
    "        S.n += 1\n$v = sum(pieces(), $x * 0)",
    "class Local:\n    factor = k0\n    def __call__(self, t):\n        return t * self.factor\n$v = Local()($x)",
    "@torch.no_grad()\ndef inner(t):\n    t = t * 1\n    t.add_(1)\n    return t\n$v = inner($x)",
    "$v = $x * 1\nmatch $x.dim():\n    case 0 | 1:\n        <body>\n    case 2 if <c>:\n        <body>\n"
    "    case _:\n        <body>",
    "$v = $x * 1\nrows = []\nfor row in $v:\n    rows.append(row * k0)\n    if len(rows) > 2:\n        break\n"
    "told.append(len(rows))\n$v = rows[-1] if rows else $v",
    "$v = $x * 1\nparts = {}\nfor i, t in enumerate([$x, $o, $x]):\n"
    "    parts.setdefault(t.dim(), []).append(t * (i + 1))\n$v = [p for q in parts.values() for p in q][-1]",
    "$v = $x.clone()\nview = $v[:1]\nif <c>:\n    view.add_(1)\nelse:\n    $v.mul_(2)\n$v = view * 1 + $v",
    "def down(t, depth):\n    return t if depth == 0 else down(t * k0 + 1, depth - 1)\n$v = down($x, int(k1) % 3)",
    "def guess(t):\n    if t.shape[0] > 3:\n        raise IndexError(t.shape[0])\n    return t + 1\ntry:\n"
    "    $v = guess($x)\nexcept (IndexError, ValueError) as error:\n    $v = $x - 1\n    told.append(repr(error))",
]  # fmt: skip

CHANGES = [
    "S.flag = not S.flag", "S.name = 'b'", "S.block.eval()", "S.block.train()", "S.block.factor = 2",
    "S.block.calls = 0", "S.block.cache = None", "S.eval()", "S.train()",
    "S.box = Box(torch.ones(3, device=dev), 3)", "S.box.k = 2.5", "S.o.param_groups[0]['weight_decay'] = 0.1",
    "S.o.param_groups[0]['lr'] = 0.03", "S.l = S.l[:1]", "S.d = {}", "S.block.inner = nn.Linear(3, 3).to(dev)",
    "S.m.weight = S.block.inner.weight", "S.block.inner.bias = None", "S.p.data = torch.ones(6, device=dev)[::2]",
    "S.window = S.base[0:3, 0:3]", "S.window = S.base.t()[1:4, 2:5]", "S.base.mul_(0.5)", "S.extra = 1",
    "S.a.zero_()", "S.p.grad = None", "S.b = torch.ones(8, device=dev)[::2]",
    "S.block.register_forward_pre_hook(lambda m, i: (i[0] * 0.5,))", "S.block.mean.add_(1)", "S.m.half().float()",
    "S.requires_grad_(False)", "S.requires_grad_(True)", "S.block.forward = lambda x: x * 2", "S.l[0] = S.b",
    "S.a = S.base[:4, :3]", "S.b.requires_grad_()", "S.l.append(S.p)", "S.p.data.add_(1)", "S.d['x'] = S.p",
]  # fmt: skip

AFTER = [
    "backward()", "backward(); S.o.step(); S.o.zero_grad()", "backward(); backward()", "first().detach().add_(1)",
    "first().mul_(2)", "backward(); S.o.step()", "S.o.step()", "backward(); S.o.zero_grad(set_to_none=False)",
]  # fmt: skip

# Lines that read something, and what changes just that between calls.
TOPICS: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...] = (
    (
        (
            "$v = $x * (2 if S.training else 3)",
            "$v = S.block(S.a)",
        ),
        (
            "S.eval()",
            "S.train()",
            "S.block.eval()",
        ),
    ),
    (
        ("$v = $x * (2 if S.flag else 3)",),
        ("S.flag = not S.flag",),
    ),
    (
        ("$v = $x * {'a': 2, 'b': 3}[S.name]",),
        ("S.name = 'ab'[S.name == 'a']",),
    ),
    (
        (
            "$v = S.a * 2",
            "$v = S.a.sum() * $x",
        ),
        (
            "S.a = torch.ones(4, 3, device=dev) * S.n",
            "S.a = S.a * 2",
        ),
    ),
    (
        (
            "$v = S.b + 1",
            "S.b.add_(1)",
        ),
        (
            "S.b = S.b * 2",
            "S.b = torch.arange(4., device=dev)",
            "S.b = S.b[:2]",
        ),
    ),
    (
        ("$v = S.b * k0", "$v = S.b + S.a.sum()"),
        ("S.b.requires_grad_()", "S.b.requires_grad_(False)"),
    ),
    (
        (
            "$v = sum(t.sum() for t in S.l)",
            "$v = S.l[0] * 2 + len(S.l)",
        ),
        (
            "S.l[0] = S.p.detach() * 1",
            "S.l.append(S.b)",
        ),
    ),
    (
        ("$v = sum((t.sum() for t in S.d.values()), $x * 0)",),
        (
            "S.d['x'] = S.b * 3",
            "S.d['y'] = S.b",
            "S.d.clear()",
        ),
    ),
    (
        ("$v = S.m(S.a)",),
        (
            "S.m.weight = nn.Parameter(S.m.weight.detach() * 2)",
            "S.m.bias = None",
            "S.m.weight = S.block.inner.weight",
        ),
    ),
    (
        ("$v = S.m(S.a)",),
        (
            "S.m.register_forward_hook(lambda m, i, o: o * 2)",
            "S.m.register_forward_pre_hook(lambda m, i: (i[0] * 0.5,))",
        ),
    ),
    (
        ("$v = S.m(S.a)",),
        (
            "S.m.weight.data = S.m.weight.detach().t().contiguous()",
            "S.m.weight.data = S.m.weight.detach().clone().t()",
        ),
    ),
    (
        (
            "$v = S.p * 2 if S.p.grad is None else S.p.grad * 1",
            "(S.p * k0).sum().backward()",
            "$v = S.p.grad",
        ),
        (
            "S.p.grad = None",
            "S.p.grad = torch.ones_like(S.p)",
        ),
    ),
    (
        (
            "$v = S.p * $x.sum()",
            "$v = $x * (1 if S.p.requires_grad else 2)",
        ),
        (
            "S.p.requires_grad_(False)",
            "S.p.requires_grad_(True)",
        ),
    ),
    (
        (
            "$v = $x * {id(S.a): 2.0, id(S.b): 3.0}.get(id($o), 5.0)",
            "$v = $x * (2 if $o is S.b else 3)",
        ),
        ("S.a, S.b = S.b, S.a",),
    ),
    (
        (
            "$v = $x * S.settings.scale",
            "$v = $x + 1 if S.settings.shifts else $x * 2",
        ),
        (
            "S.settings.scale = 3.0",
            "S.settings.shifts = False",
        ),
    ),
    (
        (
            "told.append(float(($f.detach() * 2).cpu().float().numpy().sum()))",
            "told.append(S.a.detach().cpu().numpy().tolist())",
        ),
        ("S.a.add_(1)",),
    ),
    (
        ("n = np.full(3, k0, np.float32); $v = torch.from_numpy(n).to(dev) + 1; n[:] = 3",),
        ("S.n += 1",),
    ),
    (
        (
            "S.q.rotate(1); $v = S.q[0] * 2",
            "S.q.append(S.q.popleft()); $v = S.q[0] - S.q[1]",
            "S.l.append(S.l.pop(0)); $v = S.l[0] * 2",
            "S.l.reverse(); $v = S.l[0] * 2",
        ),
        ("S.q[0] = S.p.detach() * 1",),
    ),
    (
        (
            "$leaf.register_hook(lambda g: g * 3); $v = $leaf * 2",
            "$leaf.requires_grad_(k1 > 2)",
        ),
        (),
    ),
    (
        (
            "S.b.requires_grad_(not S.b.requires_grad) if S.b.is_leaf else 0",
            "S.l[0].requires_grad_()",
        ),
        (
            "S.b = S.b.detach()",
            "S.l[0] = S.l[0].detach()",
        ),
    ),
    (
        (
            "$v = $x * S.k",
            "S.n += 1; $v = $x + S.n",
            "S.k = S.k + 0.5",
        ),
        (
            "S.k = 2.5",
            "S.n = 7",
        ),
    ),
    (
        (
            "$v = $x * k0 + ($x > k1)",
            "$v = $x + k0 * S.k",
            "$v = $x * k2 if isinstance(k2, bool) else $x - k2",
        ),
        (),
    ),
    (
        (
            "$v = $x * (2 if isinstance(k2, bool) else 3)",
            "$v = $x + 1 if type(k2) is int else $x * 2",
            "told.append(type(k2).__name__)",
            "told.append(str(k2))",
            "$v = torch.tensor(k2, device=dev) * 1",
        ),
        (),
    ),
    (
        (
            "$v = $x * {int: 2, float: 3, bool: 5}[type(S.k)]",
            "$v = torch.full((2,), S.k, device=dev)",
            "told.append(str(S.k))",
        ),
        (
            "S.k = 1",
            "S.k = 1.0",
            "S.k = True",
        ),
    ),
    (
        (
            "$v = torch.autograd.grad(($leaf * $y).sum(), $leaf)[0]",
            "$v = torch.autograd.grad(($leaf * k0).square().sum(), $leaf)[0] * 2",
            "$v = torch.autograd.grad($leaf.$unary().sum(), $leaf, create_graph=True)[0]",
            "$v = torch.autograd.grad(($leaf / ($f + k0)).sum(), $leaf)[0] + 1",
            "($leaf * k0).sum().backward()",
        ),
        (),
    ),
    (
        (
            "$v = torch.var($f, $d, correction=k1)",
            "$v = $f.var($d, unbiased=False)",
            "$v = torch.var($f, $d, correction=$e, keepdim=True) * $f",
            "$v = $f - torch.var($f, correction=0)",
            "$v = torch.std($f, $d, correction=$e) + torch.var($f, $d, correction=2)",
            "$v = torch.var_mean($f, $d, correction=$e)[0]",
            "$v = torch.fmod($x, $n) + 1",
            "$v = torch.fmod($f, $z.detach() - $n)",
        ),
        (),
    ),
    (
        (
            "$v = ($leaf - $y).$unary(); ($v * $v.sin()).sum().backward()",
            "w = ($leaf / ($z.detach().square() + k0)).tanh(); (w.exp() * w).sum().backward()",
            "w = torch.atan2($leaf, $z.detach() + 2); (w * w).sum().backward()",
            "w = k0 - torch.where($leaf > 0, $leaf, $z.detach() * 2); (w.sin() * w.tanh()).mean().backward()",
            "w = ($leaf.abs() + 0.5) ** ($z.detach().sigmoid() - $n); w.square().sum().backward()",
            "w = torch.lerp($leaf, $z.detach(), 0.25) - $z.detach(); (w.cos() * w).sum().backward()",
        ),
        (),
    ),
    (
        (
            "$v = torch.softmax(torch.softmax($f, $d).flip($d), $d).roll(1, $d)",
            "$v = $f\nfor i in range(k1 % 3 + 2):\n    $v = torch.softmax($v.flip($d), $d)",
            "$v = $f\nfor i in range(k1 % 3 + 2):\n    $v = F.layer_norm($v.transpose($d, $d), $f.shape[-1:]) + $v",
            "$v = ($f - $f.mean($d, keepdim=True)).roll(1, $d); $v = ($v / ($v.amax($d, keepdim=True) + 2)).flip($d)",
            "$v = torch.softmax($f, $d); $v = ($v @ $v.mT).flip($d) @ $v; $v = torch.log_softmax($v.roll(1, $d), $d)",
        ),
        (),
    ),
    (
        (
            "$v = $x * 2 if bool($x.sum() > 0) else $x - 1",
            "$v = $x * int(($x > 0).sum())",
        ),
        (),
    ),
    (
        (
            "$v = torch.rand(3, device=dev) + F.dropout(S.a, 0.5)",
            "$v = $x.detach().float().normal_()",
        ),
        (),
    ),
    (
        (
            "$x.mul_(2); $v = $x + 1",
            "$x.t_()",
            "$v = $x[1:]; $v.add_(1)",
            "$x.data[:1] = 2",
        ),
        (),
    ),
    (
        (
            "S.block.mean.add_(1); $v = S.block.mean * 1",
            "S.window.mul_(2); $v = S.base.sum()",
            "S.base[1].add_(1); $v = S.window * 1",
        ),
        ("S.base.add_(1)",),
    ),
)
