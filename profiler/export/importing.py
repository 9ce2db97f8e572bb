"""`llmtop import-run`: an archive as a run that can be looked at. What it says is not trusted.

All is checked before anything is written: names, sizes, checksums and the documents that every view reads.
Then it is unpacked aside and renamed. The run is marked: nothing supervises it, it takes no requests and is
not gone on with.
"""

from __future__ import annotations

import io
import re
import shutil
import stat
import struct
import time
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

import msgspec
from msgspec import Struct

from llmtop.presets.errors import LlmtopError, UsageError
from llmtop.presets.foreign import decode_json, open_regular, why_unreadable
from llmtop.presets.spec import RunSpec
from llmtop.profiler.export.contents import LONGEST_NAME_BYTES, OF_A_LIVE_RUN, name_problem
from llmtop.profiler.export.manifest import FORMAT, FORMAT_VERSION, MANIFEST, Manifest
from llmtop.profiler.memory.result import Prediction
from llmtop.profiler.record.imported import Imported
from llmtop.profiler.record.rundir import InForce, RunDir
from llmtop.profiler.record.wholefile import document, random_hex, sync_folder, write_atomic
from llmtop.profiler.units import counted, format_bytes

LIMIT_BYTES = 16 << 30
"""What an archive may come to when it is unpacked, unless somebody allows more."""
MOST_FILES = 20_000
_CHUNK_BYTES = 1 << 20
_LONGEST_READ_BYTES = 8 << 20
"""zipfile reads the list of members at once, and makes some hundred bytes of each 46; the rest in chunks."""
_DOCUMENT_BYTES = 64 << 20
_NEVER = OF_A_LIVE_RUN | {"checkpoints"}
"""No export holds these: they would say that something of the run lives here, or elsewhere."""
_BOMB_BYTES, _MOST_TIMES = 256 << 20, 200
"""What comes to more than so many bytes, and so many times what it has packed, is none of a run: logs come to
ten times, the longest line again and again to some hundred."""
_METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
_ENCRYPTED = 0x1
_KINDS: dict[str, type[Any]] = {"spec.json": RunSpec, "prediction.json": Prediction}
"""Read by every view; those of each setting too."""
_IN_FORCE = "in-force.json"
_NAME = re.compile(rf"[A-Za-z0-9][A-Za-z0-9._-]{{0,{LONGEST_NAME_BYTES - 41}}}")
_GIVE = "give the file that llmtop export wrote"
_FIX = "export the run again: llmtop export RUN"
_T = TypeVar("_T")


class _Plan(Struct, frozen=True, kw_only=True):
    """Members by their name within the run, all of them checked."""

    manifest: Manifest
    members: dict[str, str]
    size_bytes: int


def import_run(
    archive: Path, root: Path, *, name: str | None = None, limit_bytes: int | None = None
) -> RunDir:
    """Unpack an archive under `root`, as `name` or as it was called; of at most `limit_bytes`, by default
    `LIMIT_BYTES` of what is packed as a run is.

    Raises LlmtopError for a file that is no archive of a run, is damaged or larger than allowed, and where it
    cannot be unpacked; then nothing has been written, or nothing of it is left.
    """
    try:
        with _opened(archive) as opened:
            plan = _checked(opened, archive, limit_bytes)
            return _unpacked(opened, plan, archive, root, _run_id(plan.manifest, name))
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, ValueError, struct.error) as error:
        raise _damaged(archive, str(error)) from error
    except OSError as error:
        raise LlmtopError(f"{archive} cannot be read", why=error.strerror or str(error)) from error


class _Bounded(io.FileIO):
    """A file whose list of members is read only while it is no longer than that of a run can be."""

    def read(self, size: int | None = -1, /) -> bytes:
        if size is not None and size > _LONGEST_READ_BYTES:
            raise zipfile.BadZipFile("its list of files is longer than that of any run")
        return super().read(size)

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        if whence == io.SEEK_SET and offset < 0:
            raise zipfile.BadZipFile("a file in it is said to begin before the archive")
        return super().seek(offset, whence)


