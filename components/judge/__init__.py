"""This package judges kernels: it builds, verifies and times a candidate and returns a verdict.

A task is a PyTorch module that is to be made faster, and a candidate is an implementation of this module with
kernels of its own. The package imports `core` and `sandbox`, and `pool/ray_pool.py` also imports `planning`.
The main entry points for other packages are `pool.open_pool`, `judge.Judge` and the records of `verdict.py`.
Start with `judge.py`.
"""
