"""Resolution of the parameters of a run from `params.yaml`, a profile and options; the kinds of parameters.

`params.yaml` has a base section and profiles that override parts of it. The types, meanings and permitted
values are in `params.py` and the two files that it includes. The kind of a parameter is `result` if it
changes what a run computes, measures or publishes, and `throughput` if it does not (`records.py`).
"""

import contextlib
import difflib
import json
import os
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_origin

import yaml
from pydantic import BaseModel, ValidationError

from components.core.errors import UserError, refuse
from components.core.params import JudgeParams, Params

PROJECT = Path(__file__).resolve().parents[2]
# What PyYAML raises for a text that is no YAML, or that it cannot represent, such as the date 2024-13-45.
NOT_YAML = (yaml.YAMLError, ValueError, LookupError, AttributeError, RecursionError)


def _known_keys(model: type[BaseModel], prefix: str = "") -> dict[str, Any]:
    """Return the pydantic fields of a model and of its sections by dotted key, such as "data.seed".

    `prefix` is put before every key.
    """
    keys: dict[str, Any] = {}
    for name, field in model.model_fields.items():
        keys[prefix + name] = field
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            keys |= _known_keys(field.annotation, f"{prefix}{name}.")
    return keys


KNOWN = _known_keys(Params)
# Dotted keys of the parameters that are mappings and accept any key, such as data.operator_mix.
MAPPINGS = {key for key, field in KNOWN.items() if get_origin(field.annotation) is dict}


def flatten_values(values: dict[Any, Any], prefix: str = "") -> dict[str, Any]:
    """Return the values of nested sections by dotted key, such as {"data.seed": 1} for {"data": {"seed": 1}}.

    `prefix` is put before every key. The value of a parameter that is itself a mapping (`MAPPINGS`) stays one
    value.
    """
    flat: dict[str, Any] = {}
    for key, value in values.items():
        dotted = f"{prefix}{key}"
        if isinstance(value, dict) and dotted not in MAPPINGS:
            flat |= flatten_values(value, f"{dotted}.")
        else:
            flat[dotted] = value
    return flat


def _kind(key: str) -> str:
    marks = KNOWN[key].json_schema_extra
    if not marks:
        raise TypeError(
            f"components/core/params.py: {key} is not marked; make its field with result() or throughput()"
        )
    return str(marks["kind"])


# Kind of every parameter by dotted key; sections have none.
KINDS = {
    key: _kind(key)
    for key, field in KNOWN.items()
    if not (isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel))
}


def result_values(params: JudgeParams, names: Collection[str] | None = None) -> dict[str, Any]:
    """Return the values of the parameters that change results, by dotted key, in the order of declaration.

    They are those of the kind `result`, which core/records.py defines. `names` are the dotted keys of
    parameters or of sections to which the result is limited; by default, it is not limited. The value of a
    mapping, such as data.operator_mix, is one value.
    """
    values = flatten_values(params.model_dump(mode="json"))
    return {
        key: values[key]
        for key, kind in KINDS.items()
        if kind == "result"
        and key in values
        and (names is None or any(key == name or key.startswith(f"{name}.") for name in names))
    }


def _read(path: Path) -> dict[str, Any]:
    try:
        values = yaml.safe_load(path.read_text())
        json.dumps(values, default=str, skipkeys=True)  # raises ValueError if an alias is part of itself
    except OSError as error:
        raise UserError(
            f"{path}: the parameter file cannot be read ({error.strerror}); give its path with --params."
        ) from error
    except NOT_YAML as error:
        raise UserError(
            f"{path}: not valid YAML ({' '.join(str(error).split())}); fix the syntax."
        ) from error
    if not isinstance(values, dict):
        raise UserError(f"{path}: a mapping of parameters is expected; fix the file.")
    return values


def default_device() -> str:
    """Return the device of commands that are given none, which is `cuda` or `cpu`.

    It is `cuda` if /dev has the device file of an NVIDIA GPU.
    """
    return "cuda" if any(Path("/dev").glob("nvidia[0-9]*")) else "cpu"


@dataclass(frozen=True)
class Resolved:
    """The parameters of one run, and the name of the profile that they were resolved with, or "" without one.

    A profile is a named section of params.yaml that overrides parameters. `sources` has the origin of each
    value by dotted key, such as "params.yaml" or "--set seed=1".
    """

    params: Params
    sources: dict[str, str]
    profile: str


