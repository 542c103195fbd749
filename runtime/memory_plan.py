"""When memory is given back, and which dead memory new values take over.

Work in progress.
"""

from torchlazy.prims.meta import TensorMeta


def span_bytes(meta: TensorMeta) -> int:
    """Bytes from the first to the last element."""
    if 0 in meta.shape:
        return 0
    last = sum((int(size) - 1) * int(stride) for size, stride in zip(meta.shape, meta.strides, strict=True))
    return (last + 1) * meta.dtype.itemsize
