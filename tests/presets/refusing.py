"""How tests of the presets look at a refusal."""

from __future__ import annotations

from typing import Any

import pytest

from llmtop.presets.errors import UsageError


def refused(call: Any, *args: Any) -> UsageError:
    with pytest.raises(UsageError) as caught:
        call(*args)
    return caught.value
