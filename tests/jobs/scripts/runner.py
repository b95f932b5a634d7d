"""Cases in one job: `python runner.py COMMUNICATOR FOLDER 'MODULE:FUNCTION["ARGUMENT", …]' …`.

Every rank calls these functions of modules of tests/, one after the other. What they return goes into a file of the
rank in the folder, as a line of JSON each.
"""

import importlib
import json
import sys
from pathlib import Path

import jax

import jaxdist

TESTS = Path(__file__).parents[2]
sys.path[1:1] = [str(TESTS), str(TESTS / "io" / "scripts")]


def main(communicator: str, folder: Path, words: list[str]) -> None:
    jax.config.update("jax_enable_x64", True)
    ctx = jaxdist.init(communicator=communicator)
    assert communicator in ("auto", ctx.communicator)
    with (folder / f"rank{ctx.rank}.json").open("w") as file:
        for word in words:
            name, _, arguments = word.partition("[")
            module, _, function = name.partition(":")
            call = getattr(importlib.import_module(module), function)
            found = call(*json.loads(f"[{arguments}" if arguments else "[]"))
            file.write(json.dumps([word, found]) + "\n")
            file.flush()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3:])
