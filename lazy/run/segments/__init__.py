"""A forward that was cut from its backward: watched, planned with it as one, run as two programs.

A part of `run`.
"""
