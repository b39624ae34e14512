"""The making of a first policy from scratch: demonstrations, a tokenizer, and a small model.

This package imports `core` and `policy`. Start with `cold_start.py`.
"""
