"""Evaluating policies: suites, metrics, the evaluation itself, the report, and comparisons of runs.

Imports `agent` and `judge`. Start with `evaluate.py`.
"""
