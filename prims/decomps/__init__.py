"""The decomposition rules, one module for each family of ATen operators; importing this package registers them all."""

from torchlazy.prims.decomps import creation, pointwise, view

__all__ = ["creation", "pointwise", "view"]
