"""Tests of the transport of NIXL."""

import os
import sys

from needed_packages import needing

pytest_pycollect_makemodule = needing("nixl", "inl_nixl")
status = 0


def pytest_sessionfinish(exitstatus):
    global status
    status = int(exitstatus)


def pytest_unconfigure():
    """End here: a library of NIXL 1.5 crashes when the process unloads it."""
    if "nixl" in sys.modules:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
