"""`llmtop serve-metrics`: the runs of this machine for Prometheus."""

from __future__ import annotations

import argparse
import importlib.util
import ipaddress
import threading
from pathlib import Path

from llmtop.presets.errors import ExitCode, UsageError
from llmtop.profiler.record import rundir
from llmtop.profiler.record.rundir import RunDir
from llmtop.tui.commandline.arguments import RUN_HELP
from llmtop.tui.commandline.telling import tell

PORT = 9757


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "run", nargs="?", metavar="RUN", help=f"{RUN_HELP}; by default every run that goes on"
    )
    parser.add_argument("--host", default="127.0.0.1", help="where to listen; by default this machine alone")
    parser.add_argument(
        "--port", type=int, default=PORT, help=f"by default {PORT}; 0: any that is free, which is told"
    )


def run(args: argparse.Namespace) -> ExitCode:
    if importlib.util.find_spec("prometheus_client") is None:
        raise UsageError(
            "serve-metrics needs prometheus-client",
            why="it is not installed",
            fix="pip install 'llmtop-deepspeed[metrics]'",
        )
    if not 0 <= args.port < 1 << 16:
        raise UsageError(f"--port {args.port} is no port", fix="give one from 1 to 65535")
    root = rundir.runs_root()
    only = rundir.find_run(root, args.run) if args.run else None
    _serve(root, only, args.host, args.port)
    return ExitCode.DONE


def _serve(root: Path, only: RunDir | None, host: str, port: int) -> None:
    """Until somebody interrupts it."""
    # Only those who have it can load it.
    from prometheus_client import start_http_server

    from llmtop.profiler.mirrors.openmetrics import registry

    try:
        server, thread = start_http_server(port, host, registry(root, only))
    except OSError as error:
        raise UsageError(
            f"cannot listen on {host}:{port}",
            why=error.strerror or str(error),
            fix="give another --host or --port",
        ) from error
    if not _is_loopback(host):
        tell(
            "warning: whoever reaches this port sees the names and figures of your runs; there is no password"
        )
    tell(f"metrics at http://{host}:{server.server_port}/metrics, until Ctrl-C")
    try:
        threading.Event().wait()
    except KeyboardInterrupt:
        tell("no more metrics")
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