@contextmanager
def _opened(archive: Path) -> Iterator[zipfile.ZipFile]:
    try:
        descriptor = open_regular(archive)
    except FileNotFoundError as error:
        raise UsageError(
            f"there is no file {archive}", fix="give the file that llmtop export wrote"
        ) from error
    except OSError as error:
        raise UsageError(
            f"{archive} cannot be read",
            why=why_unreadable(error),
            fix="give the file that llmtop export wrote",
        ) from error
    with _Bounded(descriptor) as file, zipfile.ZipFile(file) as opened:
        yield opened


def _checked(opened: zipfile.ZipFile, archive: Path, limit_bytes: int | None) -> _Plan:
    entries = [entry for entry in opened.infolist() if not entry.is_dir()]
    if len(entries) > MOST_FILES:
        why = f"it holds {counted(len(entries), 'file')}, and no more than {MOST_FILES:,} are taken"
        raise LlmtopError(f"{archive} is not unpacked", why=why, fix=_FIX)
    size = sum(entry.file_size for entry in entries)
    # Not what the members say of themselves: several may be of the same bytes.
    if problem := _too_large(size, archive.stat().st_size, limit_bytes):
        raise LlmtopError(
            f"{archive} is not unpacked", why=problem, fix="if you trust it, allow more: --limit GIB"
        )
    members: dict[str, str] = {}
    roots: set[str] = set()
    folded: set[str] = set()
    """A file system may take two names for one."""
    for entry in entries:
        if problem := _problem(entry):
            raise _refused(archive, entry.filename, problem)
        root, _, name = entry.filename.partition("/")
        if name.casefold() in folded:
            raise _refused(archive, entry.filename, "it is there twice")
        roots.add(root)
        folded.add(name.casefold())
        members[name] = entry.filename
    if MANIFEST not in members or len(roots) != 1:
        raise LlmtopError(
            f"{archive} is no exported run", why=f"it holds no {MANIFEST}", fix="give a file of llmtop export"
        )
    manifest = _document(opened, members[MANIFEST], Manifest, archive)
    _require_known(manifest, archive)
    for name, member in members.items():
        if name != MANIFEST and manifest.files.get(name) != opened.getinfo(member).file_size:
            raise _refused(archive, member, f"{MANIFEST} tells of no such file, or of another size")
    _require_documents(opened, members, manifest, archive)
    _require_whole(opened, entries)
    return _Plan(manifest=manifest, members=members, size_bytes=size)


def _too_large(size_bytes: int, packed_bytes: int, limit_bytes: int | None) -> str:
    allowed = LIMIT_BYTES if limit_bytes is None else limit_bytes
    if size_bytes > allowed:
        return f"it comes to {format_bytes(size_bytes)}, and {format_bytes(allowed)} are allowed"
    if limit_bytes is None and size_bytes > max(_BOMB_BYTES, _MOST_TIMES * packed_bytes):
        return f"{format_bytes(packed_bytes)} come to {format_bytes(size_bytes)}, as those of no run do"
    return ""


def _problem(entry: zipfile.ZipInfo) -> str:
    """Why a member is not taken; empty for one that is. The whole archive is then refused."""
    # A NUL and what is behind it zipfile has cut off; `orig_filename` still has it.
    if entry.filename != entry.orig_filename:
        return "its name has characters that no export writes"
    folder, _, name = entry.filename.partition("/")
    if problem := name_problem(name) or name_problem(folder):
        return problem
    if name.partition("/")[0] in _NEVER:
        return "no export holds such a file"
    mode = entry.external_attr >> 16
    if mode and stat.S_IFMT(mode) not in (0, stat.S_IFREG):
        return "it is a link or no regular file"
    if entry.flag_bits & _ENCRYPTED or entry.compress_type not in _METHODS:
        return "it is packed as no export packs"
    return ""


def _require_known(manifest: Manifest, archive: Path) -> None:
    if manifest.format != FORMAT:
        raise LlmtopError(f"{archive} is no exported run", why=f"it says that it is '{manifest.format}'")
    if manifest.format_version > FORMAT_VERSION:
        raise LlmtopError(
            f"{archive} is of a newer llmtop",
            why=f"its format is {manifest.format_version}, and this one knows {FORMAT_VERSION}",
            fix="update llmtop",
        )


