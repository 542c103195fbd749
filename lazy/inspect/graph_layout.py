"""Places a dataflow graph on a page: rows from top to bottom, few crossings, straight lines where possible.

Invariant: every box lies in a row below the rows of its sources, no two boxes overlap, and equal input gives equal
output. A source more than `MAX_SPAN` rows away gets no line but is named inside the box (`PlacedBox.far`): a line
across a hundred rows says less than a name does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

MAX_SPAN = 4  # rows that a drawn line may cross
ROW_LIMIT = 12  # boxes in a row, so that a thousand parallel updates make a page and not a ribbon
GAP_X = 18.0
GAP_Y = 34.0
SWEEPS = 6
PULL = 0.94  # of a box's wanted distance from the middle is kept, or a deep graph would drift across a wide page


@dataclass(frozen=True)
class Box:
    """One thing to place: its sources are names of boxes that stand earlier in the list."""

    name: str
    width: float
    height: float
    sources: tuple[str, ...] = ()


@dataclass(frozen=True)
class PlacedBox:
    """Where a box is: its centre and its upper edge; `far` are sources without a line."""

    name: str
    x: float
    y: float
    row: int
    far: tuple[str, ...] = ()


@dataclass(frozen=True)
class Layout:
    """Boxes by name; lines as points from a source's lower edge to a reader's upper edge; the page's size."""

    boxes: dict[str, PlacedBox]
    lines: tuple[tuple[str, str, tuple[tuple[float, float], ...]], ...]
    width: float
    height: float


@dataclass
class _Cell:
    """A box, or a point in a row that a line passes through."""

    width: float
    above: list[_Cell] = field(default_factory=list)
    below: list[_Cell] = field(default_factory=list)
    x: float = 0.0


def plan_layout(boxes: Sequence[Box]) -> Layout:
    """Rows, then the order in each row, then positions."""
    row_of = assign_rows(boxes)
    far = {box.name: tuple(s for s in box.sources if row_of[box.name] - row_of[s] > MAX_SPAN) for box in boxes}
    rows: list[list[_Cell]] = [[] for _ in range(max(row_of.values(), default=-1) + 1)]
    cells = {}
    for box in boxes:
        cells[box.name] = _Cell(box.width)
        rows[row_of[box.name]].append(cells[box.name])
    chains = {}
    for box in boxes:
        for source in dict.fromkeys(box.sources):
            if source not in far[box.name]:
                chains[source, box.name] = _chain(cells, rows, row_of, source, box.name)
    _order_rows(rows)
    _position_rows(rows)
    return _as_layout(boxes, row_of, far, rows, cells, chains)


def assign_rows(boxes: Sequence[Box]) -> dict[str, int]:
    """The first row with room below all sources; inputs, and chains of one box after another from them (a transposed
    weight), stand as low as their readers allow."""
    floating: dict[str, bool] = {}
    for box in boxes:
        floating[box.name] = len(set(box.sources)) <= 1 and all(floating[source] for source in box.sources)
    row_of: dict[str, int] = {}
    filled: dict[int, int] = {}
    for box in boxes:
        if floating[box.name]:
            continue
        row = 1 + max((row_of[source] for source in box.sources if not floating[source]), default=0)
        while filled.get(row, 0) >= ROW_LIMIT:
            row += 1
        row_of[box.name] = row
        filled[row] = filled.get(row, 0) + 1
    first_reader: dict[str, int] = {}
    for box in reversed(boxes):
        if floating[box.name]:
            row_of[box.name] = first_reader.get(box.name, 1) - 1
        for source in box.sources:
            first_reader[source] = min(first_reader.get(source, row_of[box.name]), row_of[box.name])
    top = min(row_of.values(), default=0)
    return {box.name: row_of[box.name] - top for box in boxes}


def _chain(
    cells: dict[str, _Cell], rows: list[list[_Cell]], row_of: dict[str, int], source: str, reader: str
) -> list[_Cell]:
    """Cells from source to reader, with a thin one in each row between."""
    chain = [cells[source]]
    for row in range(row_of[source] + 1, row_of[reader]):
        chain.append(_Cell(2.0))
        rows[row].append(chain[-1])
    chain.append(cells[reader])
    for upper, lower in pairwise(chain):
        upper.below.append(lower)
        lower.above.append(upper)
    return chain


