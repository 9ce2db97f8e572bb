"""Several hosts on one machine: network namespaces on a bridge, each with an sshd of its own.

Everything is made for one test and goes with it: keys, addresses that exist nowhere else, processes. What
runs in a namespace sees only the others. Needs root, iproute2 and OpenSSH's server.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path

TIMEOUT_SECONDS = 180.0
_SSHD_PLACES = ("/usr/sbin/sshd", "/usr/local/sbin/sshd")


def sshd() -> str | None:
    """sshd wants to be called by its whole path."""
    return shutil.which("sshd") or next((place for place in _SSHD_PLACES if Path(place).exists()), None)


@cache
def why_not() -> str:
    """Why no lab can be made on this machine; empty where one can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    for program in ("ip", "unshare", "ssh", "ssh-keygen"):
        if shutil.which(program) is None:
            return f"{program} is not installed"
    if sshd() is None:
        return "sshd is not installed (openssh-server)"
    probe = f"llmtop-probe-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True)
    if made.returncode:
        return f"no network namespace can be made: {made.stderr.strip()}"
    mounted = subprocess.run(
        ["ip", "netns", "exec", probe, "unshare", "-m", "true"], capture_output=True, text=True
    )
    subprocess.run(["ip", "netns", "del", probe], check=True)
    return f"no mount namespace can be made: {mounted.stderr.strip()}" if mounted.returncode else ""


