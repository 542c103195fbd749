"""Following a known trace: the path from cut to cut, and the steps that compare an operator with last time's.

A part of `record`: an operator that matches costs one comparison; the first that differs goes back to the recorder.
"""
