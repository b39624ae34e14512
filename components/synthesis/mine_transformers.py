"""Mining of modules from the installed transformers library, which finds those that can become tasks.

A task is a self-contained PyTorch module that a policy has to make faster. The mined modules are norms,
activations, attention, feed-forward blocks, rotary embeddings and routers. A module is extracted from its
file in the library, together with all definitions of the file that it uses. Annotations and decorators are
removed, and the configuration is replaced by a namespace of the values that the source reads. A module that
needs another file of the library is left out.
"""

import ast
import contextlib
import importlib
import json
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from components.synthesis.mined_operators import FIXED, TransformersModule, write_module_source
from components.synthesis.source_extraction import CannotExtract, LibraryFile

# Folders of transformers.models that are mined. Most other folders contain copies of these modules.
FAMILIES = tuple(
    """
    albert bamba bart beit bert bitnet bloom clip cohere cohere2 convnext convnextv2 dbrx deberta_v2
    deepseek_v2 deepseek_v3 diffllama dinov2 electra esm falcon funnel gemma gemma2 gemma3 glm glm4 gpt2
    gpt_neox gpt_oss gptj granite granitemoe helium jamba layoutlmv3 levit llama llama4 mamba mamba2
    mixtral mobilevit modernbert mpt nemotron olmo olmo2 olmoe opt persimmon phi phi3 phimoe poolformer
    qwen2 qwen2_moe qwen3 qwen3_moe qwen3_next resnet roberta sam segformer siglip stablelm starcoder2
    swin t5 vit wav2vec2 whisper xglm zamba2
    """.split()
)
VECTOR, IMAGE = "torch.randn({batch}, {length}, {hidden})", "torch.randn({batch}, {hidden}, {side}, {side})"
INPUTS = frozenset(
    (
        "hidden_states x hidden_state inputs input hidden features input_tensor hidden_states_gate "
        "residual pixel_values query embeddings"
    ).split()
)
# Values of other arguments of a call, and the tensors that take the places of the braces.
POSITIONS: dict[str, tuple[str, tuple[str, ...]]] = {
    "position_ids": ("{}", ("torch.arange({length}).unsqueeze(0)",)),
    "position_embeddings": ("({}, {})", ("torch.randn(1, {length}, 64)",) * 2),
    "attention_mask": ("None", ()),
}
MADE_WITH = {
    "config": "config",
    "layer_idx": "0",
    "layer_id": "0",
    "layer_number": "0",
    "block_size": "64",
    "eps": "1e-6",
    "dtype": "torch.float32",
    **dict.fromkeys(
        (
            "hidden_size dim d_model normalized_shape in_features embed_dim num_features channels "
            "in_channels num_channels"
        ).split(),
        "{hidden}",
    ),
    **dict.fromkeys("intermediate_size hidden_features ffn_dim out_channels".split(), "{twice}"),
    **dict.fromkeys("num_heads num_attention_heads".split(), "{heads}"),
}
SEVERAL = "gives no single float32 tensor back"
# Sizes of the inputs on which modules are tried.
SIZE = {"batch": 2, "length": 16, "hidden": 256}


def mine() -> tuple[list[TransformersModule], dict[str, str]]:
    """Try the modules of the installed transformers, and return the usable ones and why the others are not.

    The usable modules are in the order of their files: activations.py first, then the model folders in
    FAMILIES. The second item has the reason for each class, or function that applies rotary embeddings, that
    was tried and left out, by a name such as transformers.llama.LlamaMLP. Mining takes about a minute on one
    core.
    """
    modules: list[TransformersModule] = []
    left_out: dict[str, str] = {}
    meanings: dict[str, str] = {}
    importlib.import_module("transformers.utils.logging").set_verbosity_error()
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]), torch.no_grad():
        warnings.simplefilter("ignore")
        for family, path in _files():
            library = LibraryFile(path)
            config = None if family == "activations" else _config(family)
            for name in [*library.classes(), *library.rotations()]:
                try:
                    module = (
                        _module(library, family, name, config)
                        if name in library.classes()
                        else _rotation(library, family, name)
                    )
                    meaning = (
                        re.sub(rf"\b{library.prefix}(?=[A-Z])", "", module.code).replace(library.prefix, "")
                        + module.call
                    )
                    if meaning in meanings:
                        raise CannotExtract(f"the same as {meanings[meaning]}")
                    meanings[meaning] = f"{family}.{name}"
                    modules.append(module)
                except CannotExtract as reason:
                    left_out[f"transformers.{family}.{name}"] = str(reason)
    return modules, left_out


