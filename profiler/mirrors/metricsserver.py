"""Serves metrics over HTTP: to this machine as it is, to others only for a token.

On an address that others reach, whoever asks has to send `Authorization: Bearer TOKEN`, as Prometheus does
from its `credentials_file`. On the loopback interface a page in a browser is no reader either: it can be made
to ask there under a name of its own (DNS rebinding), and then names that in `Host`.
"""

from __future__ import annotations

import hmac
import ipaddress
import secrets
import socket
import stat
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from llmtop.presets.errors import UsageError
from llmtop.presets.foreign import read_bytes, why_unreadable
from llmtop.profiler.record.wholefile import write_atomic

_TOKEN_BYTES = 32
_SHORTEST_TOKEN = 16
_LARGEST_FILE_BYTES = 4096
_READ_BY_OTHERS = stat.S_IRWXG | stat.S_IRWXO

Start = Callable[..., Any]
App = Callable[[dict[str, Any], Start], Iterable[bytes]]


_MOST_AT_ONCE = 64
"""Who only connects and asks nothing takes threads and files of this process, and needs no token for it."""


class MetricsServer(ThreadingMixIn, WSGIServer):
    """A thread for each who asks; whoever comes while there are too many is sent away."""

    daemon_threads = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._places = threading.BoundedSemaphore(_MOST_AT_ONCE)

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._places.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._places.release()


class _Quiet(WSGIRequestHandler):
    timeout = 10
    """Seconds that one who has connected may take to ask."""

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 (the library's name)
        """Nothing: what is asked is no news."""


def is_loopback(host: str) -> bool:
    """Whether only processes of this machine reach an address to listen on."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def default_token_path(runs_root: Path) -> Path:
    """Beside the runs."""
    return runs_root.parent / "metrics-token"


def token_of(path: Path, *, make: bool) -> str:
    """The token in a file; `make` writes one where there is none. Raises UsageError.

    The file is one's own, and nobody else may read it.
    """
    try:
        if make and not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            write_atomic(path, secrets.token_urlsafe(_TOKEN_BYTES).encode() + b"\n")
        token = read_bytes(path, _LARGEST_FILE_BYTES, own=True).decode("ascii").strip()
        mode = path.stat().st_mode
    except OSError as error:
        raise UsageError(
            f"the token in {path} cannot be read", why=why_unreadable(error), fix="give another --token-file"
        ) from error
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} holds no token", why="it is no ASCII", fix=_how_to_make(path)) from error
    if mode & _READ_BY_OTHERS:
        raise UsageError(
            f"the token in {path} is no secret", why="others may read the file", fix=f"chmod 600 {path}"
        )
    if len(token) < _SHORTEST_TOKEN or not token.isprintable() or " " in token:
        why = f"it is one word of at least {_SHORTEST_TOKEN} characters"
        raise UsageError(f"{path} holds no token", why=why, fix=_how_to_make(path))
    return token


def _how_to_make(path: Path) -> str:
    return f"remove it, and llmtop makes one; or: openssl rand -hex 32 > {path}"


def start_server(app: App, host: str, port: int, token: str | None) -> MetricsServer:
    """A server that listens; the caller has it serve. Raises OSError where it cannot."""
    family, *_, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]

    class Server(MetricsServer):
        address_family = family

    return make_server(
        str(place[0]), port, guarded(app, token, is_loopback(host)), Server, handler_class=_Quiet
    )


def guarded(app: App, token: str | None, on_loopback: bool) -> App:
    """The same application for those who may ask."""

    def ask(environ: dict[str, Any], start: Start) -> Iterable[bytes]:
        if token is not None:
            told = str(environ.get("HTTP_AUTHORIZATION", "")).encode("utf-8", "replace")
            if not hmac.compare_digest(told, f"Bearer {token}".encode()):
                return _refused(start, "401 Unauthorized", ("WWW-Authenticate", "Bearer"))
        elif on_loopback and not _names_loopback(str(environ.get("HTTP_HOST", ""))):
            return _refused(start, "403 Forbidden")
        return app(environ, start)

    return ask


def _refused(start: Start, status: str, *headers: tuple[str, str]) -> Iterable[bytes]:
    start(status, [("Content-Type", "text/plain"), *headers])
    return [status.encode() + b"\n"]


def _names_loopback(host: str) -> bool:
    """Of the header `Host`, which may be left out by whoever is no browser."""
    name = host.rpartition(":")[0] if host.rpartition(":")[2].isdigit() and not host.endswith("]") else host
    return not host or is_loopback(name)
