"""Foundations of every other package: parameters, the kernel task, files with digests, errors, progress.

Imports nothing else of this project. Start with `config.py` (all parameters) and `task.py` (the kernel task).
"""
