"""The table of faults: what is done to runs, what has to hold, and the tests that show it."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from msgspec import Struct

_TOP = Path(__file__).parents[2]


class Fault(Struct, frozen=True):
    name: str
    holds: str
    tests: tuple[str, ...]
    """A file, or one test in it."""
    parts: tuple[str, ...] = ()
    """Of the benchmark, whose rows belong to it as well."""


_SUPERVISE = "tests/trainer/test_supervise.py"
_DISK = "tests/faults/test_disk.py"
_DRIVER = "tests/faults/test_driver.py"
_STILL = "tests/faults/test_standing_still.py"
_REAL = "tests/faults/test_real_ranks.py"

FAULTS: tuple[Fault, ...] = (
    Fault(
        "SIGKILL of the viewer, the supervisor or a rank, at random moments",
        "with the viewer nothing else ends; with the supervisor its ranks end and the run is told lost;"
        " a killed"
        " rank is named with the signal; no process is left, the record opens, every checkpoint that was"
        " reported is whole, and a run that is resumed goes on from it",
        (
            f"{_REAL}::test_kills_at_random_moments_leave_sound_runs",
            f"{_SUPERVISE}::test_a_killed_rank_is_named_with_its_signal",
            f"{_SUPERVISE}::test_a_killed_supervisor_takes_its_ranks_along",
            "tests/e2e/test_e2e_viewer_dies.py",
        ),
        ("kills by time", "kills"),
    ),
    Fault(
        "Power cut: copies at random moments, logs cut at random bytes, files cut, empty or missing",
        "every run opens in every view; each log loses the line that was torn and no other that is there; no"
        " checkpoint that was reported is unreadable; a file without which there is no run is named",
        (
            f"{_REAL}::test_copies_at_random_moments_are_sound_runs",
            "tests/faults/test_powercut.py",
            "tests/worker/test_lasting.py",
        ),
        ("power cuts",),
    ),
    Fault(
        "Disk full while logs are written",
        "training goes on; monitor, `attach --headless` and findings say that nothing is recorded;"
        " events wait"
        " in memory and are written in their order when there is room",
        (
            f"{_DISK}::test_what_has_no_room_waits_and_is_written_in_its_order",
            f"{_DISK}::test_more_than_can_wait_is_counted",
            f"{_DISK}::test_the_log_of_a_supervisor_waits_within_the_same_bound",
            f"{_DISK}::test_an_end_that_waits_is_the_last_line",
            f"{_DISK}::test_samples_of_the_hardware_wait_too",
            f"{_DISK}::test_what_a_rank_prints_is_left_out_and_raises_nothing",
            f"{_DISK}::test_a_run_goes_on_while_its_disk_is_full",
            f"{_SUPERVISE}::test_training_goes_on_while_the_disk_is_full",
            f"{_SUPERVISE}::test_an_end_on_a_full_disk_is_written_once_there_is_room",
        ),
    ),
    Fault(
        "Disk full when a checkpoint is due",
        "it is refused with the reason, the ones before stay whole, the next one that fits is saved",
        (f"{_REAL}::test_a_checkpoint_without_room_is_refused_and_the_next_one_saved",),
    ),
    Fault(
        "Disk full while a run is exported",
        "the export fails with the reason and leaves nothing; an archive that was there stays whole",
        (f"{_DISK}::test_an_export_without_room_says_so_and_leaves_nothing",),
    ),
    Fault(
        "Read-only file system",
        "runs on it are listed, reported and shown; starting one is refused with the reason",
        (f"{_DISK}::test_a_run_on_a_read_only_disk_is_seen_and_not_started",),
    ),
    Fault(
        "A file system that stands still (fsfreeze)",
        "readers do not wait for it; writers go on where they were, and no step is missing",
        (f"{_DISK}::test_writing_goes_on_when_a_disk_stood_still",),
    ),
    Fault(
        "No open file, no process is to be had any more (EMFILE, ENFILE, EAGAIN)",
        "the training goes on; requests and samples wait until there is one; ranks are ended all the same",
        ("tests/faults/test_limits.py",),
    ),
    Fault(
        "The wall clock jumps by an hour, a day, a year, ahead or back",
        "no event is lost, steps stay in order in live view, bookmark, report and replay; waiting is"
        " counted by"
        " the monotonic clock",
        ("tests/faults/test_clock.py",),
    ),
    Fault(
        "PID reuse",
        "a process that was given the number of a supervisor or a rank is not taken for it",
        (
            "tests/profiler/test_rundir.py::test_a_reused_pid_is_not_life",
            "tests/script/test_script_supervisor.py::"
            "test_its_stacks_are_taken_and_a_later_process_of_its_number_is_none_of_it",
        ),
    ),
    Fault(
        "NVML missing, or failing in the middle of a run",
        "readings become n/a, the rest of the sample goes on, and so does the training",
        (
            f"{_DRIVER}::test_no_driver_at_all",
            f"{_DRIVER}::test_every_call_fails_from_some_time_on",
            f"{_DRIVER}::test_the_binding_breaks_in_a_way_that_nobody_foresaw",
            f"{_DRIVER}::test_the_binding_is_broken_from_the_start",
        ),
    ),
    Fault(
        "The driver hangs in a call, or when it is opened, and never answers",
        "nobody waits for it: its readings are n/a, which is told, the rest is read on; the training starts,"
        " goes on and is ended by a stop; once it answers it is read again. A command that looks at the GPUs"
        " is told after 30 s, and at once while it still hangs; no plan takes the machine for one"
        " without GPUs, and which GPUs a script has that was launched meanwhile is told, and what is seen of"
        " it predicted, once it answers",
        (
            f"{_DRIVER}::test_a_driver_that_hangs_holds_up_neither_the_run_nor_its_stop",
            f"{_DRIVER}::test_a_driver_that_hangs_when_it_is_opened_holds_up_no_rank",
            f"{_DRIVER}::test_who_reads_the_gpus_once_is_told_that_the_driver_hangs",
            f"{_DRIVER}::test_a_driver_that_hangs_while_it_is_read_is_asked_by_one_thread",
            f"{_DRIVER}::test_a_plan_takes_no_machine_whose_driver_hangs_for_one_without_gpus",
            "tests/script/test_script_supervisor.py"
            "::test_what_was_seen_while_the_driver_hung_is_predicted_once_it_answers",
            "tests/script/test_script_supervisor.py"
            "::test_which_gpus_there_are_is_told_once_a_slow_driver_answers",
        ),
    ),
    Fault(
        "A GPU falls off the bus (Xid 79)",
        "the Xid is in the record, the device is shown as lost, two critical findings; a run that fails by it"
        " names it",
        (
            f"{_DRIVER}::test_a_gpu_that_falls_off_the_bus_is_told_while_the_run_goes_on",
            "tests/trainer/test_supervise_gpus.py::test_an_xid_is_written_found_and_named_in_the_end",
        ),
    ),
    Fault(
        "A GPU in parts (MIG)",
        "what the driver tells of it is shown, the rest is n/a",
        (f"{_DRIVER}::test_a_gpu_in_parts_tells_what_it_can",),
    ),
    Fault(
        "A rank hangs in a collective",
        "the hang is suspected and told with what to do; when it goes on, so does the run; a stop ends it",
        (
            f"{_REAL}::test_a_rank_that_hangs_in_a_collective_is_suspected_and_goes_on",
            f"{_SUPERVISE}::test_a_hang_is_suspected_once_and_forgotten_when_steps_go_on",
        ),
    ),
    Fault(
        "A second viewer, and twenty",
        "all see the same state; the training goes on",
        ("tests/faults/test_viewers.py",),
    ),
    Fault(
        "A second supervisor for a run",
        "is refused",
        (f"{_SUPERVISE}::test_a_second_supervisor_is_refused",),
    ),
    Fault(
        "The folder of a live run is removed, or files of it",
        "the run ends within seconds instead of training on where nobody finds it; viewers say that it"
        " is gone. The file that says who supervises it, and the folder of requests, are put back",
        ("tests/faults/test_folder_gone.py",),
    ),
    Fault(
        "SIGHUP, the terminal torn away, tmux kill-server, SIGTERM for the viewer",
        "the training goes on; an app that is told to end gives the terminal back",
        (
            f"{_STILL}::test_a_hangup_of_supervisor_and_ranks_changes_nothing",
            "tests/e2e/test_e2e_hangup.py",
            "tests/faults/test_tmux_killed.py",
        ),
    ),
    Fault(
        "SIGSTOP and SIGCONT",
        "ranks go on without their supervisor, requests are answered when it is back; a rank that stands"
        " still"
        " is ended by a stop",
        (
            f"{_STILL}::test_ranks_go_on_while_their_supervisor_stands_still",
            f"{_STILL}::test_a_rank_that_stands_still_is_ended_by_a_stop",
        ),
    ),
    Fault(
        "Stop with ranks, children and orphans that ignore every signal they can",
        "TERM after 4 s, KILL after 7 s, nothing is left, also not in other sessions; NVML shows the memory"
        " back; what does not come back is named. On an H200 it was back 1.2 s after `stop` of ranks that"
        " listen, 7.7 s of deaf ones, 7.6 s of stopped ones (`tests/worker/test_stop_gpu.py`)",
        ("tests/trainer/test_stop_proof.py",),
    ),
    Fault(
        "Logs that are cut or damaged while they are written and read",
        "the viewer shows what is there and reads on; a thinned file without its last line keeps nobody",
        (
            "tests/profiler/test_eventlog.py::test_a_log_that_is_cut_behind_its_writer_is_read_on",
            "tests/profiler/test_segments.py::test_a_thinned_file_with_a_damaged_end_keeps_nobody",
            "tests/profiler/test_segments.py::test_a_log_whose_thinned_file_is_damaged_is_thinned_on",
        ),
    ),
    Fault(
        "A record of weeks",
        "logs go on in other files and are thinned: 64 MiB each and what comes in half a minute; every view"
        " reads across, no sum changes",
        ("tests/profiler/test_segments.py",),
        ("soak", "real steps"),
    ),
)


def run_tests() -> Iterator[dict[str, Any]]:
    """A row for each fault: how its tests ended here. Each file runs once, two at a time."""
    chosen = {test for fault in FAULTS for test in fault.tests}
    # A file that is named as a whole has the single ones in it too.
    chosen -= {test for test in chosen if "::" in test and test.partition("::")[0] in chosen}
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-n", "2", "--dist", "loadfile"]
        options = ["-p", "no:cacheprovider", f"--junitxml={report}", "-o", "junit_family=xunit1"]
        subprocess.run(
            [*command, *options, *sorted(chosen)], cwd=_TOP, stdout=subprocess.DEVNULL, check=False
        )
        cases = list(ElementTree.parse(report).getroot().iter("testcase")) if report.exists() else []
    for fault in FAULTS:
        own = [case for case in cases if any(_is_of(case, test) for test in fault.tests)]
        yield {"figure": fault.name, **_counted(own), "seconds": round(sum(map(_seconds, own)), 1)}


def _is_of(case: ElementTree.Element, test: str) -> bool:
    path, _, name = test.partition("::")
    found = str(case.get("name")).partition("[")[0]
    return str(case.get("classname")) == path.removesuffix(".py").replace("/", ".") and name in ("", found)


def _seconds(case: ElementTree.Element) -> float:
    return float(case.get("time") or 0.0)


def _counted(cases: list[ElementTree.Element]) -> dict[str, Any]:
    if not cases:
        return {"passed": 0, "problems": ["its tests did not run"], "skipped": []}
    failed = [str(case.get("name")) for case in cases if case.find("failure") is not None]
    failed += [f"{case.get('name')} (set-up)" for case in cases if case.find("error") is not None]
    skipped: list[str] = []
    for case in cases:
        skip = case.find("skipped")
        if skip is not None:
            skipped.append(f"{case.get('name')}: {(skip.get('message') or '')[:120]}")
    return {
        "passed": len(cases) - len(failed) - len(skipped),
        "problems": failed,
        "skipped": skipped,
    }
