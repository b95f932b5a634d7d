"""Sources of text and tokens for `jaxdist.loader`, and the loader's helpers."""

from .documents import Documents, text_files, tokenize
from .evaluate import gather_for_metrics
from .loader import Loader
from .packing import packed

__all__ = ["Documents", "Loader", "gather_for_metrics", "packed", "text_files", "tokenize"]
