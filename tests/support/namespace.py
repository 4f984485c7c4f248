"""A process that is process 1 of namespaces of its own, as in a container: what it mounts is on no other's disk, and
all its children die with it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence


# unshare's own --fork tells a killed child's end as exit code 1 (util-linux 2.38), a shell as 128 + n; without its word
# for it on stderr, which is the child's.
_OUTSIDE = """
exec 3>&2 2>/dev/null
(exec setpriv --pdeathsig KILL /bin/sh -c "$@" 2>&3 3>&-)
exit $?
"""
_INSIDE = "mount -t proc proc /proc || exit 1\n"


class NamespacedProcess:
    """Starts at once. `set_up` is a shell script that mounts, and ends in `exec`; `arguments` are its own. `lines`
    gets each line of stdout and stderr.
    """

    def __init__(
        self, set_up: str, arguments: Sequence[str], env: Mapping[str, str], lines: Callable[[str], None]
    ) -> None:
        as_root = [] if os.geteuid() == 0 else ["--map-root-user"]
        self._process = subprocess.Popen(
            [
                *("setpriv", "--pdeathsig", "KILL", "unshare", *as_root, "--mount", "--pid"),
                *("--propagation", "private", "/bin/sh", "-c", _OUTSIDE, "sh", _INSIDE + set_up, "sh"),
                *arguments,
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=dict(env),
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, args=(lines,), daemon=True)
        self._reader.start()

    def poll(self) -> int | None:
        """The exit code, 128 + n for a signal, None while it runs."""
        code = self._process.poll()
        if code is None:
            return None
        self._reader.join()
        return 128 - code if code < 0 else code

    def terminate(self) -> None:
        """Send SIGTERM to process 1, and to no other."""
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        """Kill process 1, and with it all others."""
        self._signal(signal.SIGKILL)

    def stop(self, grace: float) -> int:
        """SIGTERM, after `grace` seconds SIGKILL; returns the exit code."""
        deadline = time.monotonic() + grace
        self.terminate()
        while self.poll() is None and time.monotonic() < deadline:
            time.sleep(0.02)
        while (code := self.poll()) is None:
            self.kill()
            time.sleep(0.02)
        return code

    def enter(self, command: Sequence[str]) -> subprocess.Popen[bytes] | None:
        """Run a command beside process 1, in its namespaces and root, as root; None if it is not there."""
        for child in self._children():
            return subprocess.Popen(
                [
                    "setpriv",
                    "--pdeathsig",
                    "KILL",
                    "nsenter",
                    "--target",
                    child,
                    "--mount",
                    "--pid",
                    "--root",
                    *command,
                ],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        return None

    def give_output_to(self, uid: int, gid: int) -> None:
        """Let another user's processes open what they write to, by its name in /proc."""
        if self._process.stdout is not None:
            os.fchown(self._process.stdout.fileno(), uid, gid)

    def _signal(self, number: int) -> None:
        with suppress(OSError):
            for child in self._children():
                os.kill(int(child), number)

    def _children(self) -> list[str]:
        parent = self._process.pid
        with suppress(OSError):
            return Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
        return []

    def _read(self, lines: Callable[[str], None]) -> None:
        stream = self._process.stdout
        if stream is not None:
            with stream:
                for line in stream:
                    lines(line.decode(errors="replace").rstrip("\n"))
