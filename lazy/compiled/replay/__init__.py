"""Replaying a template without its Python: guards hold, steps run, results and effects are put in place.

Enters: a template and a call's leaves. Leaves: the call's results. Below it: compiled/sizes.
"""
