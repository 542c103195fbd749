"""Templates for all sizes: made from captures that differ in sizes alone.

Enters: captured samples. Leaves: a template at given sizes. Below it: compiled/capture.
"""
