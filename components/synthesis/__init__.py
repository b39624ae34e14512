"""Make training tasks, which are PyTorch modules that a policy has to make faster.

Operators of torch and modules of transformers that tasks can use are found ("mined"), tasks are composed of
them, filtered, and written as data sets.

This package imports `core`, `bootstrap`, `policy` and `judge`. Start with `dataset.py`.
"""
