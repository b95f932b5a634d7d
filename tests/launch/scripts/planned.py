"""Steps for `jaxdist plan`, of a script that reads its own arguments."""

import argparse

import jax
import jax.numpy as jnp

import jaxdist


@jaxdist.data_parallel
def step(w, x):
    return w - jax.grad(lambda w: jnp.mean(x @ w))(w)


@jaxdist.data_parallel
def multiplies(w, x):
    jnp.ones(3) @ jnp.ones(4)
    return w


def types(width):
    return jax.ShapeDtypeStruct((width,), jnp.float32), jax.ShapeDtypeStruct((8, width), jnp.float32)


def make(width=4, name="w"):
    return step, *types(width)


def nothing(width=4):
    return step


def makes_no_number(width=4):
    int("four")


def multiplies_within(width=4):
    return multiplies, *types(width)


argparse.ArgumentParser().parse_args()
