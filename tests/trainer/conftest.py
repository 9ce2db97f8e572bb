"""Fixtures of the tests of the trainer's host side."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from llmtop.trainer.dsimport.read import Imported, import_config


@pytest.fixture
def read(tmp_path: Path) -> Any:
    def import_object(config: object, **kwargs: Any) -> Imported:
        path = tmp_path / "ds.json"
        path.write_text(config if isinstance(config, str) else json.dumps(config), encoding="utf-8")
        return import_config(path, **kwargs)

    return import_object
