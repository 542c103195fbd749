"""`DistributedDataParallel`: its reducer's C++ reads and writes memory of its own by address, outside of `lazy_mode`.

The reducer lays out buckets and marks used parameters without asking an operator; gradients go into the buckets, and
out of them, by operators, which are recorded as any other, and each collective cuts. In compiled calls plain modules do
without the reducer (`lazy/reduced_gradients.py`); a call with another one inside is not captured: it runs its Python,
recorded. Communication hooks leave functions to futures; these run in threads of torch's, where no mode is open: hooks
run outside of the mode too, on the buckets' memory.

Invariant: no operator on the reducer's own memory is pending, and no mode of ours is open, while C++ or a hook runs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch.distributed
from torch.nn.parallel import DistributedDataParallel
from torchlazy.lazy.outside_mode import outside_lazy_mode
from torchlazy.lazy.recorder import Recorder
from torchlazy.lazy.reduced_gradients import reducing_forward
from torchlazy.lazy.torch_private import without_our_modes


def install(recorder: Recorder) -> None:
    """Let the reducer be made, and its buckets be laid out anew before a forward pass, outside of `lazy_mode`.

    Each forward pass with gradients asks for new buckets; so operators of the last backward on the map of used
    parameters (a fill that is still pending) have run before the next one marks parameters there by address.
    """
    if not torch.distributed.is_available():
        return

    def outside(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            with outside_lazy_mode(recorder):
                return function(*args, **kwargs)

        return call

    reducer: Any = torch.distributed.Reducer
    reducer._rebuild_buckets = outside(reducer._rebuild_buckets)
    kind: Any = DistributedDataParallel
    kind.__init__ = outside(kind.__init__)
    kind.forward = reducing_forward(kind.forward, recorder)
    register = kind.register_comm_hook

    def without_mode(hook: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(hook)
        def call(*args: Any) -> Any:
            if not recorder.mode_depth:
                return hook(*args)
            recorder.cut("communication hook")
            with without_our_modes():  # the recorder stays free for the threads that go on with the hook's work
                return hook(*args)

        call.hook_given = hook  # type: ignore[attr-defined]
        return call

    @functools.wraps(register)
    def register_comm_hook(self: Any, state: object, hook: Callable[..., Any]) -> None:
        register(self, state, without_mode(hook) if callable(hook) else hook)

    kind.register_comm_hook = register_comm_hook
