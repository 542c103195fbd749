"""What a template depends on: everything that a callable reaches, and whether it is as it was.

Enters: a callable. Leaves: `Guards` that hold or say what broke. Below it: compiled/template.
"""
