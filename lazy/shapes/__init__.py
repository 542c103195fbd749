"""Result geometries: what an operator's results look like, by our own rules, else by torch's meta and fake kernels.

Enters: an operator and its arguments' geometries. Leaves: geometries, or `CannotInfer`. Below it: trace.
"""
