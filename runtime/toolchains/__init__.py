"""Compilers of kernels: C++, Numba and Triton, their caches, and how they stay out of the program's way.

Enters: kernel sources. Leaves: loaded kernels. Below it: native.
"""
