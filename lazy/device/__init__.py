"""The ways in: the lazy device, `lazy_mode`, and what modules, optimizers and checkpointing need there.

Enters: the user's tensors and modules. Leaves: operators for the recorder. Below it: run, ops, record.
"""
