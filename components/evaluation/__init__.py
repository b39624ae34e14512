"""Evaluation of policies: suites of tasks, episodes and measurements, metrics, reports, comparisons of runs.

Imports `agent` and `judge`. Start with `evaluate.py`.
"""
