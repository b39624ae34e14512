"""Environment for TRL: `GRPOTrainer(..., environment_factory=KernelEnv)`.

TRL calls the tools of a batch one rollout after another. Writing a file returns at once and the server judges
it in the background, so that the judgements of a batch overlap although the calls do not.
"""

from cuda_agent_env.session import Session

# Answer to a tool call after the last turn.
ENDED = "The episode has ended."


class KernelEnv:
    """One rollout of TRL, which makes one episode at a time in a session of the environment server.

    The methods `write`, `read` and `run` are the policy's tools. The reward is the milestone.
    """

    def __init__(self, session: Session | None = None) -> None:
        self._session = session or Session()

    def reset(self, task_id: str = "", max_turns: int = 20, message: str = "compact", **_: object) -> str:
        """Begin an episode on the task of the data set's row, or on a random one, and return its message.

        `task_id`, `max_turns` and `message` are columns of the row (`Session.reset`); others have no effect.
        """
        text: str = self._session.reset(task_id, max_turns=max_turns, message=message).text
        return text

    def write(self, file_path: str, content: str) -> str:
        """Write a whole file of the candidate: model_new.py or kernels/NAME.

        Args:
            file_path: path in the workspace, for instance kernels/forward.cpp
            content: the file's whole text

        Returns:
            What was written, or why it was not.
        """
        return self._call("Write", file_path=file_path, content=content)

    def read(self, file_path: str) -> str:
        """Read a file of the workspace with its line numbers.

        Args:
            file_path: path in the workspace, for instance SKILL.md or model.py

        Returns:
            The file's text.
        """
        return self._call("Read", file_path=file_path)

    def run(self, command: str) -> str:
        """Run a command in the workspace, such as `bash utils/compile.sh` or `python3 -m utils.profiling`.

        Args:
            command: the shell command

        Returns:
            What it printed.
        """
        return self._call("Bash", command=command)

    def _call(self, tool: str, **arguments: str) -> str:
        if self._session.last is None or self._session.last.done:
            return ENDED
        observation: str = self._session.step(tool, **arguments).text
        return observation

    def get_reward(self) -> float:
        """End the episode if it has not ended, and return the milestone: -1, 1, 2 or 3."""
        if self._session.last is None:
            raise RuntimeError("reset begins an episode")
        if not self._session.last.done:
            self._session.finish()
        reward: float = self._session.last.reward
        return reward
