"""Private names of torch: the only room that spells them, each use with its reason, for every version of torch we
support.

Enters: tensors, operators, settings. Leaves: plain functions with public meaning. Below it: nothing of lazy/ but its
settings.
"""
