"""What a captured call is: a template of steps, sources and results, and its arguments as flat leaves.

Values only. Below it: joint, record.
"""
