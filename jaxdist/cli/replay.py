"""`jaxdist replay`: some steps again from a checkpoint, on one process, for the hash of what they return."""

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from jaxdist.launch.program import program_command


def replay(
    checkpoint: Annotated[Path, typer.Argument(help="Of one step, such as run/checkpoints/100.")],
    script: Annotated[list[str], typer.Argument(metavar="SCRIPT [ARGS]...", help="As it was run.", show_default=False)],
    step: Annotated[int, typer.Option(min=0, help="The step whose hash to print, as the script's log counts.")],
    lanes: Annotated[int, typer.Option(min=1, envvar="JAXDIST_LANES", help="Of the job that logged.")],
) -> None:
    """Runs SCRIPT on one process from a checkpoint to a step, prints the hash of the state after it, and ends.

    Options come first. The script restores CHECKPOINT whatever it asks for, saves nothing, and gives its state to the
    log of `jaxdist.run_log`. Compare the hash with the one that the run has logged (hash_every=): another one is of a
    host that computes something else, or of a state that was changed.
    """
    from jaxdist.checkpoint.replay import VARIABLE, variable

    try:
        command = program_command(script)
        own = {VARIABLE: variable(checkpoint, step), "JAXDIST_LANES": str(lanes), "JAXDIST_CONNECTOR": "local"}
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    sys.stdout.flush()
    os.execve(command[0], command, {**os.environ, **own})
