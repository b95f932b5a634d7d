"""Objects as bytes, arrays by the memory of the host."""

import io
import pickle
import types
from collections.abc import Callable
from typing import Any, ClassVar

import cloudpickle
import jax
import numpy as np

from jaxdist.errors import in_words

_reduce_code: Any = cloudpickle.Pickler.dispatch_table[types.CodeType]


def _code(code: types.CodeType) -> Any:
    """Keep the name of the code's file, by which a traceback shows the line: cloudpickle omits it from 3.1.3 on."""
    make, args = _reduce_code(code)
    return make, tuple(code.co_filename if x == "<dynamic-code>" else x for x in args)


class Pickler(cloudpickle.Pickler):
    """Functions and classes of `__main__` by value, as cloudpickle has it; arrays through the host."""

    dispatch_table: ClassVar[Any] = {**cloudpickle.Pickler.dispatch_table, types.CodeType: _code}

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, jax.Array):
            return _array(obj, to_device)
        if isinstance(obj, (jax.custom_jvp, jax.custom_vjp)):  # their parts are in their attributes alone
            return object.__new__, (type(obj),), obj.__dict__
        return super().reducer_override(obj)


class ResultPickler(Pickler):
    """Arrays become NumPy's where they arrive."""

    def reducer_override(self, obj: Any) -> Any:
        return _array(obj, np.asarray) if isinstance(obj, jax.Array) else super().reducer_override(obj)


class _ByName(pickle.Pickler):
    """Functions and classes by their names, which are the same on ranks that run the same script."""

    def reducer_override(self, obj: Any) -> Any:
        return _array(obj, to_device) if isinstance(obj, jax.Array) else NotImplemented


def pack(obj: Any) -> tuple[bytes | memoryview, str]:
    """An object as bytes, and why it can't be sent: "" if it can."""
    problem = ""
    for pickler in (_ByName, Pickler):  # the second: a TrainState that holds closures
        out = io.BytesIO()
        try:
            pickler(out, protocol=5).dump((obj, ""))
            return out.getbuffer(), ""
        except Exception as error:
            problem = f"the object that the root broadcasts can't be pickled ({in_words(error)})"
    return pickle.dumps((None, problem)), problem  # the others wait for something


def _array(array: jax.Array, rebuild: Callable[[np.ndarray], Any]) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """An array as its host's memory."""
    if jax.numpy.issubdtype(array.dtype, jax.dtypes.prng_key):
        return _key, (str(jax.random.key_impl(array)), _host(jax.random.key_data(array)))
    return rebuild, (_host(array),)


def _host(array: jax.Array) -> np.ndarray:
    if array.is_fully_addressable:
        return np.asarray(array)
    if array.is_fully_replicated:
        return np.asarray(array.addressable_data(0))
    raise ValueError(
        f"an array of shape {array.shape} is spread over several processes: gather it first (jaxdist.unshard)"
    )


def to_device(host: np.ndarray) -> jax.Array:
    """A host's array on the default device, of the same dtype."""
    array = jax.device_put(host)
    if array.dtype != host.dtype:
        raise ValueError(
            f"a {host.dtype} array was sent to a process that can't hold it (got "
            f"{array.dtype}): set jax_enable_x64 the same way on every rank"
        )
    return array


def _key(impl: str, data: np.ndarray) -> jax.Array:
    return jax.random.wrap_key_data(jax.device_put(data), impl=impl)
