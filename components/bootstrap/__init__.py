"""A first policy without downloads: demonstrations by a rule-based kernel writer, a tokenizer, and a small model.

Imports `core` and `policy`. Start with `cold_start.py`.
"""