class Lab:
    """Hosts `h1`, `h2`, ... and the launching machine `lead`, which has no sshd."""

    def __init__(self, root: Path, hosts: int, *, shared: bool = False) -> None:
        """`shared`: all hosts see the runs of the launching machine; else each has runs of its own alone."""
        self.root = root
        self.shared = shared
        self.names = tuple(f"h{number}" for number in range(1, hosts + 1))
        self.lead_runs = root / "lead-runs"
        self.ssh_config = root / "ssh_config"
        self._tag = f"lt{os.getpid()}"
        self._servers: dict[str, subprocess.Popen[bytes]] = {}

    # --- making and unmaking ------------------------------------------------------------------------

    def __enter__(self) -> Lab:
        try:
            self._make_network()
            self._make_keys()
            for name in self.names:
                self.start_host(name)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        for name in (*self.names, "lead"):
            self.kill_processes(name)
        for name in (*self.names, "lead", "net"):
            subprocess.run(["ip", "netns", "del", self.namespace(name)], capture_output=True)

    def namespace(self, name: str) -> str:
        return f"{self._tag}-{name}"

    def address(self, name: str) -> str:
        number = 100 if name == "lead" else self.names.index(name) + 1
        return f"10.231.77.{number}"

    def runs_of(self, name: str) -> Path:
        return self.lead_runs if self.shared or name == "lead" else self.root / f"{name}-runs"

    def _make_network(self) -> None:
        net = self.namespace("net")
        _do("ip", "netns", "add", net)
        _do("ip", "-n", net, "link", "add", "bridge", "type", "bridge")
        _do("ip", "-n", net, "link", "set", "bridge", "up")
        for name in (*self.names, "lead"):
            space = self.namespace(name)
            _do("ip", "netns", "add", space)
            _do("ip", "-n", net, "link", "add", name, "type", "veth", "peer", "eth0", "netns", space)
            _do("ip", "-n", net, "link", "set", name, "master", "bridge", "up")
            _do("ip", "-n", space, "addr", "add", f"{self.address(name)}/24", "dev", "eth0")
            _do("ip", "-n", space, "link", "set", "eth0", "up")
            _do("ip", "-n", space, "link", "set", "lo", "up")
            self.runs_of(name).mkdir(parents=True, exist_ok=True)

    def _make_keys(self) -> None:
        for name in ("host_key", "user_key"):
            _do("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self.root / name))
        shutil.copy(self.root / "user_key.pub", self.root / "authorized_keys")
        public = " ".join((self.root / "host_key.pub").read_text().split()[:2])
        known = "".join(f"{self.address(name)} {public}\n" for name in self.names)
        (self.root / "known_hosts").write_text(known)
        everywhere = (
            f"Host *\n User {_user()}\n IdentityFile {self.root / 'user_key'}\n IdentitiesOnly yes\n"
            f" UserKnownHostsFile {self.root / 'known_hosts'}\n StrictHostKeyChecking yes\n"
        )
        hosts = "".join(f"Host {name}\n HostName {self.address(name)}\n" for name in self.names)
        self.ssh_config.write_text(hosts + everywhere)

    def start_host(self, name: str) -> None:
        """Its sshd, which is all that a host needs to have running."""
        config = self.root / f"{name}-sshd_config"
        config.write_text(
            f"ListenAddress {self.address(name)}\nHostKey {self.root / 'host_key'}\n"
            f"AuthorizedKeysFile {self.root / 'authorized_keys'}\nStrictModes no\nUsePAM no\nPidFile none\n"
            "PasswordAuthentication no\nKbdInteractiveAuthentication no\nPermitRootLogin prohibit-password\n"
            f"SetEnv LLMTOP_RUNS_DIR={self.runs_of(name)}\n"
        )
        Path("/run/sshd").mkdir(parents=True, exist_ok=True)
        hide = "" if self.shared else f"mount -t tmpfs none {self.lead_runs} && "
        server = sshd()
        assert server is not None
        with (self.root / f"{name}-sshd.log").open("ab") as log:
            self._servers[name] = subprocess.Popen(
                self.inside(name, ["unshare", "-m", "sh", "-c", f"{hide}exec {server} -D -e -f {config}"]),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        wait_for(lambda: "listening" in (self.root / f"{name}-sshd.log").read_text().lower())

    def hide(self, name: str, folder: Path) -> None:
        """A folder of this machine that the host has not got."""
        server = self._servers[name]
        inside = ["nsenter", "--mount", f"--target={server.pid}", "mount", "-t", "tmpfs", "none", str(folder)]
        _do(*inside)

    # --- using it -----------------------------------------------------------------------------------

    def inside(self, name: str, command: Sequence[str]) -> list[str]:
        return ["ip", "netns", "exec", self.namespace(name), *command]

    @property
    def environment(self) -> dict[str, str]:
        """Of what runs on the launching machine."""
        return {
            **os.environ,
            "LLMTOP_RUNS_DIR": str(self.lead_runs),
            "LLMTOP_SSH_OPTIONS": f"-F {self.ssh_config}",
        }

    def hostfile(self, slots: int | Sequence[int] = 1, names: Sequence[str] = ()) -> Path:
        """Of all hosts, or these, with as many slots each, or each with its own number."""
        path = self.root / "hostfile"
        named = names or self.names
        counts = [slots] * len(named) if isinstance(slots, int) else slots
        path.write_text("".join(f"{name} slots={n}\n" for name, n in zip(named, counts, strict=True)))
        return path

    def llmtop(
        self, *words: str, check: bool = True, variables: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """A command on the launching machine."""
        done = subprocess.run(
            self.inside("lead", [sys.executable, "-m", "llmtop.tui.cli", *words]),
            env={**self.environment, **(variables or {})},
            capture_output=True,
            text=True,
            timeout=TIMEOUT_SECONDS,
        )
        assert not check or done.returncode == 0, (done.stdout, done.stderr)
        return done

    def pull_cable(self, name: str) -> None:
        _do("ip", "-n", self.namespace("net"), "link", "set", name, "down")

    def plug_in(self, name: str) -> None:
        _do("ip", "-n", self.namespace("net"), "link", "set", name, "up")

    def processes(self, name: str) -> list[int]:
        """All that run on a host, its sshd among them."""
        told = subprocess.run(
            ["ip", "netns", "pids", self.namespace(name)], capture_output=True, text=True
        ).stdout
        return [int(word) for word in told.split()]

    def kill_processes(self, name: str) -> None:
        """As a power cut does, but for the network: a peer may see connections close."""
        server = self._servers.pop(name, None)
        for pid in self.processes(name):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        if server is not None:
            server.wait()


@contextmanager
def lab(root: Path, hosts: int, *, shared: bool = False) -> Iterator[Lab]:
    with Lab(root, hosts, shared=shared) as made:
        yield made


def wait_for(condition: Callable[[], object], told: Callable[[], object] = lambda: "") -> None:
    end = time.monotonic() + TIMEOUT_SECONDS
    while not condition():
        assert time.monotonic() < end, told()
        time.sleep(0.02)


def _do(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, (words, done.stderr)


def _user() -> str:
    import pwd

    return pwd.getpwuid(os.getuid()).pw_name
