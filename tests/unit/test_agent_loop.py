"""The agent loop: what ends a trajectory, that its record is complete, that others go on."""

import dataclasses
import gc
import json
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from agent_fixtures import (
    CODE,
    MEASURE,
    TASK,
    ScriptedChat,
    ScriptedPool,
    ScriptedSampler,
    call,
    completion,
    params,
    server,
    tokenizer,
    write,
)

from components.agent.chat_rollout import run_chats
from components.agent.chat_template import ChatTemplate
from components.agent.episode import SHORTENED, RolloutRequest, run_episodes
from components.agent.trajectory import Trajectory, load_trajectories, save_trajectories
from components.bootstrap.canonicalize import canonicalize
from components.core.params import Params
from components.core.signals import outside_of_locks
from components.core.task import KernelTask
from components.judge.pool.local_pool import LocalPool
from components.judge.verdict import Verdict
from components.policy.chat_client import ChatClient, ServerFailed, ToolsUnsupported
from components.policy.prompts import user_message

TOKENIZER = tokenizer()


def run(
    lines: Callable[[int, int], str],
    *,
    count: int = 1,
    turns: int = 4,
    tokens: int = 512,
    cut: Any = lambda i, t: False,
    **more: Any,
) -> list[Trajectory]:
    """Run trajectories of a policy that says `lines(index of the trajectory, turn)`."""
    request = RolloutRequest(
        tasks=[TASK] * count,
        params=params(**more.pop("policy", {"context": 4096})),
        pool=more.pop("pool", ScriptedPool()),
        epoch="test",
        seed=0,
        max_turns=turns,
        max_new_tokens=tokens,
        temperature=1.0,
        **more,
    )
    return run_episodes(request, ScriptedSampler(TOKENIZER, lines, cut), TOKENIZER)


def chat(talk: Any, *, turns: int = 6, count: int = 1, **policy: Any) -> list[Trajectory]:
    settings = params(prompt="full", context=32_768) if not policy else params(**policy)
    return run_chats(rollout_request([TASK] * count, settings, ScriptedPool(), turns), talk)


def rollout_request(tasks: list[KernelTask], settings: Params, pool: Any, turns: int) -> RolloutRequest:
    return RolloutRequest(
        tasks, settings, pool, epoch="t", seed=0, max_turns=turns, max_new_tokens=512, temperature=1.0
    )


# --- interruption ---------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["tokens", "chats"])
@pytest.mark.timeout(300)
def test_an_interrupt_waits_for_what_is_being_judged_and_not_for_all_that_was_asked(
    kind: str, tmp_path: Path
) -> None:
    judged: list[dict[str, str]] = []

    class Interrupting:
        def verdict(
            self, task: KernelTask, files: dict[str, str], *, compare_compile: bool | None
        ) -> Verdict:
            judged.append(files)
            if len(judged) == 1:
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)
            time.sleep(1)
            return Verdict(status="crashed")

        def close(self) -> None:
            return

    class Pool(LocalPool):
        def start(self) -> Interrupting:
            return Interrupting()

    settings = params(**({"context": 4096} if kind == "tokens" else {"prompt": "full", "context": 32_768}))
    two = settings.sandbox.model_copy(update={"build_workers": 2})
    pool = Pool(settings.model_copy(update={"sandbox": two}), tmp_path / "verdicts")
    # pytest's own workers ignore SIGINT, and an interrupt inside of a lock of the executor would keep it.
    before = signal.signal(signal.SIGUSR1, outside_of_locks(signal.default_int_handler))
    gc.disable()  # an interrupt inside of hypothesis's callback of the collector would be lost
    with pytest.raises(KeyboardInterrupt):
        if kind == "tokens":
            run(lambda i, t: f"{write(float(i))}\n{call('Bash', command=MEASURE)}", count=200, pool=pool)
        else:
            writing = json.dumps({"file_path": "kernels/forward.cpp", "content": "// 2.5\n"})
            talks = ScriptedChat([[("Write", writing), ("Bash", json.dumps({"command": MEASURE}))]] * 800)
            tasks = [TASK.model_copy(update={"task_id": f"{i:016x}"}) for i in range(200)]
            run_chats(rollout_request(tasks, settings, pool, turns=4), talks)
    gc.enable()
    signal.signal(signal.SIGUSR1, before)
    pool.close()
    assert len(judged) <= 10


