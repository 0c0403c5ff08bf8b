"""The mathematics of the algorithms: pure functions of arrays.

The modules of this package do not use models, files or logging.
"""
