"""Judging of kernels: build, verify and measure one candidate on one task, and return a verdict.

The package imports `core` and `sandbox`. Other packages use `open_pool.open_pool`, `judge.Judge` and the
records of `verdict.py`. Start with `judge.py`.
"""