def test_the_time_of_a_chat_servers_answers_is_metered() -> None:
    class Slow(ScriptedChat):
        def turn(self, *given: Any, **more: Any) -> Any:
            time.sleep(0.2)
            return super().turn(*given, **more)

    request = rollout_request([TASK], params(prompt="full", context=32_768), ScriptedPool(), turns=2)
    run_chats(request, Slow(["Done."]))
    assert request.sampling.seconds() >= 0.2


# --- tokens ---------------------------------------------------------------------------------------


def test_a_trajectory_is_every_token_that_was_seen_and_said() -> None:
    said = [
        f"{write(1.0)}\n{call('Bash', command=MEASURE)}",
        f"{write(3.0)}\n{call('Bash', command=MEASURE)}",
        "Done.",
    ]
    (trajectory,) = run(lambda i, t: said[t])
    own = [[*TOKENIZER.encode(text, add_special_tokens=False), TOKENIZER.eos_token_id] for text in said]
    assert [i for i, m in zip(trajectory.ids, trajectory.action_mask, strict=True) if m] == [
        i for ids in own for i in ids
    ]
    assert [turn.text for turn in trajectory.turns] == said
    text = TOKENIZER.decode(list(trajectory.ids))
    assert text.count("<|im_start|>tool\nWritten kernels/forward.cpp.\n[PASS] verify success") == 2
    assert trajectory.finish_reason == "stop" and trajectory.reward == 3.0
    (again,) = run(lambda i, t: said[t], reward=lambda one: len(one.turns) / 2)
    assert again.reward == 1.5, "the function of the request decides the reward"
    assert [verdict.milestone for verdict in trajectory.verdicts] == [1, 3, 3]
    assert [[c.verdicts for c in turn.calls] for turn in trajectory.turns] == [[0, 1], [0, 1], []]


