"""The Prefect flows: the nightly pipeline, its tasks, deployments and automations.

Imports `components`, but not `components.cli`. Start with `nightly.py`.
"""
