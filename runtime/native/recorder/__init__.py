"""The native recorder in C++: sources that runtime/native/recorder_library.py compiles."""
