"""`llmtop export`: one run as one file, which another machine can read and which holds no secrets.

The record is read once, part by part, while a second thread compresses: a run of any length takes little
memory. Everything is written aside and renamed, so that an archive is there whole or not at all.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import time
from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import msgspec
from msgspec import Struct

from llmtop.presets.errors import UsageError
from llmtop.presets.version import install_words
from llmtop.profiler.export.contents import LeftOut, contents
from llmtop.profiler.export.manifest import Manifest, memory_csv, readme
from llmtop.profiler.export.packing import Packer
from llmtop.profiler.export.secrets import Scrubber
from llmtop.profiler.export.tables import TABLES, Table, TableWriter
from llmtop.profiler.fold.runstate import RunState
from llmtop.profiler.record.feed import FreshStarts, LateLine, RunStream, read_state
from llmtop.profiler.record.rundir import RunDir
from llmtop.profiler.record.segments import base_name, segments_of
from llmtop.profiler.record.unwritable import require_folder, unwritable
from llmtop.profiler.record.wholefile import document, random_hex, sync_folder
from llmtop.profiler.report.history import History, HistoryBuilder
from llmtop.profiler.report.page import run_page
from llmtop.profiler.report.pagedata import PageData, page_of

SUFFIX = ".llmtop.zip"


class Exported(Struct, frozen=True, kw_only=True):
    path: str
    size_bytes: int
    files: int
    unpacked_bytes: int
    page_bytes: int
    """Of `report.html`."""
    secrets_removed: int
    left_out: tuple[LeftOut, ...]
    seconds: float


class Choices(Struct, frozen=True, kw_only=True):
    """What goes in beyond the record and the report."""

    logs: bool = True
    snapshots: bool = False
    parquet: bool | None = None
    """None: where pyarrow is there."""


def export_run(
    run: RunDir,
    out: Path | None = None,
    *,
    choices: Choices | None = None,
    force: bool = False,
    environment: Mapping[str, str] | None = None,
) -> Exported:
    """Write an archive of a run that goes on or has ended.

    `out`: by default the run's id in the working folder. `environment`: whose secrets are taken out by value,
    by default the process's own. Raises UsageError for a place that cannot be, LlmtopError where it cannot be
    written.
    """
    began = time.monotonic()
    chosen = choices or Choices()
    path = out or Path(f"{run.run_id}{SUFFIX}")
    _require_place(path, force=force)
    parquet = _has_pyarrow() if chosen.parquet is None else chosen.parquet
    if parquet and not _has_pyarrow():
        raise UsageError("Parquet needs pyarrow", why="it is not installed", fix=install_words("export"))
    known = os.environ if environment is None else environment
    with _aside(path) as folder:
        made = _make(run, folder, known, chosen, parquet=parquet)
        made.path.replace(path)
        sync_folder(path.absolute().parent)
    return Exported(
        path=str(path),
        size_bytes=path.stat().st_size,
        files=len(made.sizes),
        unpacked_bytes=sum(made.sizes.values()),
        page_bytes=made.sizes["report.html"],
        secrets_removed=made.secrets_removed,
        left_out=made.left_out,
        seconds=time.monotonic() - began,
    )


class _Made(Struct, frozen=True, kw_only=True):
    path: Path
    sizes: dict[str, int]
    secrets_removed: int
    left_out: tuple[LeftOut, ...]


def _make(
    run: RunDir, folder: Path, environment: Mapping[str, str], choices: Choices, *, parquet: bool
) -> _Made:
    """Anew where the record was thinned meanwhile: no archive holds a part of its old and new files.
    Raises LlmtopError where it changes for ever."""
    fresh_starts = FreshStarts(run)
    while True:
        place = folder / random_hex(3)
        place.mkdir()
        try:
            return _Archive(run, place, environment, choices, parquet=parquet).write()
        except LateLine:
            shutil.rmtree(place)
            fresh_starts.one_more()


class _Archive:
    """One archive on its way."""

    def __init__(
        self, run: RunDir, folder: Path, environment: Mapping[str, str], choices: Choices, *, parquet: bool
    ) -> None:
        self._run, self._folder, self._parquet = run, folder, parquet
        # Each thread has its own: a counter is no thing of two.
        self._scrubber, self._packers = Scrubber(environment), Scrubber(environment)
        self._members, left = contents(run, logs=choices.logs, snapshots=choices.snapshots)
        self._left = tuple(left)

    def write(self) -> _Made:
        """Raises LateLine where the record was thinned meanwhile."""
        path = self._folder / "archive.zip"
        packer = Packer(path, self._run.run_id, self._packers)
        with ThreadPoolExecutor(1, "llmtop-pack") as thread:
            packed = deque(thread.submit(packer.add_member, member) for member in self._members)
            try:
                self._add_views(packer, packed, thread)
                if any(map(_is_of_thinned, packer.gone)):
                    raise LateLine
                packer.finish()
            except BaseException:
                for waiting in packed:
                    waiting.cancel()
                thread.shutdown()
                packer.abandon()
                raise
        return _Made(
            path=path,
            sizes=packer.sizes,
            secrets_removed=self._scrubber.count + self._packers.count,
            left_out=self._left,
        )

    def _add_views(self, packer: Packer, packed: deque[Future[None]], thread: ThreadPoolExecutor) -> None:
        """What is made of the record: tables, report, page; then what the archive says of itself."""
        state = read_state(self._run)
        tables = TableWriter(self._folder)
        try:
            history = self._read(tables, packed)
        finally:
            tables.close()
        for table in TABLES:
            csv_path = tables.paths[table.name]
            packed.append(thread.submit(packer.add_file, f"metrics/{table.name}.csv", csv_path))
            if self._parquet:
                packed.append(thread.submit(self._add_parquet, packer, table, csv_path))
        data = page_of(self._run, state, history, self._scrubber)
        for name, content in self._documents(state, data).items():
            packed.append(thread.submit(packer.add_bytes, name, content))
        while packed:
            packed.popleft().result()
        packer.add_bytes("README.txt", readme(packer.sizes, self._left).encode())
        packer.add_bytes("manifest.json", document(self._manifest(state, packer)))

    def _read(self, tables: TableWriter, packed: deque[Future[None]]) -> History:
        builder = HistoryBuilder()
        for batch in RunStream(self._run).batches():
            builder.add(batch)
            tables.add(batch)
            _raise_first(packed)
        return builder.freeze()

    def _documents(self, state: RunState, data: PageData) -> dict[str, bytes]:
        environment = data.environment
        parts = {
            "environment": {
                **msgspec.to_builtins(environment),
                "versions": data.report.versions,
                "gpu": msgspec.to_builtins(data.spec.gpu),
                "topology": msgspec.to_builtins(state.topology),
            },
            "report": data.report,
            "findings": data.report.findings,
            "changes": data.report.changes,
        }
        documents = {
            f"{name}.json": document(self._scrubber.value(msgspec.to_builtins(part)))
            for name, part in parts.items()
        }
        return {
            "report.html": run_page(data).encode("utf-8", "replace"),
            **documents,
            "memory.csv": memory_csv(data).encode(),
        }

    def _add_parquet(self, packer: Packer, table: Table, csv_path: Path) -> None:
        from llmtop.profiler.export.parquet import write_parquet

        path = csv_path.with_suffix(".parquet")
        if write_parquet(table, csv_path, path):
            packer.add_file(f"metrics/{table.name}.parquet", path, stored=True)

    def _manifest(self, state: RunState, packer: Packer) -> Manifest:
        return Manifest(
            run_id=self._run.run_id,
            name=state.name,
            status=state.status,
            host=state.host,
            llmtop_version=state.llmtop_version,
            exported_at=time.time(),
            files=dict(sorted(packer.sizes.items())),
            left_out=self._left,
            secrets_removed=self._scrubber.count + self._packers.count,
        )


def _is_of_thinned(path: Path) -> bool:
    base = base_name(path.name)
    return base is not None and segments_of(path.with_name(base)).until > 0


def _raise_first(packed: deque[Future[None]]) -> None:
    """A full disk is no reason to read on."""
    while packed and packed[0].done():
        packed.popleft().result()


def _has_pyarrow() -> bool:
    return importlib.util.find_spec("pyarrow") is not None


def _require_place(path: Path, *, force: bool) -> None:
    if path.is_dir():
        raise UsageError(f"{path} is a folder", fix=f"name a file in it: --out {path / 'run.llmtop.zip'}")
    require_folder(path)
    if path.exists() and not force:
        raise UsageError(f"{path} is there already", fix="name another file with --out, or say --force")


@contextmanager
def _aside(path: Path) -> Iterator[Path]:
    """A folder of our own beside the archive, gone afterwards; a disk that fails is told in words."""
    folder = path.absolute().parent / f".{path.name}.{os.getpid()}.{random_hex(3)}.new"
    try:
        try:
            folder.mkdir(mode=0o700)
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    except OSError as error:
        raise unwritable(path, error, "name another place: --out FILE") from error
