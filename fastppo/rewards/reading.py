"""Reads the signatures of rewards and environments, those in files without running them.

So a function that is missing, or that cannot be called, is refused before anything is imported, and
no user's code runs twice.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fastppo.data.files import MissingPathError
from fastppo.rewards.calling import UserCodeError, call

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def find_definition(where: str, name: str, option: str) -> Definition | None:
    """The definition of `name` in the file `where`; None where only running it would say.

    Raises:
        ValueError: there is no file, it is not Python, or nothing in it is called so.
    """
    if not Path(where).is_file():
        raise MissingPathError(f"{option} {where}:{name}: there is no file {where}", where)
    try:
        module = ast.parse(Path(where).read_bytes(), where)
    except (SyntaxError, ValueError) as error:
        raise ValueError(f"{option} {where}:{name}: {_place(error)}") from error
    for node in module.body:
        if isinstance(node, Definition) and node.name == name:
            return node
    if not _may_have(module, name):
        kind = ast.ClassDef if option == "environment" else ast.FunctionDef
        known = [node.name for node in module.body if isinstance(node, kind)]
        raise ValueError(
            f"{option} {where}:{name}: no function {name!r} there; "
            f"it has {', '.join(known) or 'none'}"
        )
    return None


def signature_of(function: Callable[..., Any]) -> inspect.Signature | None:
    """A function's signature; None of one without, made in C, or that raises when it is asked."""
    try:
        return call(lambda: inspect.signature(function))
    except UserCodeError:
        return None


def read_signature(node: Definition | None) -> inspect.Signature | None:
    """The signature of a function's definition; None for a decorated function, or where there is
    none."""
    if node is None or isinstance(node, ast.ClassDef) or node.decorator_list:
        return None
    # A function of the same arguments, whose defaults are nothing: only names and places matter.
    arguments = node.args
    plain = [ast.arg(argument.arg) for argument in arguments.args]
    stub = ast.Lambda(
        ast.arguments(
            posonlyargs=[ast.arg(argument.arg) for argument in arguments.posonlyargs],
            args=plain,
            vararg=arguments.vararg and ast.arg(arguments.vararg.arg),
            kwonlyargs=[ast.arg(argument.arg) for argument in arguments.kwonlyargs],
            kw_defaults=[value and ast.Constant(None) for value in arguments.kw_defaults],
            kwarg=arguments.kwarg and ast.arg(arguments.kwarg.arg),
            defaults=[ast.Constant(None) for _ in arguments.defaults],
        ),
        ast.Constant(None),
    )
    expression = ast.fix_missing_locations(ast.Expression(stub))
    return inspect.signature(eval(compile(expression, node.name, "eval")))


def read_methods(node: Definition | None) -> dict[str, inspect.Signature]:
    """What `method_signatures` gives, as far as the body of a class has them."""
    if not isinstance(node, ast.ClassDef):
        return {}
    signatures = {}
    for method in node.body:
        if isinstance(method, ast.FunctionDef | ast.AsyncFunctionDef):
            signature = read_signature(method)
            if method.name in ("__init__", *METHODS) and signature is not None:
                signatures[method.name] = signature
    if "step" not in signatures:  # a base class's, or there are tools, whose reset is given the row
        signatures.pop("reset", None)
    return signatures


def _may_have(module: ast.Module, name: str) -> bool:
    """Whether a module may define the name: by an assignment, an import or a nested `def`."""
    for node in ast.walk(module):
        if isinstance(node, Definition) and node.name == name:
            return True
        if isinstance(node, ast.Name) and node.id == name:
            return True
        if isinstance(node, ast.alias) and (node.asname or node.name) in (name, "*"):
            return True
        if isinstance(node, ast.Name) and node.id in ("globals", "vars", "exec", "setattr"):
            return True
    return False


def _place(error: SyntaxError | ValueError) -> str:
    """What is wrong with a file that is not Python, and where."""
    if isinstance(error, SyntaxError):
        code = f": {error.text.strip()}" if error.text else ""
        return f"{type(error).__name__}: {error.msg} (line {error.lineno}{code})"
    return str(error)


# -------------------------------------------------------------------------------- environments


METHODS = ("reset", "step")
"""Methods that an environment must have."""

EXPECTED = "a class without arguments that has reset(prompt, **columns) and step(text)"
"""What an environment is expected to be."""


def method_signatures(make: Any) -> dict[str, inspect.Signature]:
    """The signatures of those of `__init__`, `reset` and `step` that a class has, or that of a
    function by its name; none for any other callable."""
    if inspect.isfunction(make):
        signature = signature_of(make)
        return {} if signature is None else {make.__name__: signature}
    if not inspect.isclass(make):
        return {}
    methods = {name: getattr(make, name, None) for name in ("__init__", *METHODS)}
    signatures = {
        name: signature_of(method) for name, method in methods.items() if inspect.isfunction(method)
    }
    return {name: signature for name, signature in signatures.items() if signature is not None}


def check_methods(
    signatures: Mapping[str, inspect.Signature], source: str, columns: Sequence[str]
) -> None:
    """Checks that an environment can be made and called, as far as signatures say it.

    Args:
        signatures: of its methods by name, with `self`, or of the function that makes it.
        source: names the prompts in an error.
        columns: the prompts' columns, without the prompt's own.

    Raises:
        ValueError: one cannot; the sentence says what is expected.
    """
    given: dict[str, list[Any]] = {"__init__": [None], "reset": [None, ""], "step": [None, ""]}
    for method, signature in signatures.items():
        keywords = columns_for(signature, dict.fromkeys(columns)) if method == "reset" else {}
        try:
            signature.bind(*given.get(method, []), **keywords)
        except TypeError as error:
            known = ", ".join(columns) or "none beside the prompt"
            raise ValueError(
                f"environment: {method} takes {signature}: {error}; expected {EXPECTED}; the "
                f"columns of {source} are: {known}"
            ) from None


GIVEN_TO_AGENTS = ("base_url", "api_key", "prompt")
"""What an agent is given beside the columns of its row."""


def check_agent(signature: inspect.Signature, source: str, columns: Sequence[str]) -> None:
    """Checks that an agent of this signature can be called.

    Args:
        source: names the prompts in an error.
        columns: the prompts' columns, without the prompt's own.

    Raises:
        ValueError: it cannot; the sentence says what it is given.
    """
    given = (*GIVEN_TO_AGENTS, *columns)
    try:
        signature.bind(**columns_for(signature, dict.fromkeys(given)))
    except TypeError as error:
        raise ValueError(
            f"environment: the agent takes {signature}: {error}; with the columns of {source} it "
            f"is given {', '.join(given)}"
        ) from None


def columns_for(signature: inspect.Signature, columns: Mapping[str, Any]) -> dict[str, Any]:
    """The columns that a signature has room for."""
    parameters = signature.parameters.values()
    takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    return {k: v for k, v in columns.items() if takes_all or k in signature.parameters}
