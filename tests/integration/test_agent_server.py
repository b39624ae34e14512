"""A policy behind `transformers serve`: a tiny Qwen3 that has learnt one conversation by heart."""

import json
import socket
from pathlib import Path
from typing import Any

import torch
from agent_fixtures import MEASURE, TASK, ScriptedChat, ScriptedPool, params
from torch.nn.utils.rnn import pad_sequence
from transformers.cli.serve import Serve

from components.agent.chat_rollout import run_chats
from components.agent.episode import RolloutRequest
from components.agent.trajectory import Trajectory
from components.bootstrap.cold_start import new_model
from components.bootstrap.tokenizer import train_tokenizer
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
TEMPLATE = """\
{% for message in messages %}
{{ '<|im_start|>' + message.role + '\n' + message.content -}}
{% for call in message.tool_calls or [] %}
{{ '\n<tool_call>\n' + call.function | tojson + '\n</tool_call>' -}}
{% endfor %}
{{ '<|im_end|>\n' -}}
{% endfor %}
{{ '<|im_start|>assistant\n' if add_generation_prompt }}"""
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


def learn(folder: Path, messages: list[dict[str, Any]]) -> None:
    """Save a model that says the assistant's turns of `messages` after what stands before each."""
    texts = [message["content"] + json.dumps(message.get("tool_calls", "")) for message in messages]
    tokenizer = train_tokenizer(
        [{"role": "user", "content": text} for text in texts], 1200, SETTINGS.policy.context
    )
    tokenizer.chat_template = TEMPLATE
    turns = []
    for place, message in enumerate(messages):
        if message["role"] == "assistant":
            asked = str(
                tokenizer.apply_chat_template(messages[:place], tokenize=False, add_generation_prompt=True)
            )
            said = (
                str(tokenizer.apply_chat_template(messages[: place + 1], tokenize=False))
                .removeprefix(asked)
                .removesuffix("\n")
            )
            turns.append(
                [torch.tensor(tokenizer.encode(text, add_special_tokens=False)) for text in (asked, said)]
            )
    ids = pad_sequence([torch.cat(turn) for turn in turns], batch_first=True)
    labels = pad_sequence(
        [torch.cat([torch.full_like(asked, -100), said]) for asked, said in turns],
        batch_first=True,
        padding_value=-100,
    )
    model = new_model(SETTINGS, len(tokenizer), tokenizer)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, weight_decay=0.0)
    for _ in range(200):
        found = model(input_ids=ids, labels=labels)
        chances = found.logits[:, :-1].softmax(-1).gather(-1, labels[:, 1:, None].clamp(min=0)).squeeze(-1)
        if chances[labels[:, 1:] >= 0].min() > 0.8:
            break
        optimizer.zero_grad()
        found.loss.backward()
        optimizer.step()
    else:
        raise AssertionError("the model did not learn its lines")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def test_a_policy_behind_a_real_server_goes_the_way_of_a_scripted_one(tmp_path: Path) -> None:
    talk = ScriptedChat(SAID)
    (lesson,) = run(talk)
    learn(tmp_path, conversation(talk.heard[-1]))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = Serve(str(tmp_path), device="cpu", host="127.0.0.1", port=port, non_blocking=True)
    client = ChatClient(
        f"http://127.0.0.1:{port}", str(tmp_path)
    )  # a server that only comes up is asked again
    try:
        trajectories = run(client, count=3)
    finally:
        client.close()
        server.kill_server()
    for trajectory in trajectories:
        assert (trajectory.finish_reason, trajectory.reward) == ("stop", 3.0), trajectory.error
        assert [turn.calls for turn in trajectory.turns] == [turn.calls for turn in lesson.turns]
        assert trajectory.files == lesson.files
