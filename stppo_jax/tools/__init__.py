"""Programs that examine runs, data and machines.

Commands and benchmarks use these programs. The core of the package imports none
of them.
"""
