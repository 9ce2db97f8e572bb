"""Waits for the libraries that train to be imported, and does nothing else until then.

Loaded in every Python process of a script, so it costs next to nothing: nothing is imported that an
interpreter has not loaded already. `typing` alone would take three times as long as all of this.
"""

from __future__ import annotations

import sys

TYPE_CHECKING = False
"""True for type checkers, which know the name."""
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any

_BEGIN = "llmtop.profiler.probes.script.begin"

AFTER = {
    "deepspeed": "deepspeed_imported",
    "torch.optim.optimizer": "optimizers_imported",
}
"""Module to the function of `begin` that is called once it has been imported."""


class _Calling:
    """A module's own loader, and after it a call. All else is asked of the loader itself."""

    def __init__(self, loader: Any, function: str) -> None:
        self._loader = loader
        self._function = function

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        made: ModuleType | None = self._loader.create_module(spec)
        return made

    def exec_module(self, module: ModuleType) -> None:
        spec = module.__spec__
        if spec is not None:
            # Whoever looks later finds the module as if nobody had been in between.
            spec.loader = self._loader
        module.__loader__ = self._loader
        self._loader.exec_module(module)
        guarded(self._function, module)


class Waiting:
    """A finder that finds what the others find, and lets the loader of a few modules call back."""

    def __init__(self, after: dict[str, str]) -> None:
        self._after = dict(after)
        self._asked: set[str] = set()

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        function = self._after.get(name)
        if function is None or name in self._asked:
            return None
        self._asked.add(name)
        try:
            spec = _found_by_others(self, name, path, target)
        finally:
            self._asked.discard(name)
        if spec is not None and spec.loader is not None:
            spec.loader = _Calling(spec.loader, function)  # type: ignore[assignment]
        return spec


def install() -> None:
    """From now on a training library that is imported is watched."""
    sys.meta_path.insert(0, Waiting(AFTER))


def guarded(function: str, *given: Any) -> None:
    """Call a function of `begin`; a failure is told and changes nothing for the script."""
    try:
        __import__(_BEGIN)
        call: Callable[..., None] = getattr(sys.modules[_BEGIN], function)
        call(*given)
    except Exception as error:  # noqa: BLE001 - a script must run as if nobody watched
        told = f"{type(error).__name__}: {error}"
        sys.stderr.write(f"llmtop: this process is not watched from inside: {told}\n")


def _found_by_others(
    me: object, name: str, path: Sequence[str] | None, target: ModuleType | None
) -> ModuleSpec | None:
    for finder in sys.meta_path:
        find = None if finder is me else getattr(finder, "find_spec", None)
        spec: ModuleSpec | None = find(name, path, target) if find is not None else None
        if spec is not None:
            return spec
    return None
