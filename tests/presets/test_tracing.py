"""Architectures without formulas: traced in a process of their own, once."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from llmtop.presets import catalog
from llmtop.presets.errors import UsageError
from llmtop.presets.hf import tracing
from llmtop.presets.paths import cache_dir

CONFIG = {
    "model_type": "persimmon",
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "vocab_size": 500,
    "hidden_act": "relu2",
}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    tracing._answers.clear()
    return tmp_path / "cache" / "llmtop" / "traces"


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    path = tmp_path / "mine" / "config.json"
    path.parent.mkdir()
    path.write_text(json.dumps(CONFIG))
    return path


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The tracing processes that were started; each answers at once that it cannot."""
    calls: list[Any] = []

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[bytes]:
        calls.append(command)
        return subprocess.CompletedProcess(command, 0, b'{"refused": "it is a test"}', b"")

    monkeypatch.setattr(subprocess, "run", run)
    return calls


@pytest.mark.slow
def test_a_folder_is_traced_once_for_each_content(
    cache: Path, config_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = catalog.load_model(str(config_file.parent))
    assert (model.shape.name, model.shape.family) == ("mine", "persimmon")
    assert model.shape.traced is not None and model.shape.num_layers == 3
    assert model.hf_config["model_type"] == "persimmon"
    assert len(list(cache.iterdir())) == 1
    monkeypatch.setattr(subprocess, "run", _must_not_start)
    assert catalog.load_model(str(config_file)).shape == model.shape


def _must_not_start(*_: Any, **__: Any) -> None:
    raise AssertionError("the answer was kept")


def test_another_content_or_version_is_another_trace(
    cache: Path, config_file: Path, started: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = {tracing._path(CONFIG, versions) for versions in ({"torch": "2"}, {"torch": "3"})}
    paths.add(tracing._path({**CONFIG, "vocab_size": 501}, {"torch": "2"}))
    assert len(paths) == 3 and {path.parent for path in paths} == {cache}
    with pytest.raises(UsageError) as caught:
        catalog.load_model(str(config_file))
    assert "'persimmon' is not known" in caught.value.what
    assert caught.value.why == "it has no formulas here, and cannot be traced: it is a test"
    assert not cache.exists(), "a refusal is not kept"
    with pytest.raises(UsageError):
        catalog.load_model(str(config_file))
    assert started == [[sys.executable, "-m", tracing.MODULE]], "it is asked once in the life of a process"


def test_a_broken_file_is_made_anew(cache: Path, config_file: Path, started: list[Any]) -> None:
    versions = {package: metadata.version(package) for package in ("torch", "transformers")}
    path = tracing._path(CONFIG, versions)
    path.parent.mkdir(parents=True)
    path.write_text('{"name": "cut of')
    with pytest.raises(UsageError, match="not known"):
        catalog.load_model(str(config_file))
    assert len(started) == 1


def test_a_process_that_fails_or_takes_too_long_is_told(
    cache: Path, config_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(command: list[str], **_: Any) -> subprocess.CompletedProcess[bytes]:
        return subprocess.CompletedProcess(command, 1, b"", b"Traceback\nImportError: no torch\n")

    def waits(command: list[str], timeout: float, **_: Any) -> None:
        raise subprocess.TimeoutExpired(command, timeout)

    for run, words in ((fails, "ImportError: no torch"), (waits, "took longer than 180 s")):
        monkeypatch.setattr(subprocess, "run", run)
        tracing._answers.clear()
        with pytest.raises(UsageError) as caught:
            catalog.load_model(str(config_file))
        assert words in caught.value.why


def test_a_name_that_transformers_does_not_have_is_told_at_once(
    cache: Path, tmp_path: Path, started: list[Any]
) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**CONFIG, "model_type": "persimon"}))
    with pytest.raises(UsageError) as caught:
        catalog.load_model(str(path))
    assert caught.value.why.endswith("transformers does not know it either")
    assert not started


def test_without_the_training_packages_it_says_what_to_install(
    cache: Path, config_file: Path, started: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def version(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", version)
    with pytest.raises(UsageError) as caught:
        catalog.load_model(str(config_file))
    assert "not both installed" in caught.value.why
    assert "pip install" in caught.value.fix
    assert not started


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"XDG_CACHE_HOME": "/c", "HOME": "/h"}, "/c/llmtop"),
        ({"XDG_CACHE_HOME": "relative", "HOME": "/h"}, "/h/.cache/llmtop"),
        ({"XDG_CACHE_HOME": "", "HOME": "/h"}, "/h/.cache/llmtop"),
        ({"HOME": "/h"}, "/h/.cache/llmtop"),
    ],
)
def test_the_cache_is_where_xdg_says(variables: dict[str, str], expected: str) -> None:
    assert cache_dir(variables) == Path(expected)
