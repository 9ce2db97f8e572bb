"""What the questions of `llmtop plan` take where nobody says more: help names it without their modules."""

from __future__ import annotations

PEAK = "peak"
"""What `--explain` explains."""
ROWS = 30
"""Candidates of a sweep that text shows."""
CONTEXT = 8192
"""Tokens that `--load` keeps."""
