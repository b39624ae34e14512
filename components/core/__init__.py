"""Definitions that all other packages use: parameters, kernel task, files with digests, errors, progress.

This package imports no other package of the project. Start with `config.py` (all parameters) and `task.py`
(the kernel task).
"""