def _order_rows(rows: list[list[_Cell]]) -> None:
    """Sort each row by the mean place of its neighbours, down and up in turn: the barycentre heuristic."""
    place: dict[int, float] = {}
    for row in rows:
        # Rows differ in length: places are fractions of the row, or long rows would pull everything to the right.
        place.update({id(cell): (i + 0.5) / len(row) for i, cell in enumerate(row)})
    for sweep in range(SWEEPS):
        down = sweep % 2 == 0
        for row in rows if down else reversed(rows):
            wanted = {}
            for cell in row:
                neighbours = cell.above if down else cell.below
                places = [place[id(other)] for other in neighbours]
                wanted[id(cell)] = sum(places) / len(places) if places else place[id(cell)]
            row.sort(key=lambda cell: wanted[id(cell)])
            place.update({id(cell): (i + 0.5) / len(row) for i, cell in enumerate(row)})


def _position_rows(rows: list[list[_Cell]]) -> None:
    """Move every cell towards the mean of its neighbours as far as the order in its row allows."""
    for row in rows:
        for cell, x in zip(row, nearest_places([0.0] * len(row), [c.width for c in row]), strict=True):
            cell.x = x
    for sweep in range(2 * SWEEPS):
        for row in rows if sweep % 2 == 0 else reversed(rows):
            wanted = []
            for cell in row:
                neighbours = (cell.above or cell.below) if sweep % 2 == 0 else (cell.below or cell.above)
                wanted.append(PULL * (sum(o.x for o in neighbours) / len(neighbours) if neighbours else cell.x))
            for cell, x in zip(row, nearest_places(wanted, [c.width for c in row]), strict=True):
                cell.x = x


def nearest_places(wanted: Sequence[float], widths: Sequence[float]) -> list[float]:
    """Centres nearest to `wanted` (least squares) that keep the order and do not overlap.

    Subtracting the room that lies left of each centre turns "do not overlap" into "do not decrease", and the nearest
    non-decreasing sequence comes from pooling neighbours that are in the wrong order.
    """
    offsets, total = [], 0.0
    for i, width in enumerate(widths):
        total += 0.0 if i == 0 else (widths[i - 1] + width) / 2 + GAP_X
        offsets.append(total)
    pools: list[tuple[float, int]] = []  # (mean, members)
    for want, offset in zip(wanted, offsets, strict=True):
        pools.append((want - offset, 1))
        while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
            (mean2, count2), (mean1, count1) = pools.pop(), pools.pop()
            pools.append(((mean1 * count1 + mean2 * count2) / (count1 + count2), count1 + count2))
    flat = [mean for mean, count in pools for _ in range(count)]
    return [value + offset for value, offset in zip(flat, offsets, strict=True)]


def _as_layout(
    boxes: Sequence[Box],
    row_of: dict[str, int],
    far: dict[str, tuple[str, ...]],
    rows: list[list[_Cell]],
    cells: dict[str, _Cell],
    chains: dict[tuple[str, str], list[_Cell]],
) -> Layout:
    heights = [0.0] * len(rows)
    for box in boxes:
        heights[row_of[box.name]] = max(heights[row_of[box.name]], box.height)
    tops, y = [], 0.0
    for height in heights:
        tops.append(y)
        y += height + GAP_Y
    everything = [cell for row in rows for cell in row]
    left = min((cell.x - cell.width / 2 for cell in everything), default=0.0)
    right = max((cell.x + cell.width / 2 for cell in everything), default=0.0)
    height_of = {box.name: box.height for box in boxes}
    placed = {
        box.name: PlacedBox(box.name, cells[box.name].x - left, tops[row_of[box.name]], row_of[box.name], far[box.name])
        for box in boxes
    }
    lines = []
    for (source, reader), chain in chains.items():
        points = [(placed[source].x, placed[source].y + height_of[source])]
        for step, cell in enumerate(chain[1:-1], start=1):
            row = row_of[source] + step
            points += [(cell.x - left, tops[row]), (cell.x - left, tops[row] + heights[row])]
        points.append((placed[reader].x, placed[reader].y))
        lines.append((source, reader, tuple(points)))
    return Layout(placed, tuple(lines), right - left, max(0.0, y - GAP_Y))
