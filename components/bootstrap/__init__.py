"""Make a first policy from scratch: write demonstrations by rules, and train a tokenizer and a small model.

This package imports `core` and `policy`. Start with `cold_start.py`.
"""
