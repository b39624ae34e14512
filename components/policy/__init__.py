"""Policies that write kernels: checkpoints, prompts, and the backends that sample from them.

Imports `core`. Other packages use `checkpoint`, `sampler.Sampler` and `backends`. Start with `sampler.py`.
"""
