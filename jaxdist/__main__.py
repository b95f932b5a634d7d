"""The `jaxdist` command, also as `python -m jaxdist`."""


def main() -> None:
    """Run the command."""
    from jaxdist.cli import app

    app(prog_name="jaxdist")


if __name__ == "__main__":
    main()
