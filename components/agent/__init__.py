"""Sample a policy that writes kernels in episodes with tools, and optimise a user's module with it.

An episode is one attempt of a policy at one task. This package has the episodes, their tools in a sandboxed
shell, the trajectories in which they are recorded, and the optimisation of a module. It imports the packages
`core`, `policy`, `bootstrap`, `sandbox` and `judge`. Start with `episode.py`.
"""
