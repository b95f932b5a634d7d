"""`jaxdist export`: one checkpoint as one file that loads without jaxdist."""

from pathlib import Path
from typing import Annotated

import typer


def export(
    checkpoint: Annotated[Path, typer.Argument(help="A checkpoint like run/checkpoints/100, or a run's directory.")],
    out: Annotated[Path, typer.Argument(help="The file to write: .safetensors or .npz.")],
    only: Annotated[
        str,
        typer.Option(help="Export only the arrays below this name, such as `params`, and drop the name."),
    ] = "",
    rename: Annotated[
        list[str] | None,
        typer.Option(help=r"OLD=NEW: replace a regular expression in names, like 'blocks\.=layers.'. Repeatable."),
    ] = None,
) -> None:  # fmt: skip
    """Write the arrays of a checkpoint to one file, with names like params.layer.kernel."""
    # Import here, since `jaxdist run` does not need these.
    from jaxdist.checkpoint import read_all, write
    from jaxdist.errors import CheckpointError

    try:
        pairs = [text.rpartition("=") for text in rename or []]
        if bad := [new for old, _, new in pairs if not old]:
            raise ValueError(f"--rename {bad[0]!r}: expected OLD=NEW")
        checkpoint, leaves = read_all(checkpoint)
        if only:
            found = {name.removeprefix(f"{only}."): x for name, x in leaves.items() if name.startswith(f"{only}.")}
            if not found:
                tops = ", ".join(sorted({name.partition(".")[0] for name in leaves}))
                raise ValueError(f"--only: nothing below {only!r} in {checkpoint}; top level: {tops}")
            leaves = found
        count = write(out, leaves, {old: new for old, _, new in pairs})
    except (ValueError, OSError, ImportError, CheckpointError) as problem:
        raise typer.BadParameter(str(problem)) from None
    print(f"{out}: {count} arrays of {checkpoint}")
