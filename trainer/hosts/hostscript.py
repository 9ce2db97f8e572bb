"""The part that one host has of a command of the user's own."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping

from llmtop.presets.spec import Script
from llmtop.profiler.record.hosts import HostDir, Hosts
from llmtop.trainer.hosts.scriptcommand import Process, processes
from llmtop.trainer.script.follow import ScriptProgress


class HostScript:
    def __init__(self, run: HostDir, hosts: Hosts, script: Script) -> None:
        self._run, self._hosts, self._script = run, hosts, script
        self._progress = ScriptProgress(run)

    def problem(self, environment: Mapping[str, str]) -> str:
        """Why it cannot be started here; empty where it can. The folder that it runs in is entered."""
        try:
            os.chdir(self._script.folder)
        except OSError as error:
            return f"folder {self._script.folder}, in which the command runs: {error.strerror}"
        program = self._script.command[0]
        if shutil.which(program, path=environment.get("PATH")) is None:
            return f"there is no program {program}"
        return ""

    def processes(self, address: str, port: int) -> list[Process]:
        """What is to be started; all ranks meet at `address`."""
        run = self._run
        return processes(
            self._script.command, self._hosts, run.host, address=address, port=port, folder=run.own_path
        )

    def pids(self, started: dict[int, int]) -> dict[int, int]:
        """Of the ranks that have told of themselves; before one has, of what was `started`."""
        self._progress.poll()
        return self._progress.pids or started
