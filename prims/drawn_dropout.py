"""`torchlazy::drawn_dropout`: dropout by torch's own kernel, which draws from the device's generator as it runs.

It stands for `native_dropout` in traces whose random operators draw one behind the other where they run; a decomposed
dropout would draw other numbers.

Invariant: the results, and what the generator gives next, are those of `torch.native_dropout(x, p, True)`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

_library = torch.library.Library("torchlazy", "FRAGMENT")
_library.define("drawn_dropout(Tensor x, float p) -> (Tensor, Tensor)", tags=(torch.Tag.nondeterministic_seeded,))


def drawn_dropout(x: torch.Tensor, p: float) -> tuple[torch.Tensor, torch.Tensor]:
    """x, zero with probability p and scaled by 1 / (1 - p) otherwise; and the mask (bool, of x's shape) of what is
    kept."""
    return torch.ops.aten.native_dropout.default(x, p, True)  # type: ignore[no-any-return]


def _meta(x: torch.Tensor, p: float) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(x), torch.empty_like(x, dtype=torch.bool)


_library.impl("drawn_dropout", drawn_dropout, "CompositeExplicitAutograd")
_library.impl("drawn_dropout", _meta, "Meta")


def takes_random_numbers(op: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call takes numbers from a generator: attention does with a dropout, its backward never."""
    schema = op._schema
    if torch.Tag.nondeterministic_seeded not in op.tags or "backward" in schema.name:
        return False
    given = dict(zip((a.name for a in schema.arguments), args, strict=False)) | dict(kwargs)
    return all(a.name != "dropout_p" for a in schema.arguments) or given.get("dropout_p", 0.0) != 0.0


__all__ = ["drawn_dropout", "takes_random_numbers"]