def test_the_prompt_and_what_follows_a_turn_are_those_that_trained_policies_know() -> None:
    (trajectory,) = run(lambda i, t: "Done.")
    prompt = [i for i, m in zip(trajectory.ids, trajectory.action_mask, strict=True) if not m]
    code = canonicalize(CODE)
    assert code is not None
    asked = user_message(params().policy, code, in_turns=True, device="cpu")
    assert TOKENIZER.decode(prompt) == f"<|im_start|>user\n{asked}<|im_end|>\n<|im_start|>assistant\n"
    assert (
        TOKENIZER.decode(ChatTemplate(TOKENIZER, described=False).suffix_ids(["a\nb"]))
        == "\n<|im_start|>tool\na\nb<|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_policy_that_never_stops_is_ended_by_its_turns() -> None:
    (trajectory,) = run(lambda i, t: call("Read", file_path="model.py"), turns=3)
    assert (trajectory.finish_reason, len(trajectory.turns)) == ("turns", 3)


def test_half_a_call_at_the_length_limit_is_an_error_observation_and_the_end() -> None:
    (trajectory,) = run(lambda i, t: write(3.0), cut=lambda i, t: True, tokens=12)
    assert trajectory.finish_reason == "length"
    (only,) = trajectory.turns[0].calls
    assert not only.valid and only.observation.startswith("invalid tool call")
    assert trajectory.final.status == "build_failed" and trajectory.reward == -1


def test_nonsense_is_told_and_the_trajectory_goes_on() -> None:
    said = [
        "<tool_call>{broken</tool_call>",
        call("Fly", to="moon"),
        call("Write", file_path="../x", content="y"),
        f"{write(2.5)}",
    ]
    (trajectory,) = run(lambda i, t: said[t], turns=4)
    observed = [turn.calls[0].observation for turn in trajectory.turns]
    assert (
        observed[0].startswith("invalid tool call: its JSON cannot be read")
        and "no tool is called Fly" in observed[1]
        and "not writable" in observed[2]
    )
    assert [turn.calls[0].valid for turn in trajectory.turns] == [False, False, True, True]
    assert trajectory.reward == 3.0


def test_a_full_window_ends_a_trajectory_with_its_record_whole() -> None:
    (trajectory,) = run(lambda i, t: call("Read", file_path="model.py"), turns=50, policy={"context": 700})
    assert trajectory.finish_reason == "length" and len(trajectory.ids) == len(trajectory.action_mask) == len(
        trajectory.sampler_logprob
    )


def test_a_full_window_of_one_trajectory_cuts_no_other_one() -> None:
    def lines(index: int, turn: int) -> str:
        return call("Read", file_path="SKILL.md" if index == 17 else "model.py")

    trajectories = run(lines, count=64, turns=6, policy={"context": 2200})
    full = [index for index, one in enumerate(trajectories) if one.finish_reason == "length"]
    assert full == [17]
    assert {len(one.turns) for index, one in enumerate(trajectories) if index != 17} == {6}


def test_shortening_makes_room_and_keeps_the_record_exact() -> None:
    script = ScriptedSampler(TOKENIZER, lambda i, t: call("Read", file_path="binding_registry.h", limit=9))
    settings = params(context=1500)
    request = dataclasses.replace(
        rollout_request([TASK], settings, ScriptedPool(), turns=6), max_new_tokens=64, shorten_history=True
    )
    (trajectory,) = run_episodes(request, script, TOKENIZER)
    assert trajectory.finish_reason == "turns" and len(trajectory.ids) > 1500
    assert trajectory.turns[0].shortened == 0 and trajectory.turns[-1].shortened > 0
    last = script.prompts[-1]
    assert len(last) <= 1500 and TOKENIZER.decode(last).count(SHORTENED) == trajectory.turns[-1].shortened
    assert SHORTENED not in TOKENIZER.decode(list(trajectory.ids))


def test_the_clock_ends_a_trajectory_between_turns() -> None:
    (trajectory,) = run(lambda i, t: write(1.5), deadline=time.monotonic() - 1)
    assert (trajectory.finish_reason, trajectory.turns) == ("time", ())


def test_sixty_four_trajectories_go_on_side_by_side_and_lose_nothing() -> None:
    pool = ScriptedPool()

    def lines(index: int, turn: int) -> str:
        if turn == 3:
            return "Done."
        measure = "echo $((6 * 7)); python3 -m utils.verification" if turn == 1 else MEASURE
        return f"{write(1.0 + turn + index / 100)}\n{call('Bash', command=measure)}"

    trajectories = run(lines, count=64, pool=pool)
    for index, trajectory in enumerate(trajectories):
        assert trajectory.files["kernels/forward.cpp"] == f"// {3.0 + index / 100}\n"
        assert [turn.calls[1].observation.splitlines()[0] for turn in trajectory.turns[:3]] == [
            "[PASS] verify success",
            "42",
            "[PASS] verify success",
        ]
        assert len(trajectory.verdicts) == 4 and trajectory.finish_reason == "stop"
    speeds = [
        float(dict(candidate.files)["kernels/forward.cpp"].removeprefix("// "))
        for candidate, _ in pool.judged
    ]
    assert sorted(int(speed) for speed in speeds) == [1] * 64 + [2] * 64 + [3] * 128


def test_whatever_a_policy_writes_is_read_back(tmp_path: Path) -> None:
    text = "// 2.0\n// \u2028\x85\x1b\x00 é 🙂\n"
    said = call("Write", file_path="kernels/forward.cpp", content=text)
    (trajectory,) = run(lambda i, t: said, turns=1)
    save_trajectories(tmp_path / "one", [trajectory, trajectory])
    read = load_trajectories(tmp_path / "one")
    assert (
        len(read) == 2 and read[0].ids == trajectory.ids and read[0].turns[0].text == trajectory.turns[0].text
    )
    assert "\u2028" in read[0].files["kernels/forward.cpp"]


def test_old_records_and_new_ones_are_read_alike(tmp_path: Path) -> None:
    (trajectory,) = run(lambda i, t: write(2.0), turns=1)
    save_trajectories(tmp_path / "new", [trajectory])
    assert load_trajectories(tmp_path / "new") == [trajectory]
    record = json.loads((tmp_path / "new" / "trajectories.jsonl").read_text())
    for key in ("error", "task", "start", "settings"):
        del record[key]
    for turn in record["turns"]:
        del turn["shortened"]
        for one in turn["calls"]:
            del one["verdicts"]
    (tmp_path / "new" / "trajectories.jsonl").write_text(json.dumps(record) + "\n")
    assert load_trajectories(tmp_path / "new")[0].turns[0].text == trajectory.turns[0].text


# --- chats ----------------------------------------------------------------------------------------


def test_native_calls_are_answered_one_by_one() -> None:
    content = json.dumps({"file_path": "kernels/forward.cpp", "content": "// 2.5\n"})
    talk = ScriptedChat(
        [[("Write", content), ("Bash", json.dumps({"command": MEASURE}))], [("Write", "{broken")], "Done."]
    )
    (trajectory,) = chat(talk)
    roles = [(message["role"], message.get("tool_call_id")) for message in talk.heard[-1]]
    assert roles == [
        ("user", None),
        ("assistant", None),
        ("tool", "c0"),
        ("tool", "c1"),
        ("assistant", None),
        ("tool", "c0"),
    ]
    assert talk.heard[-1][-1]["content"].startswith("invalid tool call: its arguments are no JSON")
    assert talk.described == [10, 10, 10]
    assert (trajectory.finish_reason, trajectory.reward, len(trajectory.ids)) == ("stop", 3.0, 0)


def test_a_server_that_knows_no_tools_is_told_of_them_in_words() -> None:
    arguments = {"file_path": "kernels/forward.cpp", "content": "// 2.5"}
    written = {"name": "Write", "arguments": arguments}
    talk = ScriptedChat(
        [
            ToolsUnsupported("400"),
            f"```json\n{json.dumps(written)}\n```",
            "Done.",
        ]
    )
    (trajectory,) = chat(talk)
    assert talk.described == [10, 0, 0]
    assert "<tool_call>" in talk.heard[1][0]["content"] and "MultiEdit" in talk.heard[1][0]["content"]
    assert talk.heard[2][-1] == {
        "role": "user",
        "content": "<tool_response>\nWritten kernels/forward.cpp.\n</tool_response>",
    }
    assert trajectory.reward == 3.0


def test_a_server_that_fails_midway_ends_its_trajectory_with_what_there_was() -> None:
    talk = ScriptedChat([write(2.5), ServerFailed("the server answers 500, 6 times")])
    (trajectory,) = chat(talk)
    assert (trajectory.finish_reason, trajectory.error, len(trajectory.turns), trajectory.reward) == (
        "server",
        "the server answers 500, 6 times",
        1,
        3.0,
    )


@pytest.mark.parametrize("kind", ["tokens", "chat"])
def test_a_failure_of_the_judge_ends_the_trajectory_and_the_policy_never_sees_it(kind: str) -> None:
    measuring = f"{write('infrastructure')}\n{call('Bash', command=MEASURE)}\n{write(3.0)}"
    if kind == "tokens":
        (trajectory,) = run(lambda i, t: measuring)
        seen = TOKENIZER.decode(
            [i for i, m in zip(trajectory.ids, trajectory.action_mask, strict=True) if not m]
        )
    else:
        talk = ScriptedChat([measuring])
        (trajectory,) = chat(talk)
        seen = json.dumps(talk.heard)
        assert len(talk.heard) == 1
    assert "infrastructure" not in seen and "no_memory" not in seen
    assert (trajectory.finish_reason, trajectory.reward, trajectory.is_judged) == ("judge", None, False)
    assert trajectory.error.startswith("no_memory")
    assert [call.name for call in trajectory.turns[-1].calls] == ["Write"], "nothing runs after the failure"
    assert [verdict.status for verdict in trajectory.verdicts] == ["infrastructure"]


def test_a_trajectory_whose_last_files_the_judge_could_not_judge_has_no_reward(tmp_path: Path) -> None:
    (trajectory,) = run(lambda i, t: write("infrastructure") if t == 0 else "Done.")
    assert (trajectory.finish_reason, trajectory.reward, trajectory.is_judged) == ("stop", None, False)
    save_trajectories(tmp_path, [trajectory])
    assert load_trajectories(tmp_path)[0].reward is None


def test_a_chats_oldest_observations_are_shortened_first() -> None:
    talk = ScriptedChat([[("Read", '{"file_path": "SKILL.md"}')]] * 6 + ["Done."])
    (trajectory,) = chat(talk, turns=7, prompt="full", context=8000)
    contents = [message["content"] for message in talk.heard[-1] if message["role"] == "tool"]
    shortened = trajectory.turns[-1].shortened
    assert shortened > 0 and [content == SHORTENED for content in contents] == [True] * shortened + [
        False
    ] * (6 - shortened)


def test_one_failing_conversation_disturbs_no_other() -> None:
    def answers(number: int, body: dict[str, Any]) -> tuple[int, bytes, dict[str, str]]:
        if body["seed"] % 1_000_003 == 0 and body["seed"] // 1_000_003 == 1:
            return 404, b"not you", {}
        said = len([message for message in body["messages"] if message["role"] == "assistant"])
        arguments = json.dumps({"file_path": "kernels/forward.cpp", "content": "// 2.5\n"})
        return 200, completion("", [("Write", arguments)]) if said == 0 else completion("Done."), {}

    with server(answers) as url:
        trajectories = chat(ChatClient(url, pause=lambda seconds: None), count=16)
    assert [trajectory.finish_reason for trajectory in trajectories] == ["stop", "server", *["stop"] * 14]
    assert [trajectory.reward for trajectory in trajectories] == [3.0, -1.0, *[3.0] * 14]
