"""CUDA graphs of programs, the memory that they keep, and launches over many tensors at once."""
