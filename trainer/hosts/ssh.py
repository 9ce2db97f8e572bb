"""The command that reaches a host: the system's OpenSSH client, with the person's own configuration."""

from __future__ import annotations

import os
import shlex
import shutil

from llmtop.presets.errors import UsageError
from llmtop.trainer.hosts.farprogram import far_program as far_program
from llmtop.trainer.hosts.hostfile import require_host_name

VARIABLE = "LLMTOP_SSH_OPTIONS"
"""Words for ssh ahead of its own, as `-F FILE`."""
OPTIONS = (
    # A question has nobody to answer it.
    "BatchMode=yes",
    # A connection that says nothing for 15 s is lost.
    "ServerAliveInterval=5",
    "ServerAliveCountMax=3",
    "ConnectTimeout=10",
    "ForwardX11=no",
    "ClearAllForwardings=yes",
)
_BEGIN = (
    "import os,sys\n"
    "n,b=int(sys.argv[1]),b''\n"
    "while len(b)<n:\n"
    " c=os.read(0,n-len(b))\n"
    " if not c: sys.exit(1)\n"
    " b+=c\n"
    "exec(compile(b,'llmtop-link','exec'))\n"
)


def given_options() -> list[str]:
    """The person's words for ssh."""
    return shlex.split(os.environ.get(VARIABLE, ""))


def link_command(host: str, python: str) -> list[str]:
    """A command whose standard input takes `far_program` and then messages.

    Raises UsageError without ssh, or for a name that it would not take for
    that of a host.
    """
    require_host_name(host, "host")
    ssh = shutil.which("ssh")
    if ssh is None:
        raise UsageError("ssh is not on the PATH", fix="install the OpenSSH client")
    set_options = [word for option in OPTIONS for word in ("-o", option)]
    far = shlex.join([python, "-c", _BEGIN, str(len(far_program()))])
    return [ssh, *given_options(), *set_options, "-T", "--", host, far]
