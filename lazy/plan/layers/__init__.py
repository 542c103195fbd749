"""Equal layers of a trace: found, planned once, and their loops linked to those of the whole.

A part of `plan`: a pass from a trace to units, and one from their loops to the whole's.
"""
