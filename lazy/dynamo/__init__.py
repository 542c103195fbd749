"""`torch.compile(backend="torchlazy")`: the entry point, and the kinds of calls that it compiles for.

Enters: graphs of torch.compile. Leaves: a callable. Below it: compiled.
"""
