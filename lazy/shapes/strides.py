"""The strides that ATen gives the results of elementwise operators, computed on shapes and strides alone.

Invariant: exact or unknown. What is returned here is what the real kernels return, also where sizes of 1 or 0, expanded
or permuted operands make several layouts equally good (tests/lazy/test_shape_rules.py).

The order: operands of one shape that are all row-major, all channels-last or all of the same dense strides keep them.
Else the dimensions are sorted, innermost first, by the operands' strides, an earlier operand counting before a later
one and a broadcast dimension not at all; the result is dense in that order.
"""

from __future__ import annotations

from collections.abc import Sequence

from torchlazy.prims.meta import contiguous_strides

Shape = tuple[int, ...]
Layout = tuple[Shape, Shape]  # shape and strides


def plain_strides(shape: Shape) -> Shape:
    """Row-major strides."""
    return contiguous_strides(shape)  # type: ignore[return-value]


def is_contiguous(shape: Shape, strides: Shape) -> bool:
    """Row-major, whatever the strides of sizes of 1 say; tensors without elements are."""
    expected = 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size == 0:
            return True
        if size != 1:
            if stride != expected:
                return 0 in shape
            expected *= size
    return True


def is_channels_last(shape: Shape, strides: Shape) -> bool:
    """Images whose channels are innermost; strides of sizes of 1 do not count."""
    return len(shape) == 4 and _is_dense_in(shape, strides, (1, 3, 2, 0))


def _is_dense_in(shape: Shape, strides: Shape, order: Sequence[int]) -> bool:
    expected = 1
    for dim in order:
        if shape[dim] != 1:
            if strides[dim] != expected:
                return False
            expected *= shape[dim]
    return True


def is_dense(shape: Shape, strides: Shape) -> bool:
    """Whether each address between the first and the last element belongs to exactly one element."""
    if is_contiguous(shape, strides):
        return True
    order = sorted((d for d in range(len(shape)) if shape[d] > 1), key=strides.__getitem__)
    return _is_dense_in(shape, strides, order)


def dense_in_order(shape: Shape, order: Sequence[int]) -> Shape:
    """Strides of a dense tensor whose dimensions lie in `order`, innermost first."""
    strides, step = [0] * len(shape), 1
    for dim in order:
        strides[dim] = step
        step *= shape[dim]
    return tuple(strides)


def broadcast(shapes: Sequence[Shape]) -> Shape | None:
    """The common shape, or None where there is none."""
    result: list[int] = []
    for shape in shapes:
        if len(shape) > len(result):
            result = [1] * (len(shape) - len(result)) + result
        for i in range(1, len(shape) + 1):
            size = shape[-i]
            if result[-i] == 1:
                result[-i] = size
            elif size not in (1, result[-i]):
                return None
    return tuple(result)


def elementwise_strides(shape: Shape, operands: Sequence[Layout], with_number: bool = False) -> Shape:
    """Strides of the new result of an elementwise operator.

    `shape` is the operands' common shape. `with_number`: a Python number is among the operands; it counts as an
    operand without dimensions.
    """
    if all(given == shape for given, _ in operands) and not (with_number and shape):
        kept = _kept(shape, operands)
        if kept is not None:
            return kept
    order = _iteration_order(shape, [_aligned(shape, *operand) for operand in operands])
    if order == tuple(reversed(range(len(shape)))):
        return plain_strides(shape)
    return dense_in_order(shape, order)


def _kept(shape: Shape, operands: Sequence[Layout]) -> Shape | None:
    """The layout that all operands share, if they do."""
    if all(is_contiguous(*operand) for operand in operands):
        return plain_strides(shape)
    if all(is_channels_last(*operand) for operand in operands):
        return dense_in_order(shape, (1, 3, 2, 0))
    first = operands[0][1]
    if all(strides == first for _, strides in operands) and is_dense(shape, first):
        return first
    return None


def _aligned(shape: Shape, given: Shape, strides: Shape) -> Shape:
    """An operand's strides over the common shape: 0 in broadcast dimensions."""
    missing = len(shape) - len(given)
    return (0,) * missing + tuple(
        0 if size == 1 and wanted != 1 else stride
        for size, stride, wanted in zip(given, strides, shape[missing:], strict=True)
    )


def _iteration_order(shape: Shape, operands: Sequence[Shape]) -> tuple[int, ...]:
    """Dimensions from the innermost to the outermost: an insertion sort in which some pairs do not compare."""
    order = list(reversed(range(len(shape))))
    for position in range(1, len(order)):
        moving = position
        for before in range(position - 1, -1, -1):
            sign = _compare(shape, operands, order[before], order[moving])
            if sign > 0:
                order[before], order[moving] = order[moving], order[before]
                moving = before
            elif sign < 0:
                break
    return tuple(order)


def _compare(shape: Shape, operands: Sequence[Shape], inner: int, outer: int) -> int:
    """1 where `inner` belongs outside `outer`, -1 where it is right, 0 where no operand decides."""
    for strides in operands:
        a, b = strides[inner], strides[outer]
        if a == 0 or b == 0:
            continue
        if a != b:
            return -1 if a < b else 1
        if shape[inner] > shape[outer]:
            return 1
    return 0
