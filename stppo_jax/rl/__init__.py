"""The mathematics of the algorithms: pure functions of arrays.

Nothing here knows of models, files or logging.
"""
