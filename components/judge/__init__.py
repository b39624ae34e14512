"""This package judges kernels: it builds, verifies and times a candidate on a task and returns a verdict.

The package imports `core` and `sandbox`. Other packages use `pool.open_pool`, `judge.Judge` and the
records of `verdict.py`. Start with `judge.py`.
"""
