"""Sources of text and tokens for `jaxdist.loader`, and what it makes.

The names are listed in `__init__.pyi`, and imported when they are first asked for: to tokenize needs no JAX.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
