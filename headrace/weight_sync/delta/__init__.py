"""The lossless difference of two packed buffers.

Read `codec.py` (the stream, and who makes it), `search.py` (the functions that find and undo changes: C++, or numpy without a
compiler), `build.py` and `src/` (the C++), `watch.py` (whether differences pay).
"""
