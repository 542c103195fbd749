"""Native code of our own: compiled in the background, loaded once, with a path in Python wherever it is not there.

Each source stands beside what loads it.
"""
