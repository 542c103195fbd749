"""The grammar of what is recorded: traces, their entries and slots, geometries of tensors, storages, operators'
schemas.

Every other room may import it. Values only: nothing here runs an operator or knows the recorder. Below it:
torch_private.
"""
