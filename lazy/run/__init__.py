"""Running what was cut: the driver, programs and their tiers, families of shapes, workers, the interpreter.

Enters: a cut trace with memory and numbers. Leaves: its outputs. Below it: plan, record. `run/segments` is a part of
it.
"""
