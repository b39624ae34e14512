"""Checkpoints of policies, their prompts, and the backends that sample from them.

A policy is a language model that writes GPU kernels. This package imports `core` and `planning`. Other
packages use `checkpoint`, `sampler.Sampler` and its implementations. Start with `sampler.py`.
"""
