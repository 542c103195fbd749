"""Following a known trace: the path from cut to cut, and the steps that compare an operator with what came last time.

A part of `record`: an operator that matches costs one comparison; the first that differs goes back to the recorder.
"""
