"""From a cut trace to a compiled program, one stage a line in `pipeline`.

Enters: `CutTrace`s. Leaves: plans and compiled programs. It knows autograd, prims and inductor, but not the recorder.
Below it: trace, numbers. `plan/layers` is a part of it.
"""
