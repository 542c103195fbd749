"""The hand-written models of the zoo, by name.

Invariant: each is small enough to train three steps within a second in eager.
"""

from __future__ import annotations

from tests.zoo import sequence_modules, step_modules, vision_modules
from tests.zoo.case import Case

MODULES: dict[str, Case] = {
    case.name: case for case in (*vision_modules.CASES, *sequence_modules.CASES, *step_modules.CASES)
}