def resolve(profile: str = "", sets: tuple[str, ...] = (), path: Path = PROJECT / "params.yaml") -> Resolved:
    """Return the parameters of a run, computed from params.yaml, a profile and KEY=VALUE options.

    A profile is a named section of params.yaml. Its values, and those of its variant for the device (such as
    smoke-cuda for the profile smoke and the device cuda, if the file has it), override the base values. Each
    KEY=VALUE in `sets` overrides these and the items of `sets` before it. An empty `profile` means no
    profile. `path` is the parameter file. Raises UserError if the file cannot be read, for an unknown profile
    or parameter, for the first value that is not valid, and for values that contradict each other.
    """
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for origin, layer in _layers(profile, sets, path):
        for key, value in layer.items():
            if key not in KNOWN and key.rpartition(".")[0] not in MAPPINGS:
                nearest = difflib.get_close_matches(key, list(KNOWN), n=1, cutoff=0.0)[0]
                raise UserError(f"{origin}: unknown parameter {key}; the nearest known one is {nearest}.")
            values[key], sources[key] = value, origin
    try:
        # YAML 1.1 reads 3e-6 as a string, which pydantic converts to a number.
        params = Params.model_validate(_nested(values, sources))
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        while key not in KNOWN and "." in key:
            key = key.rpartition(".")[0]
        meaning = KNOWN[key].description if key in KNOWN else ""
        raise UserError(
            f"{sources.get(key, path.name)}: {key} = {values.get(key)!r} is not accepted ({first['msg']}); "
            f"it is the {meaning}."
        ) from error
    _check_combinations(params, sources)
    return Resolved(params, sources, profile)


def _layers(profile: str, sets: tuple[str, ...], path: Path) -> list[tuple[str, dict[str, Any]]]:
    """Return the layers of parameter values, each as its name for messages and its values by dotted key.

    The layers are the base section of the file `path`, the profile, and each KEY=VALUE in `sets`. A layer
    overrides the layers before it. If the device is DEVICE and the file has a profile PROFILE-DEVICE, such as
    smoke-cuda, this profile overrides the profile PROFILE, because a GPU needs other sizes than a processor
    core. DEVICE is the value of the parameter `device` in the last of these layers that has one. Raises
    UserError for an unknown profile, an unreadable file, or an item of `sets` that is not KEY=VALUE.
    """
    base = _read(path)
    profiles = base.pop("profiles", None) or {}
    if not isinstance(profiles, dict) or not all(isinstance(item or {}, dict) for item in profiles.values()):
        raise UserError(f"{path}: profiles must be a mapping of names to mappings of parameters; mend it.")
    if profile and profile not in profiles:
        raise UserError(
            f"{path}: unknown profile {profile}; "
            f"give one of {', '.join(map(str, profiles)) or 'none: it has no profiles'}."
        )

    def layer(name: str) -> tuple[str, dict[str, Any]]:
        return f"{path.name}: profiles.{name}", flatten_values(profiles[name] or {})

    layers = [(path.name, flatten_values(base)), *([layer(profile)] if profile else [])]
    options = [_option(item) for item in sets]
    devices = [values["device"] for _, values in (*layers, *options) if "device" in values]
    sizes = f"{profile}-{devices[-1]}" if devices else ""
    return [*layers, *([layer(sizes)] if sizes in profiles else []), *options]


def _option(item: str) -> tuple[str, dict[str, Any]]:
    """Return the name for messages and the values by dotted key of one `--set` option.

    The option `item` is KEY=VALUE with the value as YAML; seed=1 gives ("--set seed=1", {"seed": 1}). If the
    value is a mapping, each of its fields has a dotted key. Raises UserError if there is no `=` or the value
    is not valid YAML.
    """
    key, equals, text = item.partition("=")
    if not equals:
        raise UserError(f"--set {item}: KEY=VALUE is expected, for instance --set seed=1.")
    try:
        return f"--set {item}", flatten_values({key: _value(text)})
    except NOT_YAML as error:
        raise UserError(f"--set {item[:200]}: the value is not valid YAML; quote it.") from error


def _value(text: str) -> Any:
    """Return the value of a text in YAML, of which a text in JSON is a special case.

    YAML does not combine the two escapes by which JSON writes a character such as an emoji.
    """
    if text.startswith('"'):
        with contextlib.suppress(ValueError):
            return json.loads(text)
    return yaml.safe_load(text)


def _nested(values: dict[str, Any], sources: dict[str, str]) -> dict[str, Any]:
    """Convert values by dotted key to nested mappings, such as {"data.seed": 1} to {"data": {"seed": 1}}.

    In a parameter that is itself a mapping (`MAPPINGS`), keys of digits become integers. Raises UserError if
    the value of a section is not a mapping. `sources` has the origins of the values by dotted key, for the
    message.
    """
    nested: dict[Any, Any] = {}
    for key in sorted(values, key=lambda key: key.count(".")):
        parent, _, last = key.rpartition(".")
        node, parts = nested, parent.split(".") if parent else []
        for depth, part in enumerate(parts, 1):
            node = node.setdefault(part, {})
            if not isinstance(node, dict):
                section = ".".join(parts[:depth])
                raise UserError(f"{sources[section]}: {section} is a section; give its fields.")
        node[int(last) if parent in MAPPINGS and last.isdecimal() else last] = values[key]
    return nested


