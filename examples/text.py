"""Text as arrays of bytes: files, or the sources of Python's standard library, which every machine has."""

import sysconfig
from pathlib import Path

import numpy as np


def read_text(files: list[Path]) -> tuple[np.ndarray, np.ndarray]:
    """Bytes to train on and bytes held out: every 20th file, or the last 20th of the only one."""
    texts = [np.frombuffer(file.read_bytes(), np.uint8) for file in files]
    if len(texts) < 20:
        whole = np.concatenate(texts)
        return whole[: len(whole) * 19 // 20], whole[len(whole) * 19 // 20 :]
    return np.concatenate([t for i, t in enumerate(texts) if i % 20]), np.concatenate(texts[::20])


def standard_library() -> list[Path]:
    """Python's sources, with the documentation that is in them."""
    root = Path(sysconfig.get_path("stdlib"))
    return sorted(f for f in root.rglob("*.py") if not {"site-packages", "test", "tests"} & set(f.parts))


def windows(text: np.ndarray, context: int) -> np.ndarray:
    """A view of the text as windows of `context` bytes and the one that follows."""
    if len(text) <= context:
        raise SystemExit(f"{len(text)} bytes of text are too few for a window of {context} and the byte after it")
    return np.lib.stride_tricks.sliding_window_view(text, context + 1)[::context]
