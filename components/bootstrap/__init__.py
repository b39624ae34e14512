"""The making of a first policy without downloads: demonstrations, a tokenizer, and a small model.

Imports `core` and `policy`. Start with `cold_start.py`.
"""
