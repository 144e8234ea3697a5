"""The queue for a machine with a GPU: thirteen entries of at most three minutes, each with predictions, verdicts and a file of results.

    make device                                   entries without a result on this card first, in ten minutes
    make device ENTRIES="smoke decode" BUDGET=300
    make device-rehearsal                         all of them on the CPU, with tiny shapes: finds typos, its figures mean nothing

`__main__.py` orders the entries and ends them at their limits; `entry.py` says what an entry and its figures are; `loads.py` makes models,
engines and trainers for them; `predictions.py` has the formulas. The results are in `results/`, and `make docs` makes docs/gpu_queue.md and the
planner's measured rates of them.
"""
