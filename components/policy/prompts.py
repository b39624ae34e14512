"""What a policy is asked: one user message per task."""

from __future__ import annotations

from components.config import PROJECT, Policy

IN_TURNS = "\nWork in turns: measure, repair, make it faster.\n"
"""Ends the compact prompt of an episode with several turns; without it, one answer is final."""


def user_message(policy: Policy, code: str, *, in_turns: bool) -> str:
    """The content of the user message: the task's source, after SKILL.md in the full form."""
    question = code + IN_TURNS if in_turns else code
    if policy.prompt == "compact":
        return question
    skill = (PROJECT / "agent_workdir" / "SKILL.md").read_text()
    ending = IN_TURNS if in_turns else "\nAnswer with the final files in one turn.\n"
    return f"{skill}\n\nThe task, model.py:\n```python\n{code}```\n{ending}"
