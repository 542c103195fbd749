"""Recording: `LazyTensor`, the recorder with its running trace, and how memory is read and written.

Enters: operators on lazy tensors. Leaves: a cut trace with the memory that it reads, handed to the driver of `run`.
Below it: numbers, shapes, trace.
"""
