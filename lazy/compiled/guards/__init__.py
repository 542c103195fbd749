"""Guards: discovery of everything that a callable can reach, and the test whether it is as it was at the capture.

Enters: a callable. Leaves: `Guards` that hold or say what broke. Below it: compiled/template.
"""
