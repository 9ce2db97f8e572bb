"""Which llmtop this is, and which versions of other packages it runs with."""

from __future__ import annotations

from collections.abc import Iterable
from importlib import metadata

DISTRIBUTION = "llmtop-deepspeed"


def llmtop_version() -> str:
    """The installed distribution's version; `source` where the code runs straight from a checkout."""
    return package_version(DISTRIBUTION) or "source"


def package_version(package: str) -> str | None:
    """As installed in this environment; None where it is not."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def package_versions(packages: Iterable[str]) -> dict[str, str]:
    """Of those that are installed."""
    return {package: version for package in packages if (version := package_version(package)) is not None}


def install_words(extra: str, held: str = "") -> str:
    """How an extra is installed, alike wherever its package is missed; `held`: further options."""
    return f"in the clone of llmtop: pip install {held}-e '.[{extra}]'"
