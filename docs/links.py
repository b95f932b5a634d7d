"""For mkdocs: links out of docs/ work in a checkout; on the site they lead to the repository."""

from __future__ import annotations

import re
from typing import Any


def on_page_markdown(markdown: str, *, config: Any, **_: Any) -> str:
    """Called for every page: `](../examples/gpt.py)` becomes an address."""
    return re.sub(r"\]\(\.\./", f"]({config.repo_url}/blob/main/", markdown)
