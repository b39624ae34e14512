"""Plans of the capacity that a training run needs: memory, time, judges, GPU-hours and cost.

This package imports `core`. Start with `capacity.py`.
"""
