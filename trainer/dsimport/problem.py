"""What is said about one key of a DeepSpeed configuration."""

from __future__ import annotations

from msgspec import Struct


class Problem(Struct, frozen=True, kw_only=True):
    key: str
    """Dotted path of the key, as the file spells it."""
    what: str
    """What is wrong or worth knowing."""
    fix: str = ""
    """What to do about it; empty where nothing needs doing."""
    fatal: bool = False
    """No run can come of the file as it is."""
    unread: bool = False
    """DeepSpeed skips the key in silence."""

    def __str__(self) -> str:
        return f"{self.key}: {self.what}" + (f" (fix: {self.fix})" if self.fix else "")


class Findings:
    """Problems in the order in which they were found."""

    def __init__(self) -> None:
        self.problems: list[Problem] = []

    def warn(self, key: str, what: str, fix: str = "") -> None:
        self.problems.append(Problem(key=key, what=what, fix=fix))

    def refuse(self, key: str, what: str, fix: str) -> None:
        self.problems.append(Problem(key=key, what=what, fix=fix, fatal=True))

    def refused(self, key: str) -> bool:
        """Whether the key was already refused, so that nothing need be concluded from its absence."""
        return any(problem.fatal and problem.key == key for problem in self.problems)
