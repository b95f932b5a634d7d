"""The `jaxdist` command: one module per subcommand."""

import typer

from jaxdist.cli.export import export
from jaxdist.cli.info import info
from jaxdist.cli.plan import plan
from jaxdist.cli.plot import plot
from jaxdist.cli.run import run
from jaxdist.cli.selftest import self_test

__all__ = ["app"]

app = typer.Typer(
    help="Launch and inspect data-parallel JAX programs.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,  # "[rank]" is literal text
    pretty_exceptions_show_locals=False,
)


app.command(context_settings={"allow_interspersed_args": False})(run)
app.command()(info)
app.command("test")(self_test)
app.command()(export)
app.command()(plot)
app.command()(plan)
