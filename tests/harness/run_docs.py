"""Run the Python code of the documentation: ``python run_docs.py PAGE.md ...``, which writes into this folder.

A block that imports jaxdist is a program. All other blocks of a page are pieces of one program, which begins with
``docs_setup.py``. A block whose first line is ``# not run: REASON`` is left out.
"""

import os
import re
import runpy
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FENCE = re.compile(r"^( *)```(\w*)[^\n]*\n(.*?)^\1```", re.MULTILINE | re.DOTALL)
NOT_RUN = re.compile(r"# not run: \S")


def blocks(text: str) -> Iterator[tuple[int, str]]:
    """The line where it begins, from 1, and the code of each block of Python in a page that is run."""
    for found in FENCE.finditer(text):
        code = textwrap.dedent(found[3])
        if found[2] == "python" and not NOT_RUN.match(code):
            yield text[: found.start()].count("\n") + 2, code


def run(page: Path) -> None:
    """All blocks of a page."""
    pieces: dict[str, Any] | None = None
    for line, text in blocks(page.read_text()):
        program = re.search(r"^(import .*\bjaxdist|from jaxdist)", text, re.MULTILINE) is not None
        if not program and pieces is None:
            pieces = runpy.run_path(str(Path(__file__).with_name("docs_setup.py"))) | {"__name__": "__main__"}
        # The lines of a traceback are the page's. `__main__`: `jaxdist.spawn` sends what is defined there by value.
        code = compile("\n" * (line - 1) + text, str(page), "exec")
        exec(code, {"__name__": "__main__"} if program else pieces)


if __name__ == "__main__":
    pages = [Path(name).resolve() for name in sys.argv[1:]]
    for page in pages:
        Path(page.stem).mkdir(exist_ok=True)  # one for all ranks, if there are several
        os.chdir(page.stem)
        run(page)
        os.chdir("..")
        print("RAN", page.name, flush=True)
