"""How many ranks a run can have: views go through them one by one."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

MOST_RANKS = 1 << 17
"""More are nowhere."""
WorldSize = Annotated[int, Meta(ge=1, le=MOST_RANKS)]
"""As a record may tell it, which may come from anywhere."""
