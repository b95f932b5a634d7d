"""What is done to the folder of a checkpoint, and what the error about it names."""

import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from harness.states import data_file, flip

Damage = Callable[[Path], Any]


def record(step: Path) -> Path:
    """The file with the digests."""
    return step / "manifest.json"


def _as_pipe(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


def _swapped(step: Path) -> None:
    other = record(step.parent / "10")
    shutil.copy(other, record(step))


def _of_another_step(step: Path) -> None:
    shutil.rmtree(step / "default")
    shutil.copytree(step.parent / "10" / "default", step / "default")


def _renamed(step: Path) -> None:
    shutil.rmtree(step)
    (step.parent / "10").rename(step)


DAMAGES: dict[str, tuple[Damage, tuple[str, ...]]] = {
    "a bit of an array": (lambda d: flip(data_file(d)), ("leaf model.w",)),
    "a file cut short": (lambda d: data_file(d).write_bytes(data_file(d).read_bytes()[:999]), ("leaf model.",)),
    "a file of zeros": (lambda d: data_file(d).write_bytes(bytes(data_file(d).stat().st_size)), ("leaf model.",)),
    "a file gone": (lambda d: data_file(d).unlink(), ("leaf model.",)),
    "all files gone": (lambda d: shutil.rmtree(d / "default"), ("leaf model.",)),
    "an empty database": (lambda d: (d / "default" / "manifest.ocdbt").write_bytes(b""), ("leaf model.",)),
    "no manifest": (lambda d: record(d).unlink(), ("manifest.json",)),
    **{f"a manifest that is {text[:3]}": (lambda d, text=text: record(d).write_text(text), ("manifest.json",))
       for text in ("", "{", "[]", "3", "null", "[" * 10_000, "{}", '{"digest": "", "content": 3}')},
    "a bit of the manifest": (lambda d: flip(record(d)), ("manifest.json",)),
    "a pipe for a manifest": (lambda d: _as_pipe(record(d)), ("manifest.json",)),
    "the manifest of another": (_swapped, ("20", "10")),
    "the arrays of another": (_of_another_step, ("leaf model.",)),
    "another, renamed": (_renamed, ("20", "10")),
}  # fmt: skip
"""Of the step 20, beside a step 10."""


def at_random(run: Path, step: str, others: list[str], rng: random.Random) -> str:
    """Do something to one step of several; what it was."""
    last, other = run / step, run / rng.choice(others)
    mine = sorted(p for p in last.rglob("*") if p.is_file())
    file, content = (one := rng.choice(mine)), bytearray(one.read_bytes())
    at = rng.randrange(len(content))
    what = rng.choice(["bit"] * 3 + ["bits", "zeros", "cut", "delete", "swap", "swap", "within", "folders", "folder"])
    match what:
        case "bit":
            content[at] ^= 1 << rng.randrange(8)
        case "bits":
            for _ in range(9):
                content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
        case "zeros":
            content[at : at + 64] = bytes(len(content[at : at + 64]))
        case "cut":
            del content[at : at + rng.choice((8, len(content)))]
        case "delete":
            file.unlink()
        case "swap":  # data have random names: with one of the same folder
            _swap(file, rng.choice(sorted(p for p in (other / file.parent.relative_to(last)).iterdir() if p.is_file())))
        case "within":
            _swap(file, rng.choice([f for f in mine if f != file]))
        case "folders":
            name = rng.choice(("default", ""))
            _swap(last / name, other / name)
        case "folder":
            shutil.rmtree(rng.choice([p for p in last.rglob("*") if p.is_dir()]))
    if what in ("bit", "bits", "zeros", "cut"):
        file.write_bytes(content)
    return what


def _swap(a: Path, b: Path) -> None:
    aside = a.with_name("aside")
    a.rename(aside)
    b.rename(a)
    aside.rename(b)


def _zeros(folder: Path) -> None:
    content = (folder / "tokens.npy").read_bytes()
    (folder / "tokens.npy").write_bytes(content[:4000] + bytes(400) + content[4400:])


def _moved_end(folder: Path) -> None:
    ends = np.load(folder / "ends.npy")
    ends[77] += 1
    np.save(folder / "ends.npy", ends)


def _signed(folder: Path) -> None:
    np.save(folder / "tokens.npy", np.load(folder / "tokens.npy").view("int16"))


OF_TOKENS: dict[str, tuple[Damage, str]] = {
    "a bit of the tokens": (lambda d: flip(d / "tokens.npy"), "tokens.npy"),
    "zeros among the tokens": (_zeros, "tokens.npy"),
    "tokens cut short": (lambda d: (d / "tokens.npy").write_bytes(b"\x93NUMPY"), ""),
    "a bit of the ends": (lambda d: flip(d / "ends.npy"), ""),
    "an end moved": (_moved_end, ""),
    "tokens of another type": (_signed, ""),
    "another list": (lambda d: (d / "about.json").write_text("[]"), ""),
    "deeply nested": (lambda d: (d / "about.json").write_text("[" * 100_000), ""),
    "no digests": (lambda d: (d / "about.json").write_text(json.dumps({"dtype": "uint16"})), ""),
    "nothing about it": (lambda d: (d / "about.json").unlink(), ""),
}
"""Of a folder that `jaxdist.data.tokenize` has written, and the file that the error names."""
