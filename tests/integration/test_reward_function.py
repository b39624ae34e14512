"""The reward functions for trainers, on a service whose judges need no sandbox."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from service_fixtures import TASK, TextJudges, text_service

from components.service.client import cuda_agent_reward as reward


@pytest.fixture(autouse=True)
def judges(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[TextJudges]:
    judges = TextJudges()
    with text_service(tmp_path, judges) as address:
        monkeypatch.setenv("CUDA_AGENT_JUDGE", address)
        yield judges


def answer(text: str) -> str:
    return f"Here it is:\n```python\n# model_new.py\n{text}\n```\nDone."


def test_files_are_read_from_fenced_blocks() -> None:
    text = "```cpp\n// kernels/forward.cpp\nint x;\n```\n```python\nimport torch\n```\n```\n# ../etc\n```"
    assert reward.files_of(text) == {"kernels/forward.cpp": "int x;\n", "model_new.py": "# ../etc\n"}
    assert reward.files_of("no code") == {}


def test_each_trainer_gets_the_milestones(judges: TextJudges) -> None:
    correct = "```\n// kernels/a.cpp\n```\n```\n# model_new.py\ncorrect```"
    answers = [answer("wrong"), "no code", correct.replace("correct```", "correct\n```")]
    judged = {"model_new.py": "correct\n"}
    assert reward.files_of(answers[2]) == {"kernels/a.cpp": "", **judged}
    turns = [[{"role": "assistant", "content": text}] for text in answers]
    tasks = [TASK.task_id, TASK.task_id, TASK.code]
    for completions in (answers, turns):
        assert reward.kernel_reward(answers, completions, tasks, other=[0, 0, 0]) == [-1.0, -1.0, 2.0]
    assert reward.compute_score("kernels", answers[2], TASK.code) == 2.0
    result = reward.reward_func([f"task{text}" for text in answers], ["task"] * 3, tasks)
    assert result["rewards"].tolist() == [-1, -1, 2] and result["scores"].tolist() == [0, 0, 1]
    assert len(judges.measured) == 2, "equal answers are measured once"


def test_a_judge_that_fails_gives_no_reward(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(reward.JudgeFailed, match="fell off the bus"):
        reward.milestones([TASK.task_id], ["```\nfail\n```"])
    with pytest.raises(reward.JudgeFailed, match="no task"):
        reward.milestones(["0123"], ["```\nfail\n```"])
    monkeypatch.setenv("CUDA_AGENT_JUDGE", "http://127.0.0.1:1")
    monkeypatch.setattr(reward, "RESTART_SECONDS", 0.0)
    with pytest.raises(reward.JudgeFailed, match="does not answer"):
        reward.ask("/v1/tasks")


def test_a_task_comes_with_its_prompt() -> None:
    [listed] = reward.ask("/v1/tasks")
    task = reward.ask(f"/v1/tasks/{listed['task_id']}")
    assert task["code"] == TASK.code and TASK.code.rstrip() in task["prompt"]
    assert "cuda_extension" in task["prompt"] and "The device is cpu" in task["prompt"]
