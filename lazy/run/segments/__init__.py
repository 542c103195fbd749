"""Fused pairs on the lazy device: a forward and its backward cut apart, found, planned as one, run as two programs.

A part of `run`.
"""
