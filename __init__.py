"""torchlazy: a lazy device, a tracing runtime and a compiler for PyTorch."""


def _autoload() -> None:
    """Entry point of torch's backend autoload."""
