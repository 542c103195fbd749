"""`DistributedDataParallel` and `fully_shard` in recorded and compiled programs.

It registers hooks; only `api` imports it. Below it: compiled, device.
"""
