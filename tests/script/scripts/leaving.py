"""How scripts of several ranks end here."""

import atexit
import os
import sys
from typing import NoReturn

import torch


def leave() -> NoReturn:
    """End together, and without the interpreter's clean-up, in which gloo's threads abort one process of
    thirty."""
    if torch.distributed.is_initialized():
        # A rank that ends while another's collective is not over may be aborted by gloo, as that one may.
        torch.distributed.barrier()
    atexit._run_exitfuncs()  # the record of the rank's end is written there
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
