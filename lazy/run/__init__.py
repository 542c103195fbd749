"""Runs cut traces: the driver, programs and their tiers, shape families, compile workers, the interpreter.

Enters: a cut trace with memory and scalars. Leaves: its outputs. Below it: plan, record. `run/segments` is a part of
it.
"""
