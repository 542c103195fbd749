"""README's first program runs as it stands there, and its three ways train one model."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

README = (Path(__file__).resolve().parents[2] / "README.md").read_text()
PYTHON = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


@pytest.mark.usefixtures("operator_by_operator")
def test_three_ways(capsys):
    names: dict[str, object] = {"__name__": "readme"}
    exec(compile(PYTHON[0], "README.md", "exec"), names)
    assert 0 < float(capsys.readouterr().out) < 3
    assert names["step"].report().replays >= 1
    assert names["model"][0].weight.device.type == "lazy"


@pytest.mark.parametrize("number", range(len(PYTHON)))
def test_blocks_are_python(number):
    compile(PYTHON[number], "README.md", "exec")
