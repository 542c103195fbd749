"""Primitives that are one library call each: their attributes, metadata rules and tables."""
