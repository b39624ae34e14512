"""Client of the environment server that `cuda-agent environment` starts; needs only the package websockets.

`KernelEnv` is an environment for TRL's `environment_factory`, and `Session` is one episode for any program.
"""

from cuda_agent_env.session import EnvironmentFailed, Session, Step, list_tasks
from cuda_agent_env.trl import KernelEnv

__all__ = ["EnvironmentFailed", "KernelEnv", "Session", "Step", "list_tasks"]
