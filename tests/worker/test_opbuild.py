"""Ops are built before they are needed; what stands in the way is told in words."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from llmtop.presets.errors import LlmtopError
from llmtop.profiler.record.events import OpBuilt
from llmtop.trainer.ops import CPU_ADAM, FUSED_ADAM
from llmtop.trainer.worker.opbuild import build_ops


@pytest.fixture
def builders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], object]], None]:
    """Gives every op a builder that does what it is told."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    real = importlib.import_module

    def use(load: Callable[[], object]) -> None:
        def builder() -> SimpleNamespace:
            return SimpleNamespace(load=lambda *, verbose: load())

        fake = SimpleNamespace(CPUAdamBuilder=builder, FusedAdamBuilder=builder)

        def import_module(name: str, package: str | None = None) -> object:
            return fake if name == "deepspeed.ops.op_builder" else real(name, package)

        monkeypatch.setattr(importlib, "import_module", import_module)

    return use


def test_what_is_compiled_is_told_from_what_is_only_loaded(
    tmp_path: Path, builders: Callable[[Callable[[], object]], None]
) -> None:
    library = tmp_path / "cpu_adam" / "cpu_adam.so"
    library.parent.mkdir()
    told: list[OpBuilt] = []
    builders(library.touch)
    build_ops([CPU_ADAM], told.append)
    builders(lambda: None)
    build_ops([CPU_ADAM], told.append)
    assert [(event.name, event.compiled) for event in told] == [("cpu_adam", True), ("cpu_adam", False)]


def test_a_compiler_that_complains_is_quoted(
    builders: Callable[[Callable[[], object]], None], capfd: pytest.CaptureFixture[str]
) -> None:
    def fail() -> None:
        raise RuntimeError(
            "Error building extension\n[1/2] c++ ...\nx.cpp:3: error: no such thing\nninja: stopped"
        )

    builders(fail)
    with pytest.raises(LlmtopError, match=r"fused Adam \(fused_adam\) cannot be built") as caught:
        build_ops([FUSED_ADAM], lambda _event: None)
    assert caught.value.why == "x.cpp:3: error: no such thing"
    assert "adamw_torch" in caught.value.fix
    assert "ninja: stopped" in capfd.readouterr().err


def test_a_missing_toolkit_is_told(builders: Callable[[Callable[[], object]], None]) -> None:
    from deepspeed.ops.op_builder.builder import MissingCUDAException

    def fail() -> None:
        raise MissingCUDAException("CUDA_HOME does not exist, unable to compile CUDA op(s)")

    builders(fail)
    with pytest.raises(LlmtopError) as caught:
        build_ops([FUSED_ADAM], lambda _event: None)
    assert "CUDA_HOME does not exist" in caught.value.why
    assert "llmtop doctor" in caught.value.fix
