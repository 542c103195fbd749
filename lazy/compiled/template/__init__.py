"""Call templates: a captured call as steps, sources, results and effects, and its arguments as flat leaves.

Values only. Below it: joint, record.
"""
