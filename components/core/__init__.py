"""Definitions that all other packages use: parameters, kernel task, files with digests, errors, progress.

A kernel task is a PyTorch module that a policy has to make faster. This package imports no other package of
the project. Start with `params.py` (the parameters), `config.py` (how their values are read) and `task.py`
(the kernel task).
"""
