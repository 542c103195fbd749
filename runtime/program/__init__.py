"""Programs as data: steps, their memory plan, their text on disk, and the Python function that runs them.

Enters: launches, library calls and buffers of a plan. Leaves: `Program`s and the functions made of them.
"""
