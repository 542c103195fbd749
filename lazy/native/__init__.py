"""The native recorder's Python side: what it logged becomes a trace, and a trace's program serves what it follows.

Enters: logs of the C++ in runtime/native/recorder. Leaves: `CutTrace`s for the driver, plans for the C++.
"""