def _files() -> Iterator[tuple[str, Path]]:
    root = Path(importlib.import_module("transformers").__path__[0])
    yield "activations", root / "activations.py"
    for family in FAMILIES:
        path = root / "models" / family / f"modeling_{family}.py"
        if path.is_file():
            yield family, path


def _config(family: str) -> Any:
    """Return the default configuration of a model family, or None if there is none.

    `family` is a folder's name in transformers.models. If the family has several configuration classes, that
    of its text model is used, or else the one with the shortest name. The result is also None if the class
    cannot be created without arguments.
    """
    try:
        library = importlib.import_module(f"transformers.models.{family}.configuration_{family}")
        classes = [
            thing
            for name, thing in vars(library).items()
            if name.endswith("Config") and getattr(thing, "__module__", "") == library.__name__
        ]
        classes.sort(key=lambda thing: ("Text" not in thing.__name__, len(thing.__name__)))
        return classes[0]() if classes else None
    except (ImportError, TypeError, ValueError, AttributeError):
        return None


def _module(library: LibraryFile, family: str, name: str, config: Any) -> TransformersModule:
    """Return the class `name` of a file of transformers as a module for tasks, with inputs on which it runs.

    `library` is the parsed file, `family` the name of its model folder, and `config` the default
    configuration of the family, or None. Raises CannotExtract with the reason if the class cannot be
    extracted, or if `_find_defect` finds a defect with each of the inputs that are tried.
    """
    code = library.extract(name)
    node = library.defined[name]
    assert isinstance(node, ast.ClassDef)
    required = _required(node, "__init__", library)
    for argument in required:
        if argument not in MADE_WITH:
            raise CannotExtract(f"is made with {argument}, and no rule says what to give")
    init = f"{name}({', '.join(MADE_WITH[argument] for argument in required)})"
    read = sorted(set(re.findall(r"config\.(\w+)|getattr\([\w.]*config, '(\w+)'", code)))
    values: dict[str, Any] = {}
    for key in ("".join(pair) for pair in read):
        value = FIXED.get(key, _NOTHING)
        value = value if key.startswith("_") else getattr(config, key, value)
        with contextlib.suppress(TypeError, ValueError):  # Values that JSON cannot express are left out.
            json.dumps(value)
            values[key] = value
    reason = ""
    for main in (VECTOR, IMAGE):
        try:
            inputs, call = _write_call(_required(node, "forward", library), main)
            for result in (call, f"{call}[0]", f"{call}[1]", f"{call}[2]"):
                module = TransformersModule(name, family, code, values, init, result, tuple(inputs))
                defect = _find_defect(module)
                if not defect:
                    return module
                reason = defect if reason in ("", SEVERAL) else reason
                if defect != SEVERAL:
                    break
        except CannotExtract as missing:
            reason = reason or str(missing)
    raise CannotExtract(reason)


def _rotation(library: LibraryFile, family: str, name: str) -> TransformersModule:
    """Return a function of a file of transformers that applies rotary embeddings, as a module for tasks.

    `library` is the parsed file, `family` the name of its model folder, and `name` the function's. The
    function is called with (q, k, cos, sin) or (x, cos, sin). If it has two results, the module's output is
    their concatenation along the last dimension. Raises CannotExtract with the reason if the function cannot
    be extracted, or if `_find_defect` finds a defect in both calls.
    """
    code = library.extract(name)
    inputs = ("torch.randn({batch}, {heads}, {length}, 64)",) * 2 + ("torch.randn(1, {length}, 64)",) * 2
    for call in (f"torch.cat({name}(x, y, z, w), dim=-1)", f"{name}(x, y, z)"):
        module = TransformersModule(
            name, family, code, {}, "None", call, inputs if "w" in call else inputs[1:]
        )
        reason = _find_defect(module)
        if not reason:
            return module
    raise CannotExtract(reason)


