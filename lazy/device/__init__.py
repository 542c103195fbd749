"""The lazy device, `lazy_mode`, and support for modules, optimizers and checkpointing there.

Enters: the user's tensors and modules. Leaves: operators for the recorder. Below it: run, ops, record.
"""
