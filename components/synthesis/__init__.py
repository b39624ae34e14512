"""Making training tasks: mining operators, composing modules, filtering them, and data sets.

Imports `core`, `policy` and `judge`. Start with `dataset.py`.
"""
