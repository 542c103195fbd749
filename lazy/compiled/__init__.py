"""`torchlazy.compile`: the callable, which template serves a call, when to capture and when to run its Python.

Enters: a call. Leaves: its results, replayed or not. Its rooms, from below: template, guards, capture, sizes, replay.
"""
