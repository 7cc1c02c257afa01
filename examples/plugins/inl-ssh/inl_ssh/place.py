"""Starts a worker on another host, which connects back through the tunnel of ssh."""

import os
import shlex
import subprocess
import tempfile


class Remote:
    """The ssh command; its end is that of the worker."""

    def __init__(self, host, command, line):
        self.name = f"on {host}"
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - read while it runs
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=self._log, stderr=subprocess.STDOUT
        )
        self._process.stdin.write(line)
        self._process.stdin.flush()

    @property
    def alive(self):
        return self._process.poll() is None

    @property
    def log_tail(self):
        return os.pread(self._log.fileno(), 1 << 16, 0).decode(errors="replace")

    def stop(self, seconds):
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdin.close()


def start(request):
    """Run ``python3`` there; the engine's port is the same one at both ends."""
    settings = dict(request.environment)
    secret = settings.pop("INL_WORKER_SECRET")
    port = request.address.rpartition(":")[2]
    words = [*(f"{name}={value}" for name, value in settings.items()), "python3"]
    # Read from standard input: every user of that host sees its command lines.
    script = "IFS= read -r INL_WORKER_SECRET; export INL_WORKER_SECRET; exec env "
    script += shlex.join([*words, *request.arguments])
    tunnel = ["-o", "ExitOnForwardFailure=yes", "-R", f"{port}:{request.address}"]
    command = ["ssh", *tunnel, "--", request.target, script]
    return Remote(request.target, command, f"{secret}\n".encode())
