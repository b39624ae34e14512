"""Optimise a user's PyTorch module: make a task from its file, and search for a faster kernel.

The command `cuda-agent optimize` uses this package. Start with `search.py`.
"""
