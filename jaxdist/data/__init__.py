"""Sources of text and tokens for `jaxdist.loader`, and the loader's helpers.

`__init__.pyi` lists the names. They are imported on first use, since tokenizing does not need JAX.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
