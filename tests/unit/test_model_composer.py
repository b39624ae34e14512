"""Tasks composed by a language model: filtered alike, bad answers counted, reruns equal."""

import re
from pathlib import Path
from typing import Any

import pytest
from agent_fixtures import completion, server
from synthesis_fixtures import InProcess, parameters

from components.bootstrap.operator_chain import TASK_LAYOUT
from components.core.errors import UserError
from components.core.params import Params
from components.core.progress import Quiet
from components.synthesis import dataset
from components.synthesis.mined_operators import OperatorTable, OperatorTemplate
from components.synthesis.model_composer import AHEAD

NAMES = "torch.sigmoid torch.tanh torch.erf torch.atan F.gelu F.silu F.mish F.softsign".split()
FORMS = OperatorTable("", "", tuple(OperatorTemplate(name, f"{name}({{x}})", (2,)) for name in NAMES), (), ())


def composed(address: str, *sets: str) -> Params:
    mix = "data.operator_mix={2: 1.0}"
    return parameters(
        "data.operators=torch",
        f"data.composer={address}",
        "data.composer_model=tiny",
        "data.tasks=8",
        "data.held_out=2",
        mix,
        *sets,
    )


class Model:
    """A composer that sometimes answers something else, by the request's seed, in any order."""

    def __init__(self) -> None:
        self.asked = 0
        self.after = 10**6
        """Requests that it answers before it refuses."""

    def __call__(self, number: int, body: dict[str, Any]) -> tuple[int, bytes, dict[str, str]]:
        self.asked += 1
        if self.asked > self.after:
            return 400, b"no more", {}
        lines = "\n".join(
            f"        x = {name}(x)"
            for name in re.findall(r"^- ([\w.]+)$", body["messages"][0]["content"], re.MULTILINE)
        )
        code = TASK_LAYOUT.format(
            init="        pass\n",
            arguments="x",
            lines=lines,
            inputs=f"torch.randn({64 + body['seed'] % 64}, 128)",
        )
        said = {
            0: "I would rather not.",
            1: f"<think>```python\nx\n```</think>```python\n{code[:200]}",
            2: f"```python\nimport os\n{code}```",
        }
        said |= {
            3: f"```\n{code.replace(lines, '        x = torch.sin(x)')}```",
            4: f"Here:\n```py\n{code.replace('class Model', 'class Other')}\n```\nEnjoy.",
        }
        kind = body["seed"] % 8
        return (
            200,
            completion(
                said.get(kind, f"Here:\n```python\n{code}```\n"), finish="length" if kind == 1 else "stop"
            ),
            {},
        )


def test_a_model_composes_and_a_rerun_needs_no_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dataset, "load_operator_table", lambda *_: FORMS)

    def build(model: Model, out: str, home: str = "home") -> dataset.DatasetSummary:
        with server(model) as address:
            return dataset.build_dataset(
                composed(address),
                tmp_path / out,
                InProcess(shuffled=True),
                Quiet(),
                tmp_path / home / "seeds",
            )

    failing, model, silent = Model(), Model(), Model()
    failing.after, silent.after = 9, 0
    with pytest.raises(UserError, match=r"data\.composer.*400.*answers so far are kept"):
        build(failing, "killed")
    made = build(model, "made")
    assert (len(made.admitted), {task.data_source for task in made.admitted}) == (10, {"torch#2"})
    assert {"no_code", "cut_off", "hostile", "mislabelled", "contract"} <= set(made.reasons)
    assert made.funnel[1][1] == made.candidates - sum(made.reasons.values())
    assert build(silent, "again").version == made.version
    assert silent.asked < AHEAD, "only what was under way when the build ended, and nobody waits for it"
    undisturbed = Model()
    assert build(undisturbed, "undisturbed", "elsewhere").version == made.version
    assert model.asked < undisturbed.asked, "what was answered before the failure was not asked again"


def test_a_model_that_writes_no_code_ends_the_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dataset, "load_operator_table", lambda *_: FORMS)
    with (
        server(lambda number, body: (200, completion("No."), {})) as address,
        pytest.raises(UserError, match=r"data\.composer.*no_code"),
    ):
        dataset.build_dataset(composed(address), tmp_path / "out", InProcess(), Quiet(), tmp_path / "seeds")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("sets", "named"),
    [(("data.operators=core",), r"data\.operators"), (("data.composer_model=",), r"data\.composer_model")],
)
def test_what_a_model_composer_needs_is_named(sets: tuple[str, ...], named: str) -> None:
    with pytest.raises(UserError, match=named):
        composed("http://127.0.0.1:9", *sets)
