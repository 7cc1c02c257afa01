"""Makes this process look like one on Windows: what only POSIX has is gone.

Modules of other packages are imported first: they would be refused by what is missing
here, while on Windows they have a form of their own.
"""

from __future__ import annotations

import asyncio
import ctypes
import mmap
import os
import select
import selectors
import signal
import socket
import sys
from contextlib import suppress
from importlib import import_module
from types import SimpleNamespace

POSIX_MODULES = (
    "fcntl",
    "grp",
    "pwd",
    "resource",
    "syslog",
    "termios",
    "tty",
    "uvloop",
)
FRAMEWORKS = ("jax", "torch", "triton")
FOREIGN = """
    click concurrent.futures ctypes.util http.client inl_cpu.library jinja2 jsonschema
    llguidance logging.config msgspec.json multiprocessing numpy opentelemetry.sdk.trace
    platform pluggy prometheus_client rich.console rich.live rich.prompt rich.table
    starlette.applications starlette.testclient tempfile tokenizers typer typer.testing
    urllib.request uvicorn uvicorn.config
"""
MISSING = {
    os: "fork register_at_fork sched_getaffinity sched_setaffinity preadv pread getuid "
    "geteuid getgid fchmod fstatvfs statvfs sysconf uname getloadavg killpg setsid "
    "O_NOFOLLOW O_DIRECTORY O_NONBLOCK O_CLOEXEC O_NOCTTY posix_fadvise sendfile",
    signal: "SIGKILL SIGHUP SIGPROF SIGXCPU SIGUSR1 SIGUSR2 SIGALRM SIGPIPE SIGCHLD "
    "setitimer getitimer pthread_sigmask ITIMER_PROF alarm",
    select: "poll epoll",
    selectors: "PollSelector EpollSelector",
    mmap: "MAP_PRIVATE MAP_ANONYMOUS MAP_SHARED MADV_HUGEPAGE MADV_NOHUGEPAGE",
    socket: "AF_UNIX SO_REUSEPORT",
}


def become_windows():
    """Change this process for the rest of its life; asyncio keeps its own loop."""
    for name in FOREIGN.split():
        with suppress(ImportError):  # an extra that is not installed
            import_module(name)
    asyncio.run(asyncio.sleep(0))
    for module, names in MISSING.items():
        for name in names.split():
            if hasattr(module, name):
                delattr(module, name)
    for name in POSIX_MODULES + FRAMEWORKS:
        sys.modules[name] = None
    refuse = lambda *_: 0  # noqa: E731 - each function of Windows fails
    kernel = SimpleNamespace(
        GetLogicalProcessorInformation=refuse, GlobalMemoryStatusEx=refuse
    )
    ctypes.windll = SimpleNamespace(kernel32=kernel)
    sys.platform = "win32"
