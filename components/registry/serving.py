"""The model format with which `mlflow.pyfunc.load_model` and `mlflow models serve` load a model version.

A version consists of the files of a checkpoint and a file `MLmodel`, which names this module as the loader.
transformers and vLLM load the folder `checkpoint` of a version directly and do not need this module.
"""

import platform
from pathlib import Path
from typing import Any

from mlflow.models import Model, ModelSignature
from mlflow.types import ColSpec, ParamSchema, ParamSpec, Schema

from components.policy.sampler import complete_all

CHECKPOINT = "checkpoint"
PROMPT = "prompt"
DEFAULTS = {"max_new_tokens": 512, "temperature": 0.0}


def description(model_id: str, run_id: str) -> Model:
    """Return the content of the file `MLmodel`, which names inputs, outputs, parameters and loader."""
    signature = ModelSignature(
        Schema([ColSpec("string", PROMPT)]),
        Schema([ColSpec("string")]),
        ParamSchema(
            [
                ParamSpec("max_new_tokens", "long", DEFAULTS["max_new_tokens"]),
                ParamSpec("temperature", "double", DEFAULTS["temperature"]),
            ]
        ),
    )
    model = Model(run_id=run_id, model_id=model_id, signature=signature)
    model.add_flavor(
        "python_function", loader_module=__name__, data=CHECKPOINT, python_version=platform.python_version()
    )
    return model


def _load_pyfunc(path: str) -> "PolicyPyfunc":
    """Load the policy from the folder of its checkpoint. MLflow calls this function by its name."""
    return PolicyPyfunc(Path(path))


class PolicyPyfunc:
    """The policy as an MLflow model that generates one turn for each prompt."""

    def __init__(self, folder: Path):
        import torch

        from components.policy.checkpoint import load_model, load_tokenizer
        from components.policy.transformers_sampler import TransformersSampler

        device = "cuda" if torch.cuda.is_available() else "cpu"
        self.tokenizer = load_tokenizer(folder)
        self.sampler = TransformersSampler(
            load_model(folder, dtype=torch.bfloat16 if device == "cuda" else torch.float32, device=device),
            self.tokenizer,
            batch=16,
            device=device,
            version=str(folder),
        )

    def predict(self, model_input: Any, params: dict[str, Any] | None = None) -> list[str]:
        """Return the text that the policy generates for each row of a data frame with a column `prompt`.

        `params` may contain max_new_tokens and temperature, which otherwise have the values in DEFAULTS.
        """
        settings = DEFAULTS | (params or {})
        ids = [
            self.tokenizer.encode(
                self.tokenizer.apply_chat_template(
                    [{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True
                ),
                add_special_tokens=False,
            )
            for prompt in model_input[PROMPT]
        ]
        said = complete_all(
            self.sampler,
            ids,
            max_new_tokens=int(settings["max_new_tokens"]),
            temperature=float(settings["temperature"]),
            seed=0,
        )
        return [
            str(self.tokenizer.decode(list(completion.ids), skip_special_tokens=True)) for completion in said
        ]
