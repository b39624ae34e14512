"""One episode through OpenEnv's own client, on the environment that `cuda-agent environment` serves.

    python tests/environments/openenv_client.py http://127.0.0.1:8471

Needs the package openenv.
"""

import sys

from openenv.core.generic_client import GenericEnvClient


def main() -> None:
    with GenericEnvClient(base_url=sys.argv[1], message_timeout_s=600).sync() as client:
        first = client.reset(max_turns=5, message="compact")
        assert not first.done and "class Model" in first.observation["text"]
        written = {"file_path": "model_new.py", "content": "import torch"}
        step = client.step({"tool": "Write", "arguments": written})
        assert (step.reward, step.done) == (None, False), step
        assert client.state()["step_count"] == 1
        last = client.step({"tool": "Finish", "arguments": {}})
        assert (last.reward, last.done) == (-1.0, True), last
        print(f"task {last.observation['task_id']}: {last.observation['status']}, reward {last.reward}")


if __name__ == "__main__":
    main()
