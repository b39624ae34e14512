"""The making of training tasks: mining of operators, composition of modules, filters, and data sets.

This package imports `core`, `bootstrap`, `policy` and `judge`. Start with `dataset.py`.
"""
