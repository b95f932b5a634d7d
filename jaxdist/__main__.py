"""The `jaxdist` command, also as `python -m jaxdist`."""

import os
import signal
from types import FrameType


def main() -> None:
    """Run the command; Ctrl-C before it has begun is one line, since imports may take a second."""
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end)
    from jaxdist.cli import app

    app(prog_name="jaxdist", obj=lambda: signal.signal(signal.SIGINT, before))


def _end(number: int, frame: FrameType | None) -> None:
    del number, frame
    os.write(2, b"jaxdist: interrupted\n")
    os._exit(130)


if __name__ == "__main__":
    main()
