"""What engine and trainer share of their C++: the compiler is called here (`build.py`), memory on large pages is had here
(`memory.py`), the cores that there are for threads are counted here (`cores.py`), and `src/` holds what the sources of both are written in: the vector types (`vec.h`), the products (`product.h`, with one
file for each kind of processor), and the team of threads that runs them (`team.h`)."""
