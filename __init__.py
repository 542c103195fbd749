"""torchlazy: a lazy device, a tracing runtime and a compiler for PyTorch.

Three ways in: `torchlazy.compile(step)` traces a step once and replays it; `with torchlazy.lazy_mode():` records over
ordinary tensors; tensors on `device="lazy"` are always recorded. `report()`, `explain(fn, *args)`, `shadow(folder)`,
`dump(folder)` and `metrics()` tell what was recorded, cut and compiled, and whether it is right. See README.md.
"""


def _autoload() -> None:
    """Entry point of torch's backend autoload: importing this package has registered the device."""
    # Stands above the imports: `import torchlazy` imports torch, which looks this up before the line below is done.


from torchlazy.lazy.api import (  # noqa: E402
    disable,
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
from torchlazy.lazy.compiled.front_door import compile  # noqa: E402
from torchlazy.lazy.config import config  # noqa: E402
from torchlazy.lazy.export.front_door import ExportedFileError, ExportError, export, load  # noqa: E402
from torchlazy.lazy.run.sync_policy import SyncBudgetWarning, SyncError, SyncInside, no_sync, sync_budget  # noqa: E402

__version__ = "0.1.0"


__all__ = [
    "ExportError",
    "ExportedFileError",
    "SyncBudgetWarning",
    "SyncError",
    "SyncInside",
    "compile",
    "config",
    "disable",
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
