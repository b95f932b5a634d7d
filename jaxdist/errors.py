"""Exceptions of jaxdist's own, and any exception in words."""

from collections.abc import Callable, Iterator

_LONGEST = 10_000  # characters of an exception's message that go to other ranks


class JaxdistError(Exception):
    """The base class of this library's errors. Each is also a subclass of the built-in that a caller would expect.

    Example:
      >>> import jaxdist
      >>> jaxdist.CheckpointError.__mro__[1:3]
      (<class 'jaxdist.JaxdistError'>, <class 'RuntimeError'>)
    """


class StepError(JaxdistError, TypeError):
    """A step cannot run on several devices.

    Example:
      >>> import jax, jax.numpy as jnp, jaxdist
      >>> step = jaxdist.data_parallel(lambda w, batch: w + jax.lax.ppermute(batch.mean(0), "data", [(0, 1)]))
      >>> step(jnp.zeros(3), jnp.ones((8, 3)))
      Traceback (most recent call last):
        ...
      jaxdist.StepError: ppermute at ... names the permutation ((0, 1),), but inside a step the axis has ...
    """


class CheckpointError(JaxdistError, RuntimeError):
    """A checkpoint could not be written or read.

    Example:
      >>> import jax.numpy as jnp, jaxdist, tempfile
      >>> path = tempfile.mkdtemp()
      >>> _ = jaxdist.save(path, {"w": jnp.zeros(3)}, step=1)
      >>> jaxdist.restore(path, {"w": jnp.zeros(4)})
      Traceback (most recent call last):
        ...
      jaxdist.CheckpointError: ...
    """


class DataError(JaxdistError, ValueError):
    """Data on disk is damaged, or a stream does not continue from a loader's state.

    Example:
      >>> import tempfile
      >>> from jaxdist.data import Documents
      >>> Documents.open(tempfile.mkdtemp())
      Traceback (most recent call last):
        ...
      jaxdist.DataError: .../about.json is missing or damaged: ...
    """


class SyncError(JaxdistError, RuntimeError):
    """State differs between ranks or devices. Raised by `jaxdist.check_sync` and ``check_every``."""


class ControlError(JaxdistError, RuntimeError):
    """Ranks make different calls, or a rank is missing or has left."""


class DonatedError(JaxdistError, RuntimeError):
    """An argument's memory was taken by an earlier call that donates it."""


for _kind in (JaxdistError, StepError, CheckpointError, DataError, SyncError, ControlError):
    _kind.__module__ = "jaxdist"  # where users find them: tracebacks name it so


def message_of(error: object, words: Callable[[object], str] = str) -> str:
    """Return the message of an exception, even if its class can't say it; only the start of a very long one."""
    try:
        text = words(error)
    except Exception:  # Python's own tracebacks do the same
        text = "<exception str() failed>"
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}… ({len(text):,} characters)"


def in_words(error: BaseException) -> str:
    """Return the type and the message of an exception; of a group, of the first that it holds, too."""
    text = ": ".join(filter(None, (type(error).__name__, message_of(error))))
    first = next(leaves(error))
    return text if first is error else f"{text}; the first is {in_words(first)}"


def leaves(error: BaseException) -> Iterator[BaseException]:
    """Yield the exceptions of a group and of groups in it; for any other exception, itself."""
    if isinstance(error, BaseExceptionGroup):
        for one in error.exceptions:
            yield from leaves(one)
    else:
        yield error
