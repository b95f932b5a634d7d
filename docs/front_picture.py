"""Draws docs/img/front.svg, the picture of the front page: `python docs/front_picture.py` (needs matplotlib)."""

from __future__ import annotations

import itertools
from pathlib import Path

import matplotlib as mpl
import matplotlib.pyplot as plt
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Rectangle

INK, SOFT = "#010203", "#7d8590"  # INK becomes the page's: dark on light, light on dark
COLOURS = ["#4c6ef5", "#12b886", "#f59f00", "#e64980"]
THEMES = "<style>svg{color:#1f2328}@media(prefers-color-scheme:dark){svg{color:#e6edf3}}</style>"


def box(x: float, y: float, width: float, height: float, text: str) -> None:
    """A device, around (x, y)."""
    plt.gca().add_patch(
        FancyBboxPatch(
            (x - width / 2, y - height / 2), width, height, boxstyle="round,pad=0,rounding_size=0.12",
            facecolor="none", edgecolor=INK, linewidth=1.3,
        )
    )  # fmt: skip
    plt.text(x, y, text, ha="center", va="center", color=INK, fontsize=11.5, family="monospace")


def arrow(start: tuple[float, float], end: tuple[float, float], style: str = "-|>", color: str = INK) -> None:
    """From one point to another."""
    plt.gca().add_patch(
        FancyArrowPatch(
            start, end, arrowstyle=style, color=color, linewidth=1.3, mutation_scale=11, shrinkA=0, shrinkB=0
        )
    )


def draw() -> None:
    """Left one device, right four, the change of the code between them."""
    rows = [2.55, 1.85, 1.15, 0.45]
    # The batch, and one device that takes it.
    for colour, y in zip(COLOURS, [2.1, 1.7, 1.3, 0.9], strict=True):
        plt.gca().add_patch(Rectangle((0.05, y - 0.2), 0.42, 0.4, color=colour, linewidth=0))
    plt.text(0.26, 0.52, "batch", ha="center", va="center", color=SOFT, fontsize=11)
    arrow((0.55, 1.5), (0.88, 1.5))
    box(1.62, 1.5, 1.4, 0.62, "train_step")
    arrow((1.62, 1.13), (1.62, 0.6))
    plt.text(1.62, 0.38, "loss 0.0627", ha="center", va="center", color=INK, fontsize=12.5, weight="bold")
    # What changes.
    plt.text(2.72, 1.92, "- @jax.jit", color="#e03131", fontsize=11, family="monospace", va="center")
    plt.text(2.72, 1.62, "+ @jaxdist\n   .data_parallel", color="#2f9e44", fontsize=11, family="monospace", va="top")
    arrow((2.75, 0.75), (4.15, 0.75))
    # Its parts, each on a device of its own, and the sums between them.
    for colour, y in zip(COLOURS, rows, strict=True):
        plt.gca().add_patch(Rectangle((4.55, y - 0.2), 0.42, 0.4, color=colour, linewidth=0))
        arrow((5.04, y), (5.3, y))
        box(6.05, y, 1.4, 0.46, "train_step")
    for above, below in itertools.pairwise(rows):
        arrow((6.05, above - 0.25), (6.05, below + 0.25), "<|-|>", SOFT)
        plt.text(6.2, (above + below) / 2, "sums", ha="left", va="center", color=SOFT, fontsize=9.5)
    arrow((6.85, 1.5), (7.2, 1.5))
    plt.text(7.27, 1.5, "loss\n0.0627", ha="left", va="center", color=INK, fontsize=12.5, weight="bold")
    for x, text in ((1.15, "One device"), (5.95, "Many devices")):
        plt.text(x, 3.18, text, ha="center", va="center", color=INK, fontsize=14)


def main() -> None:
    """Writes the file."""
    mpl.rcParams |= {"svg.fonttype": "path", "svg.hashsalt": "jaxdist"}
    plt.figure(figsize=(8.1, 3.5))
    plt.axes((0, 0, 1, 1))
    plt.axis((0, 8.1, 0, 3.5))
    plt.axis("off")
    draw()
    path = Path(__file__).parent / "img" / "front.svg"
    plt.savefig(path, transparent=True, metadata={"Date": None})
    text = path.read_text().replace(INK, "currentColor")
    start = text.index("<defs>")
    path.write_text("\n".join(line.rstrip() for line in (text[:start] + THEMES + text[start:]).splitlines()) + "\n")


if __name__ == "__main__":
    main()
