"""What engine and trainer share of their C++: the compiler is called here (`build.py`), memory on large pages is had here
(`memory.py`), and `src/` holds the vector types that the sources of both are written in (`vec.h`) and the team of threads that runs them
(`team.h`)."""
