"""The Prefect flows: the nightly pipeline, its tasks, and deployments.

This package imports `components`, but not `components.cli`. Start with `nightly.py`.
"""
