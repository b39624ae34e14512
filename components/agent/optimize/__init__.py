"""The optimisation of a user's PyTorch module: a task made from its file, and the search for a faster kernel.

The command `cuda-agent optimize` uses it. Start with `search.py`.
"""
