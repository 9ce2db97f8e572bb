"""The lock file of the documented install holds what pyproject.toml asks for, each package by its hashes."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[2]
LOCK = (ROOT / "requirements.lock").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
OWN = canonicalize_name(PROJECT["project"]["name"])


def entries() -> dict[str, list[tuple[Requirement, int]]]:
    """Name to its lines, one for each kind of machine, with how many hashes each has."""
    found: dict[str, list[tuple[Requirement, int]]] = {}
    for entry in re.split(r"\n(?=\S)", LOCK.replace("\\\n", " ")):
        words, *hashes = entry.split("--hash=")
        one = Requirement(words.strip())
        assert all(re.fullmatch(r"sha256:[0-9a-f]{64}\s*", digest) for digest in hashes), one
        found.setdefault(canonicalize_name(one.name), []).append((one, len(hashes)))
    return found


def asked() -> list[Requirement]:
    """Of the program, of the extra that is documented, and of whoever builds it."""
    project, extras = PROJECT["project"], PROJECT["project"]["optional-dependencies"]
    waiting = [*project["dependencies"], *extras["all"], *PROJECT["build-system"]["requires"], "editables"]
    found = []
    while waiting:
        one = Requirement(waiting.pop())
        if canonicalize_name(one.name) == OWN:
            waiting += [line for extra in one.extras for line in extras[extra]]
        else:
            found.append(one)
    return found


def test_all_that_is_asked_for_is_locked_to_a_version_that_will_do() -> None:
    locked = entries()
    assert len(asked()) > 15
    for wanted in asked():
        lines = locked.get(canonicalize_name(wanted.name), [])
        assert lines, f"{wanted} is not locked: make lock"
        for line, _ in lines:
            (pin,) = line.specifier
            assert pin.operator == "=="
            assert wanted.specifier.contains(Version(pin.version)), f"{line} is not {wanted}: make lock"


def test_every_package_has_its_hashes_and_none_says_where_it_is_from() -> None:
    for lines in entries().values():
        assert all(hashes > 0 for _, hashes in lines)
    assert "://" not in LOCK and "--index" not in LOCK and " @ " not in LOCK


def test_torch_is_the_one_that_is_tested() -> None:
    constraint = Requirement((ROOT / "constraints-cpu.txt").read_text().splitlines()[-1])
    assert {str(line.specifier) for line, _ in entries()["torch"]} == {str(constraint.specifier)}


def test_the_readme_installs_by_hash() -> None:
    readme = (ROOT / "README.md").read_text()
    assert "pip install --require-hashes -r requirements.lock" in readme
    assert "pip install --no-deps --no-build-isolation -e ." in readme
