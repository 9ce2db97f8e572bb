"""The only module that knows what the files of a run are called (`settingfiles.py`: some).

A run is a folder of mode 0700:
    spec.json            the resolved RunSpec
    prediction.json      the Prediction made before launch
    deepspeed.json       the DeepSpeed configuration that the ranks use
    supervisor.jsonl     events of the supervisor
    hardware.jsonl       events of the sampler
    rank-N.jsonl         events of rank N; a log that has grown long goes on in other files (`segments.py`)
    rank-N.log           stdout and stderr of rank N
    supervisor.log       stdout and stderr of the supervisor (empty unless it has a bug)
    control/ID.json      requests, written aside and renamed
    checkpoints/         what the trainer saves
    tokenizer/           the tokenizer made from the data, where the model brought none
    tokens/              the data as token ids, one file per choice of data and tokenizer
    supervisor.pid       pid and start time, for telling a live supervisor from a reused pid
    settings/N/          spec, prediction and DeepSpeed configuration after the N-th change, as above
    in-force.json        which of the settings is in force; the run's own three while it is not there
    stacks/              Python stacks of the ranks, as they were asked for; rank-N.txt is what rank N wrote
    live.json            what the supervisor last asked of the running ranks
    save.json            how often it has asked them for a checkpoint that is no end
    bookmark             the state so far, and where in the logs it ends: a cache (`bookmark.py`), if there
    looks.json           what stood out while the run went on: a report's cache (`keptlooks.py`), if there
    environment.json     what the run was launched in: versions, driver, variables without secrets
    imported.json        only of a run that came from an archive: which, and from where; nobody supervises it
    quantized/NAME.json  what a model that was made of its weights in fewer bits has cost
    remote.json          only of a folder that follows a run on another machine: which, and whether it lives
    mirror.log           what the processes wrote that copy the run's figures elsewhere
    standby/N/           which ranks are ready for setting N, and whether they may begin
"""

from __future__ import annotations

import re
from pathlib import Path

from llmtop.profiler.record.segments import base_name
from llmtop.profiler.record.settingfiles import DEEPSPEED, PREDICTION, SPEC

SUPERVISOR = "supervisor"
HARDWARE = "hardware"

_RANK_FILE = re.compile(r"rank-(\d+)\.jsonl")
"""The first file of a rank's events; `segments.py` knows of those after it."""


class RunFiles:
    """Where one run has what; nothing is read but names."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def run_id(self) -> str:
        return self.path.name

    @property
    def settings_dir(self) -> Path:
        return self.path / "settings"

    def setting_dir(self, number: int) -> Path:
        """Of a setting's three documents; those of the first are the run's own."""
        return self.settings_dir / str(number) if number else self.path

    @property
    def spec_path(self) -> Path:
        return self.path / SPEC

    @property
    def prediction_path(self) -> Path:
        return self.path / PREDICTION

    @property
    def deepspeed_path(self) -> Path:
        return self.path / DEEPSPEED

    @property
    def environment_path(self) -> Path:
        return self.path / "environment.json"

    @property
    def devices_path(self) -> Path:
        """Which GPUs the run was given, as CUDA_VISIBLE_DEVICES says it; absent for all that there were."""
        return self.path / "devices.json"

    @property
    def imported_path(self) -> Path:
        return self.path / "imported.json"

    @property
    def quantized_dir(self) -> Path:
        return self.path / "quantized"

    def quantized_path(self, name: str) -> Path:
        """Of the report on a file or folder of that name."""
        return self.quantized_dir / f"{name}.json"

    @property
    def mirror_log_path(self) -> Path:
        return self.path / "mirror.log"

    def standby_dir(self, setting: int) -> Path:
        return self.path / "standby" / str(setting)

    @property
    def live_path(self) -> Path:
        return self.path / "live.json"

    @property
    def save_path(self) -> Path:
        return self.path / "save.json"

    @property
    def snapshot_request_path(self) -> Path:
        return self.path / "snapshot.json"

    @property
    def snapshots_dir(self) -> Path:
        return self.path / "snapshots"

    def events_path(self, src: str | int) -> Path:
        """The event log of `supervisor`, `hardware`, or a rank by its number or as `rank3`."""
        if isinstance(src, str) and not src.startswith("rank"):
            return self.path / f"{src}.jsonl"
        return self.path / f"{_rank_stem(src)}.jsonl"

    def log_path(self, rank: int | str) -> Path:
        """stdout and stderr of a rank, or of `supervisor`."""
        return self.path / (f"{SUPERVISOR}.log" if rank == SUPERVISOR else f"{_rank_stem(rank)}.log")

    def rank_events(self) -> dict[int, Path]:
        """Rank to its event log, for the ranks that have written one so far."""
        try:
            names = [path.name for path in self.path.iterdir()]
        except OSError:
            return {}
        bases = {base for name in names if (base := base_name(name)) is not None}
        matches = (_RANK_FILE.fullmatch(base) for base in bases)
        found = {int(match.group(1)): self.path / match.group() for match in matches if match}
        return dict(sorted(found.items()))

    def event_logs(self) -> tuple[Path, ...]:
        """All that there are, the ranks' first; the sampler's and the supervisor's are named in any case."""
        return (*self.rank_events().values(), self.events_path(HARDWARE), self.events_path(SUPERVISOR))

    @property
    def bookmark_path(self) -> Path:
        return self.path / "bookmark"

    @property
    def looks_path(self) -> Path:
        return self.path / "looks.json"

    @property
    def control_dir(self) -> Path:
        return self.path / "control"

    @property
    def stacks_dir(self) -> Path:
        return self.path / "stacks"

    @property
    def checkpoints_dir(self) -> Path:
        return self.path / "checkpoints"

    @property
    def tokenizer_dir(self) -> Path:
        return self.path / "tokenizer"

    @property
    def tokens_dir(self) -> Path:
        return self.path / "tokens"

    @property
    def supervisor_pid_path(self) -> Path:
        return self.path / "supervisor.pid"


def rank_of_log(path: Path) -> int | None:
    """Whose events a log has, by its first file; None where that is no rank."""
    match = _RANK_FILE.fullmatch(path.name)
    return int(match.group(1)) if match is not None else None


def _rank_stem(rank: int | str) -> str:
    number = str(rank).removeprefix("rank").removeprefix("-")
    if not number.isdigit():
        raise ValueError(f"not a rank: {rank!r}")
    return f"rank-{int(number)}"
