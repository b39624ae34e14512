"""The Prefect flows: the nightly pipeline, its tasks, deployments and automations.

This package imports `components`, but not `components.cli`. Start with `nightly.py`.
"""
