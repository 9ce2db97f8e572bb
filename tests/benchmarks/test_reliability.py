"""The table of faults names tests that there are, and its page is what the recorded rows say."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from benchmarks.reliability import document
from benchmarks.reliability.__main__ import RESULTS
from benchmarks.reliability.faults import FAULTS, Fault

_TOP = Path(__file__).parents[2]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name[:40])
def test_its_tests_are_there(fault: Fault) -> None:
    assert fault.tests and fault.holds
    for test in fault.tests:
        path, _, name = test.partition("::")
        nodes = ast.walk(ast.parse((_TOP / path).read_text()))
        found = {node.name for node in nodes if isinstance(node, ast.FunctionDef)}
        assert not name or name in found, test


def test_the_page_is_written_from_the_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(document, "PAGE", tmp_path / "reliability.md")
    document.write(RESULTS)
    written = (tmp_path / "reliability.md").read_text()
    assert written == (_TOP / "docs" / "reliability.md").read_text(), (
        "python -m benchmarks.reliability --document"
    )
    assert all(f"| {fault.name} |" in written for fault in FAULTS)
