"""Private torch API: the only package that names it, each use with its reason, for every version of torch we support.

Enters: tensors, operators, settings. Leaves: plain functions with public meaning. Below it: nothing of lazy/ but its
settings.
"""
