"""`torchlazy.export`: a standalone program, recorded without being run, for a range of sizes.

Enters: a module and examples. Leaves: an `ExportedProgram` of runtime/. Below it: compiled, plan.
"""
