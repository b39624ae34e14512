"""What a run with given parameters needs: the memory of its GPUs, and the machines of a Ray cluster.

The GPUs are divided among roles: trainers, samplers and judges, which measure kernels. This package imports
`core`. Start with `role_memory.py`.
"""
