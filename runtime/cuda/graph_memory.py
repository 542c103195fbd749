"""What the CUDA graphs of one device share: the memory that they work in, and the stream that they are captured on.

Graphs run one after the other, and what they give is copied out before another one runs, so all of them work in one
pool. torch's allocator hands memory of a pool out again on the stream only that it was freed on: with a stream for each
capture, no graph would work in another's memory, and libraries would keep a workspace for each. It takes memory from
the device in pieces of the size that it is asked for, and joins no two of these: what a graph needs is asked for as one
piece first, and given back, so that its values are cut from that and what they leave joins again.

Invariant: no graph runs before those that ran earlier are done, on whatever streams they were replayed.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torchlazy.runtime.program.stages import Border

T = TypeVar("T")
_LEAST_PIECE = 32 << 20  # bytes; less than that is not worth a piece of its own


class GraphMemory:
    """The pool and the stream of one device's graphs. `beside`: another one's stream, and a pool of its own."""

    def __init__(self, device: torch.device, beside: GraphMemory | None = None) -> None:
        self.device = device
        self._pool: Any = None  # taken at the first capture
        self._main = beside or self
        self._stream: torch.cuda.Stream = beside._stream if beside is not None else torch.cuda.Stream(device)
        self._last: torch.cuda.Stream | None = None  # that a graph of whatever pool was replayed on
        self.replays = 0
        self._graphs: weakref.WeakSet[Any] = weakref.WeakSet()  # as long as one lives, the pool keeps its memory
        self._room = 0  # bytes that were asked for in one piece

    def captured(self, function: Callable[[], T], room: int = 0) -> tuple[Any, T]:
        """The graph of what `function` launches, and its result; nothing is run. Raises what the function raises, and
        RuntimeError where the device refuses. `room`: bytes that it will hold at once, as far as is known."""
        (graph,), result = self.captured_in_stages(function, Border(), room)
        return graph, result

    def captured_in_stages(self, function: Callable[[], T], border: Border, room: int = 0) -> tuple[list[Any], T]:
        """As `captured`; a graph ends, and the next one begins, wherever `function` calls `border`.

        Libraries may load kernels and take workspaces while they are captured ("relaxed"): nothing need run before.
        """
        alive = list(self._graphs)  # none of them ends in the meantime
        if not alive:  # torch takes up no pool whose last graph is gone while somebody holds a value in it
            self._pool, self._room = torch.cuda.graph_pool_handle(), 0
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()
        graphs: list[Any] = []

        def begin() -> None:
            graphs.append(torch.cuda.CUDAGraph())
            graphs[-1].capture_begin(self._pool, capture_error_mode="relaxed")

        def go_on() -> None:
            graphs[-1].capture_end()
            begin()

        with torch.cuda.stream(self._stream):
            begin()
            border.then = go_on
            try:
                self._ask_for(room)
                result = function()
            except BaseException:
                with contextlib.suppress(Exception):  # it says once more that the capture is not whole
                    graphs[-1].capture_end()
                raise
            finally:
                border.then = None
            graphs[-1].capture_end()
        self._graphs.update(graphs)
        return graphs, result

    def _ask_for(self, room: int) -> None:
        if room - self._room > _LEAST_PIECE:
            torch.empty(room - self._room, dtype=torch.uint8, device=self.device)
            self._room = room

    def run_beside(self, function: Callable[[], object]) -> None:
        """Run it as it is, on the stream that captures use; work that is launched afterwards waits for it."""
        current = torch.cuda.current_stream(self.device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            function()
        current.wait_stream(self._stream)

    def wait_for_last(self) -> torch.cuda.Stream:
        """The current stream, which goes on after the graph that was replayed last: before its memory is written to."""
        current = torch.cuda.current_stream(self.device)
        main = self._main  # graphs of all pools share what libraries keep for the stream that they were captured on
        if main._last is not None and main._last != current:
            current.wait_stream(main._last)
        return current

    def replay(self, graph: Any) -> None:
        """Run a graph on the current stream."""
        self._main._last = self.wait_for_last()
        self.replays += 1
        graph.replay()


@functools.cache
def graph_memory(device: torch.device) -> GraphMemory:
    """The one of this device."""
    return GraphMemory(device)


def memory_of_its_own(device: torch.device) -> GraphMemory:
    """For graphs between whose replays those of others run: these leave alone what it holds."""
    return GraphMemory(device, graph_memory(device))
