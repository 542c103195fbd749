"""torchlazy: a lazy device, a tracing runtime and a compiler for PyTorch.

Five ways in: tensors on `device="lazy"`; `with torchlazy.lazy_mode():` over ordinary tensors; `torchlazy.compile(step)`
to trace a step once and replay it; `torchlazy.dump(folder)` to see what was recorded, cut and compiled;
`torchlazy.metrics()` for the counts. See README.md.
"""


def _autoload() -> None:
    """Entry point of torch's backend autoload: importing this package has registered the device."""
    # Stands above the imports: `import torchlazy` imports torch, which looks this up before the line below is done.


from torchlazy.lazy.api import (  # noqa: E402
    dump,
    explain,
    flops,
    flush,
    is_lazy,
    lazy_mode,
    metrics,
    report,
    reset_metrics,
    set_target,
    shadow,
    sync,
    wait_for_compile,
)
from torchlazy.lazy.compile_api import compile  # noqa: E402
from torchlazy.lazy.config import config  # noqa: E402
from torchlazy.lazy.export_api import export, load  # noqa: E402
from torchlazy.lazy.sync_policy import SyncBudgetWarning, SyncError, no_sync, sync_budget  # noqa: E402

__version__ = "0.1.0"


__all__ = [
    "SyncBudgetWarning",
    "SyncError",
    "compile",
    "config",
    "dump",
    "explain",
    "export",
    "flops",
    "flush",
    "is_lazy",
    "lazy_mode",
    "load",
    "metrics",
    "no_sync",
    "report",
    "reset_metrics",
    "set_target",
    "shadow",
    "sync",
    "sync_budget",
    "wait_for_compile",
]
