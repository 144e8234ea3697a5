"""What engine and trainer share of their C++: the compiler is called here (`build.py`), memory on large pages is had here
(`memory.py`), and `src/` holds the vector types and the products that the sources of both are written in, with one file for each kind of processor."""
