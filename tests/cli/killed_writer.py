"""Stands for the process that writes weights, on a machine where the kernel ends it for memory."""

import os
import signal
import sys

sys.stdin.buffer.read()
os.kill(os.getpid(), signal.SIGKILL)
