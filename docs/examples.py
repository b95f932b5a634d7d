"""For mkdocstrings: our docstrings say "Example:", griffe knows the section as "Examples:"."""

from __future__ import annotations

import re
from typing import Any

import griffe


class Examples(griffe.Extension):
    """Renames the section, so that `>>>` is code and not a quotation."""

    def on_object(self, *, obj: Any, **kwargs: Any) -> None:
        """Called for everything that griffe finds."""
        if obj.docstring:
            obj.docstring.value = re.sub(r"(?m)^(\s*)Example:$", r"\1Examples:", obj.docstring.value)
