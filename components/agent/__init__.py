"""The agent: tools in a sandboxed shell, rollouts, trajectories, and the optimisation of a module.

Imports `core`, `policy`, `bootstrap`, `sandbox` and `judge`. Start with `episode.py`.
"""
