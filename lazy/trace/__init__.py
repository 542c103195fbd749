"""Data structures of recorded traces: entries and slots, tensor geometries, storages, operator schemas.

Every other package of lazy/ may import it. Values only: nothing here runs an operator or knows the recorder. Below it:
torch_private.
"""
