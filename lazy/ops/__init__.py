"""Operators with hand-written rules: transfers, reads, random numbers, autocast, collectives, composites.

Each file offers `install(recorder)`. Below it: record.
"""
