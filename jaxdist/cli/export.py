"""`jaxdist export`: one checkpoint as one file that loads without jaxdist."""

from pathlib import Path
from typing import Annotated

import typer


def export(
    checkpoint: Annotated[Path, typer.Argument(help="Of one step, such as run/checkpoints/100; or all of a run's.")],
    out: Annotated[Path, typer.Argument(help="The file: .safetensors or .npz.")],
    only: Annotated[str, typer.Option(help="What is below this name, such as `params`; the name is left off.")] = "",
) -> None:
    """Writes the arrays of a checkpoint into one file, by their names: params.layer.kernel."""
    # Here, not above: `jaxdist run` needs none of it.
    from jaxdist.checkpoint import read_all
    from jaxdist.errors import CheckpointError

    try:
        if out.suffix not in (".safetensors", ".npz"):
            raise ValueError(f"{out}: the file's name has to end in .safetensors or .npz")
        checkpoint, leaves = read_all(checkpoint)
        if only:
            found = {name.removeprefix(f"{only}."): x for name, x in leaves.items() if name.startswith(f"{only}.")}
            if not found:
                tops = ", ".join(sorted({name.partition(".")[0] for name in leaves}))
                raise ValueError(f"--only: nothing below {only!r} in {checkpoint}; there are: {tops}")
            leaves = found
        texts = {name: str(x) for name, x in leaves.items() if isinstance(x, str)}
        arrays = {name: x for name, x in leaves.items() if not isinstance(x, str)}
        if out.suffix == ".npz":
            import numpy as np

            with out.open("wb") as file:
                np.savez(file, allow_pickle=False, **arrays, **{name: np.array(x) for name, x in texts.items()})
        else:
            try:
                from safetensors.numpy import save_file
            except ImportError:
                raise ValueError("safetensors is not installed: pip install 'jaxdist[safetensors]'") from None
            save_file(arrays, out, metadata=texts)
    except (ValueError, OSError, CheckpointError) as problem:
        raise typer.BadParameter(str(problem)) from None
    print(f"{out}: {len(arrays)} arrays of {checkpoint}")
