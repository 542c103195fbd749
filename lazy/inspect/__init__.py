"""Diagnostics: explain, dump, shadow and flops, and the pictures and scripts that they write.

Enters: events of the driver and the recorder. Leaves: texts and files. Below it: everything but `api`.
"""