def _check_combinations(params: Params, sources: dict[str, str]) -> None:
    """Raise UserError if values that are valid on their own contradict each other.

    `sources` has the origins of the values by dotted key, for the message.
    """
    data, policy, samplers = params.data, params.policy, params.pool.samplers
    shares = sum(data.operator_mix.values())
    contradictions = [
        (
            set(data.operator_mix) - set(range(1, 6)) or abs(shares - 1) > 1e-6,
            "data.operator_mix",
            f"must give shares for 1 to 5 operators that add up to 1, not {shares:g}",
        ),
        *(
            (
                ppo.advantages == "critic" and ppo.critic_warmup_steps + ppo.min_updates > ppo.steps,
                f"{name}.critic_warmup_steps",
                f"leaves fewer than {name}.min_updates of the {ppo.steps} steps to the actor; lower it",
            )
            for name, ppo in (("warmup", params.warmup), ("agentic", params.agentic))
        ),
        (
            data.half_share and data.operators == "kernelbench",
            "data.half_share",
            "asks for half precision, in which no kernels of these operators are written; set it to 0, or "
            "data.operators to core",
        ),
        (
            data.workload_share and data.operators != "core",
            "data.workload_share",
            "asks for tasks of several shapes, which are composed of core operators only; set it to 0, or "
            "data.operators to core",
        ),
        (
            data.weigh_by_headroom and not data.headroom,
            "data.weigh_by_headroom",
            "needs the measurement; set data.headroom to true as well",
        ),
        (
            data.composer and data.operators in ("core", "kernelbench"),
            "data.composer",
            "asks for mined operators; set data.operators to torch as well",
        ),
        (
            data.composer and not data.composer_model,
            "data.composer_model",
            "must name the model that data.composer is asked for",
        ),
        (
            os.path.expanduser(params.home).startswith("~"),
            "home",
            f"names {params.home}, which has no place, because there is no such home folder; give a path",
        ),
        *(
            (low >= high, key, f"must be [lowest, highest], not [{low:g}, {high:g}]")
            for key, (low, high) in (("data.eager_seconds", data.eager_seconds), ("data.numel", data.numel))
        ),
        (
            params.evaluation.suite == "held-out" and params.evaluation.levels,
            "evaluation.levels",
            "names levels, which tasks of the suite held-out do not have; set it to [] too",
        ),
        (
            samplers and policy.backend != "vllm-server",
            "pool.samplers",
            f"gives samplers GPUs of their own, and the backend {policy.backend} samples on the trainers'; "
            "set it to 0, or policy.backend to vllm-server",
        ),
        (
            samplers and policy.weight_transfer == "ipc",
            "pool.samplers",
            "gives samplers GPUs of their own, and policy.weight_transfer ipc needs the trainer's; "
            "set it to 0, or the transfer to nccl or disk",
        ),
        (
            policy.backend == "vllm-server"
            and policy.weight_transfer == "nccl"
            and not (samplers or policy.servers),
            "policy.weight_transfer",
            "nccl needs samplers on GPUs of their own, and the server that the run starts shares the "
            "trainer's; set it to ipc or disk, or pool.samplers to the number of other GPUs",
        ),
        (
            samplers and policy.sleep,
            "pool.samplers",
            "gives samplers GPUs of their own, so policy.sleep would free memory that no trainer uses; "
            "set it to 0, or policy.sleep to false",
        ),
    ]
    refuse(
        *(
            (is_found, f"{sources.get(key, 'params.yaml')}: {key} {why}.")
            for is_found, key, why in contradictions
        )
    )


def is_gguf(source: str | Path) -> bool:
    """Return whether `source`, the path of a policy, ends in .gguf in upper or lower case.

    The file is not read and need not exist.
    """
    return Path(source).suffix.lower() == ".gguf"


def load_arguments(source: Path) -> dict[str, Any]:
    """Return the keyword arguments with which transformers' `from_pretrained` loads what is in `source`.

    `source` is a GGUF file (its name ends in .gguf) or a folder in the format of Hugging Face.
    """
    if is_gguf(source):
        return {"pretrained_model_name_or_path": source.parent, "gguf_file": source.name}
    return {"pretrained_model_name_or_path": source}


def check_policy_source(params: Params) -> None:
    """Raise UserError unless policy.source names a policy from which a run can start.

    It must be `scratch` (a new policy with random weights), `champion` (the promoted version in the
    registry), a Hugging Face folder (one with config.json), or a GGUF file. If it is `champion`, policy.base
    must be one of the others, because that policy is used while no version is promoted.
    """
    is_champion = params.policy.source == "champion"
    key, source = ("base", params.policy.base) if is_champion else ("source", params.policy.source)
    if source == "scratch" or (Path(source) / "config.json").is_file():
        return
    if is_gguf(source) and Path(source).is_file():
        with Path(source).open("rb") as file:
            is_damaged = file.read(4) != b"GGUF"
        refuse((is_damaged, f"policy.{key}: {source} is no GGUF file, or is damaged; fetch it again."))
        return
    lacks = "is neither a folder nor a GGUF file" if Path(source).exists() else "does not exist"
    lacks = "has no config.json" if Path(source).is_dir() else lacks
    raise UserError(
        f"policy.{key}: {source} {lacks}; link the folder of a Hugging Face model there, "
        f"or give one, or a GGUF file, with --set policy.{key}=PATH."
    )
