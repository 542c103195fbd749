"""torchlazy: a lazy device, a tracing runtime and a compiler for PyTorch."""

from torchlazy.lazy.api import (
    flush,
    is_lazy,
    set_target,
    sync,
)


def _autoload() -> None:
    """Entry point of torch's backend autoload: importing this package has registered the device."""


__all__ = ["flush", "is_lazy", "set_target", "sync"]
