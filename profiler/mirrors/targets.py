"""Where a run's figures are copied to: TensorBoard, Weights & Biases, MLflow, each through its own library.

They are loaded only where they are asked for, and never in a rank.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol, cast

from msgspec import Struct

from llmtop.presets.errors import UsageError
from llmtop.presets.version import install_words
from llmtop.profiler.mirrors.scalars import Row


class Target(Protocol):
    """One place. Raises what its library raises: the mirror says it and ends, the run goes on."""

    def describe(self, run: Described, step: int) -> None:
        """After `step` its options are these."""

    def write(self, row: Row) -> None: ...

    def flush(self) -> None: ...

    def close(self, status: str) -> None: ...


class Asked(Struct, frozen=True, kw_only=True):
    """Which of them; None: not this one."""

    tensorboard: Path | None = None
    """A folder; the run gets one of its own in it."""
    wandb: str | None = None
    """A project."""
    mlflow: str | None = None
    """A tracking URI, as `http://localhost:5000` or `sqlite:///mlflow.db`."""

    @property
    def any(self) -> bool:
        return self.tensorboard is not None or self.wandb is not None or self.mlflow is not None


_PACKAGES = {"tensorboard": "tensorboardX", "wandb": "wandb", "mlflow": "mlflow"}


def require_packages(asked: Asked) -> None:
    """Raise UsageError where a library is not there: before the run starts, not while it goes on."""
    for name, package in _PACKAGES.items():
        if getattr(asked, name) is not None and find_spec(package) is None:
            raise UsageError(
                f"--{name} needs {package}",
                why="it is not installed",
                fix=install_words(name),
            )


class Described(Struct, frozen=True, kw_only=True):
    """What a run is called there, and its options, without secrets."""

    run_id: str
    setting: int
    """Its number: another one may come into force while the run goes on."""
    options: dict[str, Any]


def open_targets(asked: Asked, run: Described) -> list[Target]:
    targets: list[Target] = []
    if asked.tensorboard is not None:
        targets.append(TensorBoard(asked.tensorboard / run.run_id, run))
    if asked.wandb is not None:
        targets.append(WeightsAndBiases(asked.wandb, run))
    if asked.mlflow is not None:
        targets.append(MlFlow(asked.mlflow, run))
    return targets


def _summary_writer() -> Any:
    """tensorboardX imports torch where that is installed, for graphs that nobody draws here: seconds."""
    if "torch" in sys.modules:
        from tensorboardX import SummaryWriter

        return SummaryWriter
    modules: dict[str, object] = cast(dict[str, object], sys.modules)
    # As documented for `sys.modules`: None there makes the import fail.
    modules["torch"] = None
    try:
        from tensorboardX import SummaryWriter
    finally:
        del modules["torch"]
    return SummaryWriter


class TensorBoard:
    """Event files."""

    def __init__(self, folder: Path, run: Described) -> None:
        self._writer: Any = _summary_writer()(str(folder), write_to_disk=True, flush_secs=1)
        self.describe(run, 0)

    def describe(self, run: Described, step: int) -> None:
        lines = (f"    {name}: {value}" for name, value in run.options.items())
        self._writer.add_text("options", "\n".join(lines), step)

    def write(self, row: Row) -> None:
        for name, value in row.values.items():
            self._writer.add_scalar(name, value, row.step, walltime=row.wall)

    def flush(self) -> None:
        self._writer.flush()

    def close(self, status: str) -> None:
        self._writer.close()


class WeightsAndBiases:
    """One run of a project; `WANDB_MODE=offline` keeps it on this machine."""

    def __init__(self, project: str, run: Described) -> None:
        import wandb

        settings = wandb.Settings(console="off", x_disable_stats=True)
        self._run: Any = wandb.init(
            project=project,
            id=run.run_id,
            name=run.run_id,
            config=run.options,
            resume="allow",
            settings=settings,
        )
        # Hardware and steps are told apart: each figure stands over the step that it names itself.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def describe(self, run: Described, step: int) -> None:
        self._run.config.update(run.options, allow_val_change=True)

    def write(self, row: Row) -> None:
        self._run.log({"step": row.step, "wall": row.wall, **row.values})

    def flush(self) -> None:
        """Its own process does that."""

    def close(self, status: str) -> None:
        self._run.summary["status"] = status
        self._run.finish(exit_code=0 if status in ("completed", "stopped", "gone") else 1)


class MlFlow:
    """One run of the experiment `llmtop`."""

    _BATCH = 500
    _MOST_PARAMS = 100
    """That the server takes at once."""

    def __init__(self, uri: str, run: Described) -> None:
        from mlflow.entities import Metric, Param
        from mlflow.tracking import MlflowClient

        self._metric = Metric
        self._client: Any = MlflowClient(tracking_uri=uri)
        found = self._client.get_experiment_by_name("llmtop")
        experiment = found.experiment_id if found is not None else self._client.create_experiment("llmtop")
        self._id = self._client.create_run(experiment, run_name=run.run_id).info.run_id
        self._param, self._told = Param, dict[str, str]()
        self._waiting: list[Any] = []
        self.describe(run, 0)

    def describe(self, run: Described, step: int) -> None:
        told = {name: str(value)[:500] for name, value in run.options.items()}
        new = [self._param(*one) for one in told.items() if one[0] not in self._told]
        for at in range(0, len(new), self._MOST_PARAMS):
            self._client.log_batch(self._id, params=new[at : at + self._MOST_PARAMS])
        # A parameter keeps its value there; a tag of its name tells the newest.
        for name, value in told.items():
            if self._told.get(name, value) != value:
                self._client.set_tag(self._id, name, value)
        self._told.update(told)

    def write(self, row: Row) -> None:
        at = round(row.wall * 1000)
        self._waiting += [self._metric(name, value, at, row.step) for name, value in row.values.items()]
        if len(self._waiting) >= self._BATCH:
            self.flush()

    def flush(self) -> None:
        while self._waiting:
            batch, self._waiting = self._waiting[: self._BATCH], self._waiting[self._BATCH :]
            self._client.log_batch(self._id, metrics=batch)

    def close(self, status: str) -> None:
        self.flush()
        ended = "FINISHED" if status in ("completed", "stopped", "gone") else "FAILED"
        self._client.set_terminated(self._id, status=ended)
