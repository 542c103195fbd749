"""Capture: a call runs its Python recorded, and what it reads, writes and leaves behind becomes a template.

Enters: a call. Leaves: `Captured`, with a template or the reason why there is none. Below it: compiled/guards.
"""
