"""The agent: tools in a sandboxed shell, rollouts over tokens and chat servers, trajectories, `optimize`.

Imports `core`, `policy`, `bootstrap`, `sandbox` and `judge`. Start with `episode.py`.
"""
