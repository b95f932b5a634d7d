"""`jaxdist plan`: memory, communication and time of a step on other devices, as tables or JSON."""

import ast
import importlib
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from jaxdist.control.stacks import users_line
from jaxdist.errors import message_of


def plan(
    what: Annotated[
        str,
        typer.Argument(metavar="MODULE:FUNCTION", help="Or FILE.py:FUNCTION; returns (decorated step, *arguments)."),
    ],
    options: Annotated[
        list[str] | None, typer.Argument(metavar="[NAME=VALUE]...", help="Arguments for the function.")
    ] = None,
    topology: Annotated[
        str,
        typer.Option(
            help="DEVICESxKIND or HOSTSxDEVICESxKIND. Kinds: A100-40, A100-80, H100, H200, B200, cpu. For TPUs, "
            "KIND:SHAPE or SLICESxKIND:SHAPE, such as v5e:4x4. Kinds: v4, v5e, v5p, v6e."
        ),
    ] = "8xH100",
    levels: Annotated[str, typer.Option(help="Comma-separated ZeRO levels to compare.")] = "0,1,2,3",
    mesh: Annotated[
        str,
        typer.Option(
            metavar="AXIS=SIZE,...",
            help="Mesh such as data=8,model=8, with the axes within a host last; one size may be -1. Default: the "
            "step's own mesh. With --fit, auto finds the fastest mesh.",
        ),
    ] = "",
    fitted: Annotated[
        bool,
        typer.Option(
            "--fit", help="Find the fastest ZeRO level and sharding groups (all devices, or each host) that fit."
        ),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON object instead of tables.")] = False,
) -> None:
    """Compile a step for other devices, and print its memory, communication, and time.

    FUNCTION returns `(step, *args)`, the arguments of `jaxdist.plan`. The arguments may be shapes from
    `jax.eval_shape`, so that no array of the model is created. The batch is the batch of all devices.
    """
    import jax

    from jaxdist.planning.fitting import fit
    from jaxdist.planning.fitting import plan as make_plan

    jax.config.update("jax_platforms", "cpu")  # ignore local GPUs and TPUs
    try:
        if not set(chosen := levels.split(",")) <= {"", "0", "1", "2", "3"}:
            raise ValueError(f"--levels {levels}: expected comma-separated numbers from 0 to 3")
        if mesh == "auto" and not fitted:
            raise ValueError("--mesh auto needs --fit, which chooses between meshes")
        how: dict[str, Any] = {"topology": topology, "levels": [int(level) for level in chosen if level]}
        if mesh:
            how["mesh"] = mesh if mesh == "auto" else _pairs(mesh.split(","), "--mesh AXIS=SIZE,...")
        made = function_of(what)(**_pairs(options or [], "NAME=VALUE"))
        if not isinstance(made, tuple) or not made:
            raise TypeError(f"{what} returned {type(made).__name__}, expected a tuple (step, *args)")
        found = fit(*made, **how) if fitted else make_plan(*made, **how)
    except (ValueError, TypeError, OSError) as problem:
        line = users_line(problem.__traceback__)
        said = f"{message_of(problem)} ({line})" if line else message_of(problem)
        notes = [note for note in getattr(problem, "__notes__", []) if "JAX_TRACEBACK_FILTERING" not in note]
        raise typer.BadParameter("; ".join([said, *notes])) from None
    print(found.to_json() if as_json else found)


def function_of(what: str) -> Any:
    """Return the function named by `module:function` or `file.py:function`."""
    name, _, attribute = what.rpartition(":")
    if not name or not attribute:
        raise ValueError(f"{what!r}: expected MODULE:FUNCTION or FILE.py:FUNCTION")
    file = Path(name) if name.endswith(".py") else None
    if file is not None and not file.is_file():
        raise ValueError(f"no such file: {name} (looked in {Path.cwd()})")
    sys.path.insert(0, str((file.parent if file else Path()).resolve()))  # as Python does for a script
    sys.argv = [name]  # a script may read its arguments
    module = file.stem if file else name
    try:
        function = getattr(importlib.import_module(module), attribute, None)
    except ModuleNotFoundError as error:
        if error.name != module.partition(".")[0] and error.name != module:
            raise  # one of its own imports
        raise ValueError(f"no such module: {name} (looked in {Path.cwd()} and on Python's path)") from None
    if not callable(function):
        raise ValueError(f"{name} has no function {attribute!r}")
    return function


def _pairs(texts: list[str], expected: str) -> dict[str, Any]:
    found = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name.isidentifier():
            raise ValueError(f"{text!r}: expected {expected}")
        try:
            found[name] = ast.literal_eval({"true": "True", "false": "False", "none": "None"}.get(value, value))
        except (ValueError, SyntaxError):
            found[name] = value
    return found
