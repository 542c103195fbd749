"""Numbers that depend on other numbers: expressions, tracked ints and floats, and unification of traces.

Enters: numbers that Python computes with, and traces of one structure. Leaves: expressions in symbols, guards on them,
unified traces with a matcher. Below it: shapes, trace.
"""
