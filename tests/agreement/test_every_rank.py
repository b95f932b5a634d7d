"""The same error on every rank, whoever has it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from jaxdist.agreement import every_rank
from jaxdist.agreement.every_rank import Part, on_every_rank


def run(parts: list[Callable[[], Part[Any]]], **options: Any) -> list[Any]:
    """What each rank gets: a result, or an error."""
    said: list[Any] = [None] * len(parts)
    met = threading.Barrier(len(parts), timeout=10)
    got: list[Any] = list(parts)

    def rank(me: int) -> None:
        def exchange(tag: str, value: Any, timeout: float | None) -> list[Any]:
            said[me] = value
            met.wait()
            return list(said)

        context: Any = SimpleNamespace(
            rank=me, size=len(parts), timeout=1.0, control=SimpleNamespace(exchange=exchange)
        )
        try:
            got[me] = on_every_rank(context, "save", parts[me], **options)
        except Exception as error:
            got[me] = error

    threads = [threading.Thread(target=rank, args=[me]) for me in range(len(parts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    return got


def fails(error: Exception) -> Callable[[], Part[Any]]:
    def part() -> Part[Any]:
        raise error

    return part


def test_each_keeps_its_result_and_hears_what_all_tell() -> None:
    parts = [lambda i=i: Part(f"own {i}", (("step", "1"),), i) for i in range(3)]
    assert run(parts) == [(f"own {i}", [0, 1, 2]) for i in range(3)]


@pytest.mark.parametrize(
    ("raised", "kind", "said"),
    [
        (FileExistsError("there is one"), FileExistsError, "save, on rank 1: there is one"),
        (PermissionError(13, "no"), OSError, "save, on rank 1: [Errno 13] no"),
        (KeyError("w"), RuntimeError, "save, on rank 1: KeyError: 'w'"),
        (OSError(), OSError, "save, on rank 1: failed"),
    ],
)
def test_one_that_fails(raised: Exception, kind: type[Exception], said: str) -> None:
    errors = run([lambda: Part(0), fails(raised), lambda: Part(2)], raises=(RuntimeError, FileExistsError, OSError))
    assert [(type(error), str(error)) for error in errors] == [(kind, said)] * 3
    assert [error.__cause__ for error in errors] == [None, raised, None]


def test_of_several_errors_the_kind_that_is_named_first() -> None:
    errors = run([fails(KeyError("a")), fails(ValueError("b")), fails(ValueError("c"))], raises=(ValueError, KeyError))
    assert {(type(error), str(error)) for error in errors} == {(ValueError, "save, on rank 1 (and on rank 2): b")}


def test_arguments_that_differ() -> None:
    parts = [lambda i=i: Part(None, (("the step", str(i // 2)),)) for i in range(3)]
    errors = run(parts, raises=(RuntimeError,), advice=lambda name: f"Give {name} twice")
    said = "the ranks call save with different arguments: the step is 0 on rank 0, 1; 1 on rank 2. Give the step twice"
    assert {(type(error), str(error)) for error in errors} == {(RuntimeError, said)}


def test_alone_it_is_the_error_itself() -> None:
    assert run([lambda: Part("own", told=1)]) == [("own", [1])]
    assert [type(error) for error in run([fails(KeyError("w"))])] == [KeyError]


def test_who_waits_for_long_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(every_rank, "_REMIND", 0.01)
    said, enough = [], threading.Event()

    def say(text: str) -> None:
        said.append(text)
        if len(said) == 2:
            enough.set()

    def exchange(tag: str, value: Any, timeout: float | None) -> list[Any]:
        assert timeout is None
        assert enough.wait(30)
        return [value, value]

    context: Any = SimpleNamespace(rank=0, size=2, timeout=1.0, control=SimpleNamespace(exchange=exchange, say=say))
    assert on_every_rank(context, "tokenize", lambda: Part(3), patient=True)[0] == 3
    assert said[:2] == ["tokenize: this rank is ready and waits for another one, which takes its time"] * 2
