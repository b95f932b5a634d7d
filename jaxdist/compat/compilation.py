"""The compiler."""

import functools
import re
from collections.abc import Collection, Iterator
from typing import Any

import jax


def say_on_host(lowered: Any, arguments: Collection[int], kind: str) -> None:
    """Let a lowered program say that some of its arguments are in the host's memory, for devices that are not here."""
    # Such devices have no list of memories, so a `NamedSharding` over them drops its memory kind, and JAX leaves the
    # arguments unmarked. (Results are marked.)
    from jax._src.lib.mlir import ir  # pyright: ignore[reportPrivateImportUsage]

    module = lowered.compiler_ir()
    main = next(op for op in module.body.operations if str(op.attributes["sym_name"]) == '"main"')
    used = sorted(lowered._lowering.compile_args["kept_var_idx"])  # JAX drops the others
    first = len(main.arg_attrs) - len(used)  # before them: constants
    with module.context:
        every = []
        for i, old in enumerate(main.arg_attrs):
            away = i >= first and used[i - first] in arguments
            said = {attribute.name: attribute.attr for attribute in old}
            every.append(ir.DictAttr.get({**said, "mhlo.memory_kind": ir.StringAttr.get(kind if away else "device")}))
        main.arg_attrs = ir.ArrayAttr.get(every)


PIPELINED_ALL_REDUCE: tuple[str, Any] = (
    ("xla_gpu_pipeline_all_reduce", "COLLECTIVE_PIPELINING_MODE_ON")
    if jax.__version_info__ >= (0, 11)
    else ("xla_gpu_enable_pipelined_all_reduce", True)
)
"""The compiler's option for all-reduces beside the next turn of a loop; one that a version lacks is an error."""


def programs() -> Iterator[tuple[str, str]]:
    """The name and the text of each program that this process has compiled, the newest last."""
    for executable in reversed(jax.local_devices()[0].client.live_executables()):
        yield from ((module.name, module.to_string()) for module in executable.hlo_modules())


@functools.lru_cache(maxsize=1024)
def listed_groups(text: str) -> str:
    """The groups of devices of a collective as lists, ``{{0,1},{2,3}}``, however XLA has written them."""
    # From jax 0.12 on they may be axes of a mesh. XLA's fingerprint printer writes lists in every version, and XLA's
    # parser reads both forms; neither is public.
    from jaxlib import _hlo  # pyright: ignore[reportAttributeAccessIssue]

    try:
        module = _hlo.hlo_module_from_text(_COLLECTIVE.format(text))
    except RuntimeError as error:
        raise ValueError(f"these are no groups of devices: {text}") from error
    return re.findall(r"replica_groups=(\{\{.*?\}\})", module.to_string(_hlo.HloPrintOptions.fingerprint()))[0]


_COLLECTIVE = """HloModule one

%add (a: f32[], b: f32[]) -> f32[] {{
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}}

ENTRY %main (x: f32[]) -> f32[] {{
  %x = f32[] parameter(0)
  ROOT %sum = f32[] all-reduce(%x), channel_id=1, replica_groups={}, use_global_device_ids=true, to_apply=%add
}}
"""
