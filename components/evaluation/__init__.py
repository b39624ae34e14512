"""Evaluation of policies: suites of tasks, episodes and measurements, metrics, reports, comparisons of runs.

A suite is a set of kernel tasks, PyTorch modules that a policy has to make faster. The package imports
`agent`, `judge` and `core`. Start with `evaluate.py`.
"""
