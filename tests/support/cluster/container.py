"""One start of a pod's container: its command as a real process in a root of its own.

The root is an overlay of this machine's, so mount points and writes are in memory and never on the host; it is
read-only when the pod says so. Volumes are bound into it, then the interpreter, its environment and the checkout,
which stand for the image's content (a user that is not root can't reach them where they are).
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from tests.support.engine import ROOT
from tests.support.namespace import NamespacedProcess

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable, Mapping, Sequence

_SET_UP = """
set -e
scratch=$1 folder=$2 mode=$3
shift 3
mount -t tmpfs none "$scratch"
mkdir "$scratch/upper" "$scratch/work" "$scratch/root"
root=$scratch/root
mount -t overlay overlay -o "lowerdir=/,upperdir=$scratch/upper,workdir=$scratch/work" "$root"
mount -t proc proc "$root/proc"
mount --rbind /dev "$root/dev"
mkdir -p "$root$folder"
while [ "$1" != -- ]; do
    if [ -f "$2" ]; then
        mkdir -p "$(dirname "$root$3")"
        [ -e "$root$3" ] || touch "$root$3"
    else
        mkdir -p "$root$3"
    fi
    # Above a home of root's, say, nobody else may pass.
    above=$(dirname "$3")
    while [ "$above" != / ]; do
        [ "$1" != image ] || chmod a+x "$root$above"
        above=$(dirname "$above")
    done
    if [ "$1" = memory ]; then
        mount -t tmpfs -o "mode=1777,$2" none "$root$3"
    else
        mount --bind "$2" "$root$3"
        [ "$1" = rw ] || mount -o remount,bind,ro "$root$3"
    fi
    shift 3
done
shift
[ "$mode" = rw ] || mount -o remount,bind,ro "$root"
exec /usr/sbin/chroot "$root" env --chdir="$folder" setpriv "$@"
"""


@dataclass(frozen=True)
class Mount:
    """`kind` is `rw`, `ro`, or `memory`, whose source are a tmpfs's options."""

    kind: str
    source: str
    target: str


@dataclass(frozen=True)
class Image:
    """What a registry would have told of an image. Its files are this machine's, and `files` (target → source)."""

    entrypoint: Sequence[str] = ("/usr/local/bin/diloco-replica",)
    env: Mapping[str, str] = field(default_factory=dict)
    folder: str = "/opt/ml/code"
    files: Mapping[str, Path] = field(default_factory=dict)


def replica_image(**env: str) -> Image:
    """The project's image (container/Dockerfile), of the environment that runs the tests."""
    return Image(
        env={
            "PATH": f"{Path(sys.prefix) / 'bin'}:/usr/local/bin:/usr/bin:/bin",
            "HOME": "/tmp",  # noqa: S108 - the image's
            "LOGNAME": "diloco",
            "PYTHONDONTWRITEBYTECODE": "1",
            "PYTHONUNBUFFERED": "1",
            # Replicas share this machine's few cores.
            "OMP_NUM_THREADS": "1",
            **env,
        },
        files={"/usr/local/bin/diloco-replica": ROOT / "container" / "start"},
    )


@dataclass(frozen=True)
class User:
    """As whom a container runs, and what it may become."""

    uid: int = 0
    gid: int = 0
    groups: tuple[int, ...] = ()
    new_privileges: bool = True
    capabilities: bool = True

    @property
    def options(self) -> list[str]:
        """setpriv's."""
        groups = ("--groups", ",".join(map(str, self.groups))) if self.groups else ("--clear-groups",)
        return [
            # Another user's process would have forgotten to die with its parent.
            *("--pdeathsig", "KILL", "--reuid", str(self.uid), "--regid", str(self.gid), *groups),
            *([] if self.new_privileges else ["--no-new-privs"]),
            *([] if self.capabilities else ["--inh-caps=-all", "--bounding-set=-all"]),
        ]


class PodContainer(NamespacedProcess):
    """Starts at once. `lines` gets each line of stdout and stderr."""

    def __init__(
        self,
        command: Sequence[str],
        env: Mapping[str, str],
        *,
        image: Image,
        user: User,
        mounts: Sequence[Mount],
        read_only: bool,
        scratch: Path,
        lines: Callable[[str], None],
    ) -> None:
        scratch.mkdir(exist_ok=True)
        content = [
            *((str(path), str(path)) for path in dict.fromkeys([Path(sys.base_prefix), Path(sys.prefix), ROOT])),
            *((str(source), target) for target, source in image.files.items()),
        ]
        arguments = [str(scratch), image.folder, "ro" if read_only else "rw"]
        for mount in mounts:
            # /var/run is a link to /run, and would lead out of the root that is being laid out.
            arguments += [mount.kind, mount.source, os.path.realpath(mount.target)]
        for source, target in content:
            arguments += ["image", source, target]
        super().__init__(_SET_UP, [*arguments, "--", *user.options, "--", *command], env, lines)
        self._user = user
        self.give_output_to(user.uid, user.gid)  # as runc does

    def hook(self, command: Sequence[str]) -> subprocess.Popen[bytes] | None:
        """Run a command in the container, as its user."""
        return self.enter(["setpriv", *self._user.options, "--", *command])
