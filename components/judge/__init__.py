"""Measuring and judging kernels: one candidate on one task, with a verdict.

Imports `core` and `sandbox`. Other packages use `pool.open_pool`, `judge.Judge` and the records of
`verdict.py`. Start with `judge.py`.
"""
