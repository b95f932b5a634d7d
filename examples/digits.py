"""Handwritten digits as arrays: scikit-learn's 8x8 scans (embedded) or MNIST's IDX files.

Shape suffixes: N examples, B batch, H height, W width, C channels.
"""

import gzip
import importlib.util
import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

SIDE = 28  # what LeNet is given


@dataclass(frozen=True)
class Split:
    """Images in [0, 1], float32 (N, 28, 28, 1), and labels, int32 (N,), shared by `ranks`."""

    image_NxHxWxC: np.ndarray
    label_N: np.ndarray
    rank: int = 0
    ranks: int = 1

    def __len__(self) -> int:
        return len(self.label_N)

    def batches(self, size: int, *, seed: int | None = None) -> Iterator[dict[str, np.ndarray]]:
        """Yields this rank's equal share of each batch of `size` examples.

        With a `seed` the order is shuffled and an incomplete last batch is dropped (training).
        Without one the order is kept and the last batch padded: `real` says which examples count.
        """
        if size < self.ranks or size % self.ranks:
            better = max(self.ranks, size - size % self.ranks)
            raise SystemExit(f"--batch-size {size} can't be shared equally by {self.ranks} ranks; try {better}")
        count = len(self)
        if seed is None:
            order_N, stop = np.arange(count), count
        else:
            order_N, stop = np.random.default_rng(seed).permutation(count), count - size + 1
            if stop < 1:
                raise SystemExit(f"--batch-size {size} is more than the {count} examples there are")
        share = size // self.ranks
        for start in range(self.rank * share, self.rank * share + stop, size):
            position_B = np.arange(start, start + share)
            index_B = order_N[np.minimum(position_B, count - 1)]
            yield {
                "image": self.image_NxHxWxC[index_B],
                "label": self.label_N[index_B],
                "real": position_B < count,
            }


def arrays(data_dir: Path | None) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """The train and the test split, whole, for a loader."""
    train, test = ({"image": split.image_NxHxWxC, "label": split.label_N} for split in load(data_dir))
    return train, test


def load(data_dir: Path | None, rank: int = 0, ranks: int = 1) -> tuple[Split, Split]:
    """The train and the test split, of which `rank` takes its share of each batch."""
    if data_dir is None:
        parts = _load_scans()
    else:
        parts = [_load_idx(data_dir, "train"), _load_idx(data_dir, "t10k")]
    train, test = (Split(image, label, rank, ranks) for image, label in parts)
    return train, test


def _load_scans() -> list[tuple[np.ndarray, np.ndarray]]:
    found = importlib.util.find_spec("sklearn")
    if found is None or found.origin is None:
        raise SystemExit(
            "the embedded digits come with scikit-learn, which is not installed: "
            "pip install scikit-learn, or give MNIST's IDX files with --data-dir"
        )
    # As its load_digits does. But to import it takes longer than an epoch, on each rank.
    rows_Nx65 = np.loadtxt(Path(found.origin).parent / "datasets" / "data" / "digits.csv.gz", delimiter=",")
    pixel_Nx64, target_N = rows_Nx65[:, :-1], rows_Nx65[:, -1]
    # 8x8 with values 0..16: each pixel becomes 3x3, then a border of 2.
    image = np.kron(np.reshape(pixel_Nx64, (-1, 8, 8)) / 16.0, np.ones((1, 3, 3)))
    image = np.pad(image, ((0, 0), (2, 2), (2, 2)))[..., None].astype(np.float32)
    label = np.asarray(target_N, np.int32)
    # The same split always: a fifth is for the test, drawn by a seed of its own.
    order = np.random.default_rng(0).permutation(len(label))
    test, train = np.split(order, [len(order) // 5])
    return [(image[train], label[train]), (image[test], label[test])]


def _load_idx(data_dir: Path, part: str) -> tuple[np.ndarray, np.ndarray]:
    image = _read_idx(_find(data_dir, f"{part}-images", "idx3-ubyte"))
    label = _read_idx(_find(data_dir, f"{part}-labels", "idx1-ubyte"))
    if image.shape[1:] != (SIDE, SIDE) or label.shape != image.shape[:1]:
        raise SystemExit(
            f"{data_dir}: the {part} files hold images {image.shape} and labels {label.shape}; "
            f"expected (N, {SIDE}, {SIDE}) and (N,)"
        )
    return image[..., None].astype(np.float32) / 255.0, label.astype(np.int32)


def _find(data_dir: Path, stem: str, kind: str) -> Path:
    names = [f"{stem}{dot}{kind}{gz}" for dot in "-." for gz in ("", ".gz")]
    for name in names:
        if (data_dir / name).is_file():
            return data_dir / name
    raise SystemExit(f"--data-dir {data_dir} has none of: {', '.join(names)}")


def _read_idx(path: Path) -> np.ndarray:
    """IDX: two zero bytes, the type (8 = unsigned byte), the rank, big-endian sizes, the data."""
    content = path.read_bytes()
    if path.suffix == ".gz":
        content = gzip.decompress(content)
    if len(content) < 4 or content[:3] != b"\x00\x00\x08":
        raise SystemExit(f"{path} is not an IDX file of unsigned bytes: starts {content[:4]!r}")
    rank = content[3]
    shape = struct.unpack_from(f">{rank}I", content, 4)
    data = np.frombuffer(content, np.uint8, offset=4 + 4 * rank)
    if data.size != math.prod(shape):
        raise SystemExit(f"{path} says {shape} but holds {data.size} bytes: was it cut short?")
    return data.reshape(shape)
