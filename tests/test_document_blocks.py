"""The ```python blocks of README.md and docs/ run as they are written.

A fence may say more after its language, for this test and for readers of the source: `continues` (the block goes on
where the page's block before it ended; otherwise it stands alone), `torchrun` (it is one process of a group).

Invariant: every block runs, in one process, in a folder of its own; settings are put back after each page.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from torchlazy.lazy import config

ROOT = Path(__file__).resolve().parents[1]
PAGES = ["README.md", *sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").glob("*.md"))]
_BLOCK = re.compile(r"^```python *([^\n]*)\n(.*?)^```", re.DOTALL | re.MULTILINE)
_WORDS = {"continues", "torchrun"}
_GROUP = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}


@cache
def blocks() -> list[tuple[str, int, set[str], str]]:
    """(page, line of the fence, words of the fence, source) of each block."""
    found = []
    for page in PAGES:
        text = (ROOT / page).read_text()
        for block in _BLOCK.finditer(text):
            line = text[: block.start()].count("\n") + 1
            found.append((page, line, set(block[1].split()), block[2]))
    return found


def _run_all() -> dict[str, Any]:
    """What became of each block: its error, or an empty text; and what README's first block left."""
    import traceback

    import torch
    import torchlazy

    settings = {name: getattr(torchlazy.config, name) for name in config._DEFAULTS}
    became: dict[str, Any] = {}
    names: dict[str, Any] = {}
    page_before = ""
    for page, line, words, source in blocks():
        if page != page_before:
            for name, value in settings.items():
                setattr(torchlazy.config, name, value)
            torch.manual_seed(0)
        if "continues" not in words or page != page_before:
            names = {"__name__": "__main__"}
        page_before = page
        if "torchrun" in words:
            os.environ |= _GROUP
        try:
            exec(compile("\n" * line + source, str(ROOT / page), "exec"), names)
            became[f"{page}:{line}"] = ""
        except BaseException:
            became[f"{page}:{line}"] = traceback.format_exc()
        if page == "README.md" and "front" not in became:
            report = names["step"].report()
            became["front"] = {"replays": report.replays, "kernels": torchlazy.metrics()["kernels"]}
    return became


@cache
def _became(folder: Path) -> dict[str, Any]:
    child = subprocess.run(
        [sys.executable, __file__, str(folder / "became.json")], cwd=folder, capture_output=True, text=True, timeout=300
    )
    assert child.returncode == 0, child.stderr
    found: dict[str, Any] = json.loads((folder / "became.json").read_text())
    return found


@pytest.fixture(scope="module")
def became(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return _became(tmp_path_factory.mktemp("blocks"))


@pytest.mark.parametrize("block", [f"{page}:{line}" for page, line, *_ in blocks()])
def test_a_block_runs_as_written(block: str, became: dict[str, Any]) -> None:
    assert not became[block], became[block]


def test_words_of_fences_are_known() -> None:
    unknown = {f"{page}:{line}": words - _WORDS for page, line, words, _ in blocks() if words - _WORDS}
    assert not unknown


def test_the_front_example_reaches_compiled_code(became: dict[str, Any]) -> None:
    assert became["front"]["replays"] and became["front"]["kernels"]


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(json.dumps(_run_all()))
