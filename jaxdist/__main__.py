"""Makes `python -m jaxdist` the same as the `jaxdist` command."""

from jaxdist.cli import app

if __name__ == "__main__":
    app(prog_name="jaxdist")
