"""The compiler's column: from a cut trace to a program, one stage a line in `pipeline`.

Enters: `CutTrace`s. Leaves: plans and compiled programs. It knows autograd, prims and inductor; it knows no recorder.
Below it: trace, numbers. `plan/layers` is a part of it.
"""
