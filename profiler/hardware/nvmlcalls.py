"""NVML functions by name: None for what this driver, device or binding does not answer."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any, NamedTuple

_VALUE_MEMBERS = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")
"""Members of NVML's value union in the order of its value types."""
_NOT_SUPPORTED, _GPU_IS_LOST, _RESET_REQUIRED = 3, 15, 16


class FieldValue(NamedTuple):
    value: float | None
    is_supported: bool
    """False: this device will never tell; asking again would only cost time."""


class NvmlCalls:
    """The binding behind one door, so that no reading ever raises."""

    def __init__(self, nvml: ModuleType | Any) -> None:
        self.nvml = nvml
        self.met_lost_device = False
        """Whether a call since this was last cleared met a device that is gone or has to be reset."""

    def ask(self, name: str, *arguments: Any) -> Any:
        """One call; None when it is not answered."""
        call = getattr(self.nvml, name, None)
        if call is None:
            return None
        try:
            return call(*arguments)
        except self.nvml.NVMLError as error:
            if error.value in (_GPU_IS_LOST, _RESET_REQUIRED):
                self.met_lost_device = True
            return None

    def constant(self, name: str, default: int) -> int:
        """A number of nvml.h by its name, or as it has always been in bindings that lack the name."""
        return int(getattr(self.nvml, name, default))

    def number(self, name: str, *arguments: Any) -> int | None:
        value = self.ask(name, *arguments)
        return None if value is None else int(value)

    def fields(self, handle: Any, requests: Sequence[int | tuple[int, int]]) -> list[FieldValue]:
        """Field values in one call, each by its number or (number, scope); nothing when none is answered."""
        values = self.ask("nvmlDeviceGetFieldValues", handle, list(requests)) if requests else None
        return [] if values is None else [_field_value(value) for value in values]


def _field_value(value: Any) -> FieldValue:
    if value.nvmlReturn != 0 or not 0 <= value.valueType < len(_VALUE_MEMBERS):
        return FieldValue(None, value.nvmlReturn != _NOT_SUPPORTED)
    return FieldValue(float(getattr(value.value, _VALUE_MEMBERS[value.valueType])), True)


def text(value: Any) -> str | None:
    """Older bindings give bytes."""
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value


def scaled(value: Any, factor: float) -> float | None:
    return None if value is None else float(value) * factor
