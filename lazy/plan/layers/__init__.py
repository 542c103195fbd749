"""Equal layers of a trace: detected, planned once, stamped as often as they repeat, and checked.

A part of `plan`: a pass from a trace to a program, or None where nothing repeats.
"""
