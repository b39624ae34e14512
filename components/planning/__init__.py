"""Plans of capacity: memory per GPU, seconds per step, judges, GPU-hours and cost.

Imports `core`. Start with `capacity.py`.
"""
