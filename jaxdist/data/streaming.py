"""`stream`: an iterable as a grain ``IterDataset``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from jaxdist.data.batches import check_iterable
from jaxdist.extras import need

if TYPE_CHECKING:
    from grain import IterDataset


def stream(source: Iterable[Any], epoch: int = 0) -> IterDataset:
    """An iterable as a grain ``IterDataset``, to filter, mix, shuffle or pack it with grain's transformations.

    Args:
      source: gives a new iterator each time that it is asked for one: a Hugging Face ``IterableDataset``, a WebDataset,
        a class of your own with ``__iter__``. A run that resumes reads again what was read, and leaves it out; to start
        where it stood, be a ``grain.IterDataset``, whose ``get_state`` and ``set_state`` are used.
      epoch: given to its ``set_epoch``, if it has one.

    Returns:
      Its examples, in its order.

    Raises:
      TypeError: it is no iterable, or can be read only once, as a generator.
      ImportError: grain is not installed.

    Example:
      >>> import jaxdist
      >>> even = jaxdist.stream(range(6)).filter(lambda x: x % 2 == 0)
      >>> [batch.tolist() for batch in jaxdist.loader(even, 3, shuffle=False)]
      [[0, 2, 4]]
    """
    need("grain", "jaxdist.stream")
    check_iterable(source)
    from jaxdist.data.streamed import Iterated  # with grain, which is slow to import

    return Iterated(source, epoch)


__all__ = ["stream"]
