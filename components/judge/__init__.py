"""This package judges kernels: it builds, verifies and times a candidate on a task and returns a verdict.

The package imports `core` and `sandbox`, and `pool/ray_pool.py` also imports `planning`. The main entry
points for other packages are `pool.open_pool`, `judge.Judge` and the records of `verdict.py`. Start with
`judge.py`.
"""
