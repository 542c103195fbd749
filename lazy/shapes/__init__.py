"""Shape inference: geometries of an operator's results, by our own rules, else by torch's meta and fake kernels.

Enters: an operator and its arguments' geometries. Leaves: geometries, or `CannotInfer`. Below it: trace.
"""
