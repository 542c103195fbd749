"""The decomposition rules, one module for each family of ATen operators; importing this package registers them all."""

from torchlazy.prims.decomps import (
    activations,
    arithmetic,
    creation,
    foreach,
    fused_optim,
    indexing,
    linalg,
    losses,
    nn,
    norms,
    pointwise,
    random,
    reduction,
    softmax,
    special,
    view,
)

__all__ = [
    "activations",
    "arithmetic",
    "creation",
    "foreach",
    "fused_optim",
    "indexing",
    "linalg",
    "losses",
    "nn",
    "norms",
    "pointwise",
    "random",
    "reduction",
    "softmax",
    "special",
    "view",
]
