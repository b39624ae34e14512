"""A policy behind `transformers serve`: a tiny Qwen3 that has learnt one conversation by heart."""

import contextlib
import json
from pathlib import Path
from typing import Any

from agent_fixtures import MEASURE, TASK, ScriptedChat, ScriptedPool, params
from served_policy import learn, served

from components.agent.chat_rollout import run_chats
from components.agent.episode import RolloutRequest
from components.agent.trajectory import Trajectory
from components.policy.chat_client import ChatClient

FILE = "kernels/forward.cpp"
SAID: list[str | list[tuple[str, str]] | Exception] = [
    [
        ("Write", json.dumps({"file_path": FILE, "content": "// 0.8\n"})),
        ("Bash", json.dumps({"command": MEASURE})),
    ],
    [
        ("Edit", json.dumps({"file_path": FILE, "old_string": "0.8", "new_string": "2.5"})),
        ("Bash", json.dumps({"command": MEASURE})),
    ],
    "Done.",
]
SETTINGS = params(prompt="compact", context=2048, hidden=64, feed_forward=128, head_dim=16)


def run(chat: Any, count: int = 1) -> list[Trajectory]:
    request = RolloutRequest(
        tasks=[TASK] * count,
        params=SETTINGS,
        pool=ScriptedPool(),
        epoch="t",
        seed=0,
        max_turns=6,
        max_new_tokens=256,
        temperature=0.0,
    )
    return run_chats(request, chat)


def conversation(heard: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages as the server hands them to the template: arguments as objects."""
    spoken = json.loads(json.dumps([*heard, {"role": "assistant", "content": "Done."}]))
    for message in spoken:
        for call in message.get("tool_calls", []):
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    return spoken


def test_a_policy_behind_a_real_server_goes_the_way_of_a_scripted_one(tmp_path: Path) -> None:
    talk = ScriptedChat(SAID)
    (lesson,) = run(talk)
    learn(tmp_path, [conversation(talk.heard[-1])], SETTINGS)
    with served(tmp_path) as address, contextlib.closing(ChatClient(address, str(tmp_path))) as client:
        trajectories = run(client, count=3)
    for trajectory in trajectories:
        assert (trajectory.finish_reason, trajectory.reward) == ("stop", 3.0), trajectory.error
        assert [turn.calls for turn in trajectory.turns] == [turn.calls for turn in lesson.turns]
        assert trajectory.files == lesson.files
