"""`torchlazy.export`: a program of its own, recorded without being run, for a range of sizes.

Enters: a module and examples. Leaves: an `ExportedProgram` of runtime/. Below it: compiled, plan.
"""
