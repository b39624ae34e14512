"""This module makes a kernel task from a Python file of the user.

The file may already be a kernel task, that is, it defines the class Model and the functions get_inputs() and
get_init_inputs(). For any other file, the user names one class and gives expressions for its inputs. The
class is then renamed to Model, and the two functions are added.
"""

import ast
from pathlib import Path

from components.core.errors import UserError
from components.core.task import KernelTask, check_contract, load_task
from components.core.text import parse_python


def user_task(path: Path, class_name: str, inputs: str, init: str) -> KernelTask:
    """Return the kernel task in the file `path`, or make a task of the class `class_name` in this file.

    If `class_name` is empty, the file must already be a kernel task. `inputs` is the source of an expression
    for one tensor or for a list of tensors, and `init` is the source of an expression for the list of the
    constructor's arguments. Both are used only with `class_name`. Raises UserError if the options do not fit
    together or the file is not a usable module.
    """
    if not class_name:
        if inputs or init:
            raise UserError("--inputs, --init: they describe a class of the file; name it with --class.")
        return load_task(path)
    if not inputs:
        raise UserError(
            "--inputs: missing; give an expression that makes the inputs, for instance --inputs "
            "'torch.randn(1024, 512)'."
        )
    try:
        tree = parse_python(path.read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: the file cannot be read ({error}); give a readable Python file.") from error
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise UserError(f"{path}: not valid Python ({error}); fix the syntax.") from error
    classes = [node.name for node in tree.body if isinstance(node, ast.ClassDef)]
    if class_name not in classes:
        raise UserError(
            f"{path}: --class {class_name}: the file has no class of this name; it has "
            f"{', '.join(classes) or 'none'}."
        )
    if class_name != "Model" and "Model" in classes:
        raise UserError(f"{path}: --class {class_name}: the file has a class Model as well; rename that one.")
    for node in ast.walk(tree):  # rename the class, and every use of its name, as in super(Name, self)
        if isinstance(node, ast.ClassDef) and node.name == class_name:
            node.name = "Model"
        elif isinstance(node, ast.Name) and node.id == class_name:
            node.id = "Model"
    tree.body = [
        node
        for node in tree.body
        if not (isinstance(node, ast.FunctionDef) and node.name in ("get_inputs", "get_init_inputs"))
    ]
    functions = (
        f"import torch\n\ndef get_inputs():\n    return {_list(inputs, '--inputs')}\n\n"
        f"def get_init_inputs():\n    return {_list(init or '[]', '--init')}\n"
    )
    code = f"{ast.unparse(ast.fix_missing_locations(tree))}\n\n{functions}"
    check_contract(code, str(path))
    return KernelTask(code=code, name=path.stem)


def _list(expression: str, option: str) -> str:
    """Return `expression` as the source of a list.

    A written list or tuple becomes a list with the same elements, and any other expression becomes the only
    element of a list. Raises UserError, in which `option` is named, if `expression` is not valid Python.
    """
    try:
        body = ast.parse(expression.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise UserError(
            f"{option} {expression}: not a Python expression ({error}); give for instance "
            f"'torch.randn(1024, 512)'."
        ) from error
    if isinstance(body, ast.List):
        return ast.unparse(body)
    return f"list({ast.unparse(body)})" if isinstance(body, ast.Tuple) else f"[{ast.unparse(body)}]"
