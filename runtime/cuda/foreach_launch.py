"""The tables of foreach launches: one row of pointers, sizes and scalars for each tensor.

Invariant: a row is 64-bit words in the order that `KernelSource` documents; floats stand as their bit patterns. A table
on a device is never overwritten: other contents get other memory, so launches in flight keep theirs.
"""

from __future__ import annotations

import struct
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torchlazy.runtime.program.program import KernelSource

_KEPT_TABLES = 8


def words_of_row(source: KernelSource) -> int:
    """How many 64-bit words a row has."""
    return len(source.pointers) + source.sizes + len(source.row_scalars)


def pack_rows(source: KernelSource, rows: int) -> Callable[..., bytes]:
    """A function from all rows' values, flat, to the table's bytes."""
    scalars = "".join("d" if kind is float else "q" for kind in source.row_scalars)
    row = "q" * (len(source.pointers) + source.sizes) + scalars
    return struct.Struct("=" + row * rows).pack


def table_tensor(content: bytes, device: str = "cpu") -> torch.Tensor:
    """The table as an int64 tensor. A copy to a device starts from pinned memory: from any other the host would wait
    until the device has done all that it was given before."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # the buffer is read-only, and is only read
        host = torch.frombuffer(content, dtype=torch.int64)
    return host.clone() if device == "cpu" else host.pin_memory().to(device, non_blocking=True)


@dataclass
class DeviceTables:
    """Tables of one foreach launch on one CUDA device: copied only when their contents are new.

    While a CUDA graph is captured nothing may be copied from the host: the table gets the memory that `prepare` set
    aside, and `pending` holds what `fill_pending` must copy there before the first replay. Memory of the graph's own
    pool would not do: kernels that run earlier in a replay may have had the same memory for their results.
    """

    device: str
    words: int  # of the table
    kept: dict[tuple[int, bytes], torch.Tensor] = field(default_factory=dict)
    pending: list[tuple[torch.Tensor, bytes]] = field(default_factory=list)
    aside: torch.Tensor | None = None
    captured: list[torch.Tensor] = field(default_factory=list)  # tables that graphs read: kept as long as the program

    def prepare(self) -> None:
        """Before a capture: memory for the table of the launch that is captured."""
        self.pending.clear()  # of a capture that was refused
        self.aside = torch.empty(self.words, dtype=torch.int64, device=self.device)

    def address(self, stream: int, content: bytes) -> int:
        """Where the table is on the device, for launches on `stream`."""
        is_frozen = self.aside is not None and torch.cuda.is_current_stream_capturing()
        table = None if is_frozen else self.kept.get((stream, content))
        if table is None:
            table = self._place(stream, content)
        return table.data_ptr()

    def fill_pending(self) -> None:
        """Copy the tables of a capture that has ended."""
        for table, content in self.pending:
            table.copy_(table_tensor(content))
        self.pending.clear()

    def _place(self, stream: int, content: bytes) -> torch.Tensor:
        if torch.cuda.is_current_stream_capturing():
            table, self.aside = self.aside, None
            if table is None:
                raise RuntimeError("a foreach launch is captured in a CUDA graph without `Executable.prepare_capture`")
            self.pending.append((table, content))
            self.captured.append(table)
            return table
        table = table_tensor(content, self.device)
        while len(self.kept) >= _KEPT_TABLES:
            self.kept.pop(next(iter(self.kept)))
        self.kept[stream, content] = table
        return table
