"""Exported programs: the file format, the graph in it, and the runner that needs no compiler.

Enters: a recorded graph with its state. Leaves: files, and callables made of them.
"""