_NOTHING = object()


def _required(node: ast.ClassDef, method: str, library: LibraryFile) -> list[str]:
    """Return the names of the arguments that a call of the method of the class `node` has to pass.

    They are the arguments without a default, and position_embeddings, without which attention does not run. A
    method that the class lacks is looked up in its base classes in the same file, which `library` has parsed.
    If none has it, the result is ["input"] for `forward`, and empty for another method.
    """
    for item in node.body:
        if isinstance(item, ast.FunctionDef) and item.name == method:
            names = [argument.arg for argument in item.args.args[1:]]
            required = names[: len(names) - len(item.args.defaults)]
            return [*required, *(name for name in names[len(required) :] if name == "position_embeddings")]
    for base in node.bases:
        if isinstance(parent := library.defined.get(ast.unparse(base)), ast.ClassDef):
            return _required(parent, method, library)
    return ["input"] if method == "forward" else []


def _write_call(arguments: list[str], main: str) -> tuple[list[str], str]:
    """Return the source texts of a task's inputs, and that of the call of `self.block` with these inputs.

    `self.block` is the attribute of the task's class `Model` that has the mined module. `arguments` are the
    names of the required parameters of the module's forward, and `main` is the expression for its main tensor
    input. The call names the inputs x, y, z, w. Raises CannotExtract if a parameter is unknown or more than
    four tensors are needed.
    """
    inputs: list[str] = []
    passed: list[str] = []
    for argument in arguments:
        if argument not in INPUTS and argument not in POSITIONS:
            raise CannotExtract(f"is called with {argument}, and no rule says what to give")
        value, tensors = ("{}", (main,)) if argument in INPUTS else POSITIONS[argument]
        passed.append(f"{argument}={value.format(*'xyzw'[len(inputs) :][: len(tensors)])}")
        inputs += tensors
        if len(inputs) > 4:
            raise CannotExtract("takes more than four tensors")
    return inputs, f"self.block({', '.join(passed)})"


def _find_defect(module: TransformersModule) -> str:
    """Return the reason why the module cannot be a task (a module to be made faster), or an empty string.

    The module is executed on small inputs (SIZE). It must run, be deterministic, and depend on its inputs. It
    must return a single float32 tensor of rank 2 or more, which is finite, not constant, and not equal to the
    first input.
    """
    scope: dict[str, Any] = {"__name__": "mined"}
    try:
        exec(compile(write_module_source(module, **SIZE), module.name, "exec"), scope)
        torch.manual_seed(1)
        model = scope["Model"]().eval()
        inputs = scope["get_inputs"]()
        out, again = model(*inputs), model(*inputs)
        other = model(*scope["get_inputs"]())
    except Exception as error:  # Library code may raise any exception on guessed arguments.
        return (
            f"does not run on guessed arguments ({type(error).__name__}: {' '.join(str(error).split())[:90]})"
        )
    if (
        not isinstance(out, torch.Tensor)
        or not isinstance(other, torch.Tensor)
        or out.dtype != torch.float32
        or out.dim() < 2
    ):
        return SEVERAL if isinstance(out, tuple) else "gives no float32 tensor back"
    is_flat = not torch.isfinite(out).all() or out.std() <= 1e-3 * out.abs().mean()
    defects = {
        "is not deterministic": not torch.equal(out, again),
        "gives a constant or something not finite": is_flat,
        "does not depend on its input": out.shape == other.shape and torch.equal(out, other),
        "gives its input back when not training": out.shape == inputs[0].shape
        and torch.equal(out, inputs[0]),
    }
    return next((reason for reason, is_found in defects.items() if is_found), "")
