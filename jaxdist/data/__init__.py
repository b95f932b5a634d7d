"""Sources of text and tokens for `jaxdist.loader`."""

from jaxdist.data.documents import Documents, text_files, tokenize
from jaxdist.data.packing import packed

__all__ = ["Documents", "packed", "text_files", "tokenize"]
