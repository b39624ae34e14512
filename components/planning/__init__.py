"""What a profile needs: the memory of each role, and the machines of a Ray cluster.

This package imports `core`. Start with `role_memory.py`.
"""
