"""Checkpoints of policies, their prompts, and the backends that sample from them.

This package imports `core` and, for vLLM servers, `planning`. Other packages use `checkpoint`,
`sampler.Sampler` and its implementations. Start with `sampler.py`.
"""
