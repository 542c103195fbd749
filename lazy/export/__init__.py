"""`torchlazy.export`: a program in torch's own form, recorded without being run, for a range of sizes.

Enters: a module and examples. Leaves: a `torch.export.ExportedProgram`. Below it: compiled, plan.
"""
