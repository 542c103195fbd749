"""Operators that the recorder treats by hand: transfers, reads, random numbers, autocast, collectives, composites.

Each file offers `install(recorder)`. Below it: record.
"""
