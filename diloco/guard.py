"""A process guard: runs a command in its own session and leaves nothing of it behind, however the launcher ends.

    python -I -S guard.py [--grace SECONDS] -- COMMAND…

The guard's stdin is a pipe that only its launcher holds open. When it reaches its end (the launcher exited, crashed
or was killed with SIGKILL), or the guard gets SIGTERM, SIGINT or SIGHUP, the command's whole process group gets SIGTERM
and, after the grace period, SIGKILL. What the command leaves behind when it ends by itself is ended the same way. The
guard then exits with the command's own code, or with 128 + n if signal n ended it.

On Linux the guard is also the reaper of the command's orphans, so that grandchildren in sessions of their own are found
too, and the command dies with a guard that is itself killed. Elsewhere (macOS) the process group is all there is.

It must start in milliseconds and work in any interpreter, hence the standard library only.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from typing import IO

DEFAULT_GRACE = 3.0
"""Seconds between SIGTERM and SIGKILL."""

_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_AFTER_KILL = 2.0  # a process in uninterruptible sleep can't be waited for without end


def spawn(
    command: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    output: IO[bytes] | int | None = None,
    errors: IO[bytes] | int | None = subprocess.STDOUT,
    grace: float = DEFAULT_GRACE,
    hold: Iterable[int] = (),
) -> subprocess.Popen[bytes]:
    """Start `command` under a guard; the returned process is the guard, and closing its stdin stops the command.

    `hold` are descriptors that the guard (not the command) keeps open until nothing is left of the command: a lock
    file's, say. The guard has a session of its own: a Ctrl-C in the launcher's terminal reaches only the launcher, and
    that decides what to stop.
    """
    guard = [sys.executable, "-I", "-S", __file__, "--grace", str(grace), "--", *command]
    return subprocess.Popen(  # noqa: S603 - the caller's own command, no shell
        guard,
        stdin=subprocess.PIPE,
        stdout=output,
        stderr=errors,
        env=env,
        start_new_session=True,
        pass_fds=tuple(hold),
    )


def stop(guards: Iterable[subprocess.Popen[bytes]], *, patience: float = DEFAULT_GRACE + _AFTER_KILL) -> None:
    """Stop guarded commands, all at once, and return when nothing is left of them; `patience` bounds it (seconds)."""
    guards = list(guards)
    running = [guard for guard in guards if guard.poll() is None]
    for guard in running:
        guard.terminate()
    deadline = time.monotonic() + patience
    for guard in running:
        try:
            guard.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            guard.kill()
            guard.wait()
    for guard in guards:
        if guard.stdin is not None:
            guard.stdin.close()


def exit_code(guard: subprocess.Popen[bytes]) -> int | None:
    """Return the command's exit code, 128 + n if signal n ended it (or its guard), None while it runs."""
    code = guard.poll()
    return 128 - code if code is not None and code < 0 else code


def signal_name(code: int) -> str | None:
    """`SIGKILL` for 137, and so on; None if the code is not a signal's."""
    try:
        return signal.Signals(code - 128).name if code > 128 else None
    except ValueError:
        return None


def _prctl(option: int, value: int) -> None:
    """Linux's prctl, where there is one: a second line of defence, so its absence is no error."""
    if not sys.platform.startswith("linux"):
        return
    import ctypes

    ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


class _Guard:
    """One command, its process group, and the guard's event loop."""

    def __init__(self, command: Sequence[str], grace: float) -> None:
        self.grace = grace
        self.code: int | None = None
        self.stop_asked = False
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)
        # Handlers first: a signal that arrives while the command is being started must not end the guard.
        signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        for number in _STOP_SIGNALS:
            signal.signal(number, self._ask_to_stop)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)
        guard = os.getpid()

        def die_with_guard() -> None:
            _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != guard:  # it died before the line above
                os.kill(os.getpid(), signal.SIGKILL)

        self.child = subprocess.Popen(  # noqa: S603
            command,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=die_with_guard,  # noqa: PLW1509 - the guard has one thread
        )

    def _ask_to_stop(self, *_: object) -> None:
        self.stop_asked = True

    def run(self) -> int:
        """Wait for the command's end or a reason to end it, then leave nothing behind."""
        stdin_open = True
        while self.code is None and not self.stop_asked:
            readable, _, _ = select.select([self._wake_read, 0] if stdin_open else [self._wake_read], [], [])
            if 0 in readable and not os.read(0, 4096):
                stdin_open = False
                self.stop_asked = True
            self._drain()
            self._reap()
        self._end_group()
        self.child.returncode = self.code  # reaped here, so that Popen does not warn about it
        return 1 if self.code is None else self.code

    def _drain(self) -> None:
        try:
            while os.read(self._wake_read, 4096):
                pass
        except BlockingIOError:
            pass

    def _reap(self) -> None:
        """Collect every ended child: the command, and on Linux also its orphans."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid == self.child.pid:
                code = os.waitstatus_to_exitcode(status)
                self.code = 128 - code if code < 0 else code

    def _end_group(self) -> None:
        for number, patience in ((signal.SIGTERM, self.grace), (signal.SIGKILL, _AFTER_KILL)):
            deadline = time.monotonic() + patience
            signalled: set[int] = set()
            self._signal_group(number)
            while True:
                self._reap()
                orphans = self._orphans()
                for pid in orphans - signalled:
                    self._signal_orphan(pid, number)
                signalled |= orphans
                if self.code is not None and not orphans and not self._signal_group(0):
                    return
                if time.monotonic() >= deadline:
                    break
                # Members that are not our children (elsewhere than on Linux) send us no SIGCHLD, hence the short turn.
                select.select([self._wake_read], [], [], min(0.02, max(0.0, deadline - time.monotonic())))
                self._drain()

    def _signal_group(self, number: int) -> bool:
        """Whether a process of the group was there to get the signal (0: only look)."""
        try:
            os.killpg(self.child.pid, number)
        except (ProcessLookupError, PermissionError):  # macOS: PermissionError when only zombies are left
            return False
        return True

    def _orphans(self) -> set[int]:
        """Direct children other than the command: what it left in sessions of their own. Linux only."""
        try:
            children = Path(f"/proc/self/task/{os.getpid()}/children").read_text()
        except OSError:
            return set()
        return {int(pid) for pid in children.split()} - {self.child.pid}

    def _signal_orphan(self, pid: int, number: int) -> None:
        try:
            if os.getpgid(pid) != self.child.pid:  # the group's members have had theirs
                os.kill(pid, number)
        except ProcessLookupError:
            return


def main(argv: Sequence[str]) -> int:
    """Entry point: `[--grace SECONDS] -- COMMAND…`."""
    grace = DEFAULT_GRACE
    arguments = list(argv)
    if arguments[:1] == ["--grace"]:
        grace = float(arguments[1])
        arguments = arguments[2:]
    if arguments[:1] != ["--"] or len(arguments) < 2:
        print("usage: guard.py [--grace SECONDS] -- COMMAND…", file=sys.stderr)  # noqa: T201
        return 2
    try:
        guard = _Guard(arguments[1:], grace)
    except OSError as problem:
        print(f"diloco: error: {arguments[1]} could not be started: {problem.strerror}", file=sys.stderr)  # noqa: T201
        return 127
    return guard.run()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
