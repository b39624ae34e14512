"""Evaluation of policies: suites of tasks, episodes and measurements, metrics, reports, comparisons of runs.

The package imports `agent`, `judge` and `core`. Start with `evaluate.py`.
"""
