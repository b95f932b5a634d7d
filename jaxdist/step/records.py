"""The facts about a call that ranks compare: all that decides its program, and the checksums of its leaves."""

import hashlib
from collections.abc import Sequence

import jax
import numpy as np

from jaxdist.agreement.ledger import Entry
from jaxdist.compilation.calling import Settings
from jaxdist.compilation.program import Program
from jaxdist.compilation.signature import Leaf, Signature
from jaxdist.ir.fingerprint import checksum, on_host, type_text
from jaxdist.placements.model.layouts import Padded, physical
from jaxdist.runtime.compiler import settings as settings_of_jax
from jaxdist.step import batch
from jaxdist.step.leaves import spans
from jaxdist.step.placer import ELSEWHERE, CurrentLayout, Placer

Entries = list[tuple[str, str]]  # names and values, for messages


def entries_of(
    signature: Signature,
    data: Sequence[Leaf],
    layouts: Sequence[CurrentLayout],
    settings: Settings,
    looked_for: tuple[bool, bool] | None,
    placer: Placer,
) -> Entries:
    """Return the properties of a call with these leaves, kept so, that must be the same on all ranks."""
    entries = [*settings.entries(), *((f"constant {name}", value) for name, value in signature.constants)]
    entries += [(f"setting {name}", value) for name, value in settings_of_jax().items()]
    entries.append(("setting for NaN and infinity", str(looked_for)))
    for name, is_batch, x, layout in zip(signature.names, signature.is_batch, data, layouts, strict=True):
        if is_batch:
            entries.append((f"leaf {name}", f"{_type_of(x, placer.logical_batch(x).shape)} (batch)"))
        else:
            entries.append((f"leaf {name}", f"{_type_of(x, np.shape(x))} (state{_where(layout)})"))
    return entries


def ledger_entry(
    step: str, signature: Signature, data: Sequence[Leaf], entries: Entries, program: Program, placer: Placer
) -> Entry:
    """Return the ledger's entry for a call with these leaves, whose `entries` must be the same on all ranks."""
    compared = step, entries, program.traced.digest
    digest = hashlib.blake2b(repr(compared).encode(), digest_size=16).digest()
    logical = placer.logical_batch
    shown = [f"{signature.names[i]} {_type_of(data[i], logical(data[i]).shape)}" for i in signature.batch[:4]]
    text = f"step {step!r}" + (f" with a batch of {', '.join(shown)}" if shown else "")
    if signature.constants:  # the difference must show here
        values = ", ".join(f"{name}={value}" for name, value in signature.constants)
        short = hashlib.sha256(values.encode()).hexdigest()[:8]
        text += f" and {values}" if len(values) < 200 else f" and constants (digest {short})"
    return Entry(digest, text)


def _where(layout: CurrentLayout) -> str:
    """The place of a leaf of the state, in words."""
    if layout is ELSEWHERE:
        return ""
    if layout is None:
        return ", on the mesh"
    return f", in shards along axis {layout.dims}" + (" in the host's memory" if layout.host else "")


def _type_of(x: Leaf, shape: tuple[int, ...]) -> str:
    if not hasattr(x, "dtype"):
        return type_text(type(x).__name__, shape)
    # With jax_enable_x64 on one rank alone, NumPy's float64 differs between ranks.
    return type_text(jax.dtypes.canonicalize_dtype(x.dtype, allow_extended_dtype=True), shape)


def checksum_of(x: Leaf, placer: Placer, local: bool, copies: bool) -> int | None:
    """Return the checksum of a leaf, or None if it is in parts on several processes; 0 if it is not compared.

    `local`: whether leaves that only this process has are compared. `copies`: whether state that each has is.
    """
    if type(x) is not Padded and not spans(x):
        return checksum(on_host(x.array if type(x) is batch.Part else x)) if local else 0
    if placer.layout(x) is not None:
        return None
    if not copies:
        return 0
    of_devices = {checksum(on_host(shard.data)) for shard in physical(x).addressable_shards}
    # Copies that differ on this process's own devices are like no other process's.
    return of_devices.pop() if len(of_devices) == 1 else hash(frozenset(of_devices))