def _require_documents(
    opened: zipfile.ZipFile, members: dict[str, str], manifest: Manifest, archive: Path
) -> None:
    """Every file that the manifest names is there, and what views read first can be read."""
    for name in (*_KINDS, *manifest.files):
        if name not in members:
            raise _damaged(archive, f"{name} is missing")
    for name, member in members.items():
        of_setting = name.startswith("settings/")
        kind = _KINDS.get(PurePosixPath(name).name if of_setting else name)
        if kind is not None:
            _document(opened, member, kind, archive)
    if _IN_FORCE in members:
        number = _document(opened, members[_IN_FORCE], InForce, archive).setting
        if number and f"settings/{number}/spec.json" not in members:
            raise _damaged(archive, f"the setting {number}, which is in force, is missing")


def _require_whole(opened: zipfile.ZipFile, entries: list[zipfile.ZipInfo]) -> None:
    """Read everything once: checksums are right, and nothing comes to more than it says."""
    for entry in entries:
        with opened.open(entry) as source:
            while source.read(_CHUNK_BYTES):
                pass


def _document(opened: zipfile.ZipFile, name: str, kind: type[_T], archive: Path) -> _T:
    if opened.getinfo(name).file_size > _DOCUMENT_BYTES:
        raise _damaged(archive, f"{name} is larger than any such file")
    try:
        return decode_json(opened.read(name), kind)
    except msgspec.MsgspecError as error:
        raise _damaged(archive, f"{name}: {error}") from error


def _run_id(manifest: Manifest, name: str | None) -> str:
    chosen = manifest.run_id if name is None else name
    if not _NAME.fullmatch(chosen):
        raise UsageError(
            f"'{chosen[:80]}' is no name of a run",
            why="it is made of letters, digits, '.', '_' and '-', and begins with a letter or digit",
            fix="give another one: --name NAME",
        )
    return chosen


def _unpacked(opened: zipfile.ZipFile, plan: _Plan, archive: Path, root: Path, run_id: str) -> RunDir:
    final = root / run_id
    if final.exists():
        raise UsageError(
            f"there is a run {run_id} already", why=f"in {root}", fix="give another name: --name NAME"
        )
    try:
        root.mkdir(parents=True, exist_ok=True, mode=0o700)
        free = shutil.disk_usage(root).free
        if plan.size_bytes > free:
            raise LlmtopError(
                f"{archive} does not fit in {root}",
                why=f"it comes to {format_bytes(plan.size_bytes)}, and {format_bytes(free)} are free",
                fix="free some space, or set LLMTOP_RUNS_DIR to another folder",
            )
        _write(opened, plan, archive, final)
    except OSError as error:
        raise LlmtopError(
            f"{archive} cannot be unpacked to {root}",
            why=error.strerror or str(error),
            fix="make the folder writable, free some space, or set LLMTOP_RUNS_DIR to another folder",
        ) from error
    return RunDir.open(final)


def _write(opened: zipfile.ZipFile, plan: _Plan, archive: Path, final: Path) -> None:
    aside = final.with_name(f".{final.name}.{random_hex(3)}.new")
    aside.mkdir(mode=0o700)
    try:
        for name, member in plan.members.items():
            path = aside / name
            _make_private(path.parent, aside)
            with opened.open(member) as source, path.open("xb") as target:
                shutil.copyfileobj(source, target, _CHUNK_BYTES)
            path.chmod(0o600)
        _mark(RunDir(aside), plan.manifest, archive)
        RunDir.open(aside).prediction()
        aside.rename(final)
        sync_folder(final.parent)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise


def _make_private(folder: Path, root: Path) -> None:
    """One by one below the root: a mode given with parents is that of the last alone."""
    for parent in reversed([folder, *folder.parents]):
        if root in parent.parents:
            parent.mkdir(mode=0o700, exist_ok=True)


def _mark(run: RunDir, manifest: Manifest, archive: Path) -> None:
    imported = Imported(
        archive=str(archive.absolute()),
        run_id=manifest.run_id,
        host=manifest.host,
        status=manifest.status,
        exported_at=manifest.exported_at,
        imported_at=time.time(),
    )
    write_atomic(run.imported_path, document(imported))


def _refused(archive: Path, member: str, why: str) -> LlmtopError:
    return LlmtopError(
        f"{archive} is not unpacked",
        why=f"{member!r}: {why}",
        fix="take it from somebody you trust; an archive of llmtop export holds no such thing",
    )


def _damaged(archive: Path, why: str) -> LlmtopError:
    return LlmtopError(f"{archive} is damaged, or no exported run", why=why, fix=_FIX)
