"""The lossless difference of two packed buffers.

Read `codec.py` (the stream, who makes it, and the functions that find and undo changes: the C++ of `src/`, or numpy without a compiler) and
`efficiency.py` (whether differences pay).
"""
