"""`jaxdist plan`: what a step takes on devices that are not here, as tables, JSON and a picture."""

import ast
import importlib
import importlib.util
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jaxdist.cli.output import check_plot
from jaxdist.control.stacks import users_line
from jaxdist.errors import message_of

if TYPE_CHECKING:
    from jaxdist.planning.report import Plan


def plan(
    what: Annotated[
        str,
        typer.Argument(
            metavar="MODULE:FUNCTION", help="Or FILE.py:FUNCTION; it returns the decorated step and its arguments."
        ),
    ],
    options: Annotated[
        list[str] | None, typer.Argument(metavar="[NAME=VALUE]...", help="Arguments of the function.")
    ] = None,
    topology: Annotated[
        str, typer.Option(help="DEVICESxKIND or HOSTSxDEVICESxKIND; kinds: A100-40, A100-80, H100, H200, B200, cpu.")
    ] = "8xH100",
    levels: Annotated[str, typer.Option(help="ZeRO levels to compare, with commas between them.")] = "0,1,2,3",
    mesh: Annotated[
        str,
        typer.Option(
            metavar="AXIS=SIZE,...",
            help="The axes of the mesh, such as data=8,model=8 (-1 for one at most), those of a host last; auto, with "
            "--fit: whichever takes the least time. Default: those that the step was decorated with.",
        ),
    ] = "",
    fitted: Annotated[
        bool,
        typer.Option(
            "--fit",
            help="Find the level and the groups of devices (all, or those of each host) that fit, in the least "
            "estimated time. Microbatches and what jax.checkpoint recomputes stay as the step has them.",
        ),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON object instead of tables.")] = False,
    picture: Annotated[
        Path | None, typer.Option("--plot", help="Also draw the bytes by level: a .png, .pdf or .svg.")
    ] = None,
) -> None:
    """Compiles a step for devices that are not here; bytes on a device, collectives, what hides them.

    FUNCTION returns `(step, *args)`: what `jaxdist.plan` takes. The arguments may be abstract, as `jax.eval_shape`
    gives them, so that no array of the model is made; the batch is that of all devices together.
    """
    if os.environ.get("TF_CPP_MIN_LOG_LEVEL") == "1":  # JAX's default
        os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"  # XLA complains about each program that does not fit
    import jax

    from jaxdist.planning.fit import Fit, fit
    from jaxdist.planning.plan import plan as make_plan
    from jaxdist.planning.topology import Topology

    jax.config.update("jax_platforms", "cpu")  # a GPU that is here is not for this
    try:
        wanted = Topology.parse(topology)
        chosen = _levels(levels)
        if picture is not None:
            check_plot(picture, "--plot")
        sizes = "auto" if mesh == "auto" else _sizes(mesh)
        if isinstance(sizes, str) and not fitted:
            raise ValueError("--mesh auto is for --fit, which chooses between meshes")
        make = _function(what)
        made = make(**_arguments(options or []))
        if not isinstance(made, tuple) or not made:
            raise TypeError(f"{what} returned {type(made).__name__}, expected a tuple (step, *args)")
        if fitted:
            found = fit(*made, topology=wanted, levels=chosen, mesh=sizes)
        else:
            assert not isinstance(sizes, str)
            found = make_plan(*made, topology=wanted, levels=chosen, mesh=sizes)
    except (ValueError, TypeError, OSError) as problem:
        line = users_line(problem.__traceback__)
        said = f"{message_of(problem)} ({line})" if line else message_of(problem)
        notes = [note for note in getattr(problem, "__notes__", []) if "JAX_TRACEBACK_FILTERING" not in note]
        raise typer.BadParameter("; ".join([said, *notes])) from None
    if picture is not None:
        draw(found.plan if isinstance(found, Fit) else found, picture)
    print(found.to_json() if as_json else found)


def _levels(text: str) -> list[int]:
    try:
        return [int(level) for level in text.split(",") if level.strip()]
    except ValueError:
        raise ValueError(f"--levels: expected numbers from 0 to 3 with commas between them, not {text!r}") from None


def _sizes(text: str) -> dict[str, int] | None:
    """The axes of a mesh."""
    try:
        pairs = [_pair(part.strip(), "--mesh ", "SIZE") for part in text.split(",") if part.strip()]
        return {name: int(size) for name, size in pairs} or None
    except ValueError:
        raise ValueError(f"--mesh: expected AXIS=SIZE,..., such as data=8,model=8, not {text!r}") from None


def _function(what: str) -> Any:
    """The function that `module:function` or `file.py:function` names."""
    name, _, attribute = what.rpartition(":")
    if not name or not attribute:
        raise ValueError(f"{what!r}: expected MODULE:FUNCTION or FILE.py:FUNCTION")
    if name.endswith(".py"):
        path = Path(name)
        if not path.is_file():
            raise ValueError(f"no such file: {name} (looked in {Path.cwd()})")
        sys.path.insert(0, str(path.parent.resolve()))  # as Python does for a script
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[path.stem] = module
        ours, sys.argv = sys.argv, [name]  # the script may read its own
        try:
            spec.loader.exec_module(module)
        finally:
            sys.argv = ours
    else:
        sys.path.insert(0, str(Path.cwd()))
        try:
            module = importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{name}.".startswith(f"{error.name}."):
                raise  # something that it imports
            raise ValueError(f"no such module: {name} (looked in {Path.cwd()} and where Python does)") from None
    function = getattr(module, attribute, None)
    if not callable(function):
        raise ValueError(f"{name} has no function {attribute!r}")
    return function


def _arguments(options: list[str]) -> dict[str, Any]:
    return {name: _value(text) for name, text in (_pair(option) for option in options)}


def _pair(option: str, flag: str = "", value: str = "VALUE") -> tuple[str, str]:
    name, equals, text = option.partition("=")
    if not equals or not name.isidentifier():
        raise ValueError(f"{flag}{option!r}: expected NAME={value}")
    return name, text


def _value(text: str) -> Any:
    try:
        return ast.literal_eval({"true": "True", "false": "False", "none": "None"}.get(text, text))
    except (ValueError, SyntaxError):
        return text


def draw(plan: "Plan", path: Path) -> None:
    """The bytes on a device, by level and kind, and how many there are."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(2 + 1.6 * len(plan.levels), 5), layout="constrained")
    axes = figure.subplots()
    names = [one.name + "\n(this step)" * one.own for one in plan.levels]
    bottom = [0.0] * len(names)
    visible = max(one.peak for one in plan.levels) / 500
    for kind in dict.fromkeys(kind for one in plan.levels for kind, size in one.bytes.items() if size > visible):
        heights = [one.bytes.get(kind, 0) / 2**30 for one in plan.levels]
        axes.bar(names, heights, bottom=bottom, label=kind)
        bottom = [low + high for low, high in zip(bottom, heights, strict=True)]
    axes.margins(y=0.1)
    axes.axhline(plan.memory / 2**30, color="black", linestyle="--", label="memory that JAX takes")
    axes.set_ylabel("GiB on one device")
    axes.set_title(f"{plan.step} on {plan.topology}")
    axes.legend(fontsize="small")
    figure.savefig(path, dpi=150)
