"""The hand-written models of the zoo, by name.

Invariant: each is small enough to train three steps within a second in eager.
"""

from __future__ import annotations

from tests.zoo import (
    agent_modules,
    generative_modules,
    sequence_modules,
    step_modules,
    structured_modules,
    vision_modules,
)
from tests.zoo.case import Case

_FILES = (vision_modules, sequence_modules, step_modules, structured_modules, agent_modules, generative_modules)
MODULES: dict[str, Case] = {case.name: case for file in _FILES for case in file.CASES}
