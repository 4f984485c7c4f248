"""Real processes: whatever happens to the launcher or the command, nothing of its group is left."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from diloco import guard

if TYPE_CHECKING:
    from collections.abc import Iterator

PATIENCE = 20.0

# Every process of the family holds the FIFO's write end, so the reader sees its end when the last of them is gone.
FAMILY = """
import os, signal, subprocess, sys, time
fifo, kind = sys.argv[1:3]
stubborn = "signal.signal(signal.SIGTERM, signal.SIG_IGN);"
held = os.open(fifo, os.O_WRONLY)
joined = f"fd = os.open({fifo!r}, os.O_WRONLY); os.write(fd, b'm'); time.sleep(600)"
member = "import os, signal, time;" + stubborn + joined
children = [subprocess.Popen([sys.executable, "-c", member])]
if kind == "with-session":
    children.append(subprocess.Popen([sys.executable, "-c", member], start_new_session=True))
if kind == "leaves":
    os.write(held, b"p")
    while os.path.exists(fifo + ".stay"):
        time.sleep(0.01)
    sys.exit(7)
os.write(held, b"p")
time.sleep(600)
"""

LAUNCHER = """
import sys, time
from diloco import guard
child = guard.spawn([sys.executable, "-c", sys.argv[1], *sys.argv[2:]], grace=0.2)
print(child.pid, flush=True)
time.sleep(600)
"""


class Family:
    """The read end of the FIFO that all members hold."""

    def __init__(self, path: Path) -> None:
        os.mkfifo(path)
        self.path = path
        self.reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)

    def wait_for(self, members: int) -> None:
        """Until so many members have said that they live."""
        seen = 0
        deadline = time.monotonic() + PATIENCE
        while seen < members:
            assert time.monotonic() < deadline, f"{seen} of {members} members came up"
            select.select([self.reader], [], [], 0.1)
            try:
                seen += len(os.read(self.reader, 64))
            except BlockingIOError:
                continue

    def wait_until_gone(self, patience: float = PATIENCE) -> None:
        """Until nobody holds the write end."""
        os.set_blocking(self.reader, True)
        ready, _, _ = select.select([self.reader], [], [], patience)
        assert ready, "a process of the group is left"
        assert os.read(self.reader, 64) == b""


@pytest.fixture
def family(tmp_path: Path) -> Iterator[Family]:
    it = Family(tmp_path / "fifo")
    yield it
    os.close(it.reader)


def command(family: Family, kind: str = "plain") -> list[str]:
    return [sys.executable, "-c", FAMILY, str(family.path), kind]


@pytest.mark.parametrize(
    "kind",
    [
        "plain",
        pytest.param(
            "with-session", marks=pytest.mark.skipif(sys.platform != "linux", reason="a subreaper is Linux's")
        ),
    ],
)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_nothing_is_left_when_the_launcher_dies(family: Family, kind: str, number: signal.Signals) -> None:
    launcher = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, FAMILY, str(family.path), kind], stdout=subprocess.PIPE
    )
    with launcher:
        family.wait_for(2 if kind == "plain" else 3)
        launcher.send_signal(number)
        launcher.wait(PATIENCE)
        family.wait_until_gone()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_to_the_guard_ends_the_group(family: Family, number: signal.Signals) -> None:
    child = guard.spawn(command(family), grace=0.2)
    family.wait_for(2)
    child.send_signal(number)
    assert child.wait(PATIENCE) == 128 + signal.SIGTERM
    family.wait_until_gone()
    guard.stop([child])


@pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG is Linux's")
def test_the_command_dies_with_a_killed_guard(tmp_path: Path) -> None:
    fifo = Family(tmp_path / "fifo")
    alone = f"import os, time; fd = os.open({str(fifo.path)!r}, os.O_WRONLY); os.write(fd, b'p'); time.sleep(600)"
    child = guard.spawn([sys.executable, "-c", alone])
    fifo.wait_for(1)
    child.kill()
    child.wait(PATIENCE)
    fifo.wait_until_gone()
    assert guard.exit_code(child) == 128 + signal.SIGKILL
    guard.stop([child])
    os.close(fifo.reader)


def test_what_the_command_leaves_behind_is_ended(family: Family) -> None:
    stay = Path(f"{family.path}.stay")
    stay.touch()
    child = guard.spawn(command(family, "leaves"), grace=0.2)
    family.wait_for(2)
    stay.unlink()
    assert child.wait(PATIENCE) == 7
    family.wait_until_gone()
    guard.stop([child])


@pytest.mark.parametrize(
    ("program", "code", "name"),
    [("pass", 0, None), ("raise SystemExit(78)", 78, None), ("import os; os.kill(os.getpid(), 9)", 137, "SIGKILL")],
)
def test_exit_codes(program: str, code: int, name: str | None) -> None:
    child = guard.spawn([sys.executable, "-c", program])
    child.wait(PATIENCE)
    assert guard.exit_code(child) == code
    assert guard.signal_name(code) == name
    guard.stop([child])


def test_a_command_that_does_not_exist_is_named(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with log.open("wb") as output:
        child = guard.spawn(["no-such-command-here"], output=output)
    assert child.wait(PATIENCE) == 127
    assert log.read_text() == "diloco: error: no-such-command-here could not be started: No such file or directory\n"
    guard.stop([child])


def test_the_guard_holds_what_it_is_given_and_the_command_does_not(tmp_path: Path, family: Family) -> None:
    read_end, write_end = os.pipe()
    child = guard.spawn(command(family), hold=[write_end], grace=0.2)
    os.close(write_end)
    family.wait_for(2)
    assert not select.select([read_end], [], [], 0)[0]
    guard.stop([child])
    assert select.select([read_end], [], [], PATIENCE)[0]
    assert os.read(read_end, 1) == b""
    os.close(read_end)
    family.wait_until_gone()
