"""A stand-in for the Deep Learning image that ours is built on: Debian, this environment's Python, and its torch.

The real base is far larger and behind a registry; what the build relies on is the same: a `python` with torch and pip
on PATH.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.metadata
import platform
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from tests.support.images import EPOCH, Buildah, ImageError

if TYPE_CHECKING:
    from collections.abc import Iterator

SUITE = "bookworm"
"""Debian 12. The interpreter is this machine's, so its C library must be no newer than that."""
PREFIX = Path("opt/python")
# The shared libraries that the standard library's and torch's extension modules link to.
PACKAGES = ("ca-certificates", "libbz2-1.0", "libffi8", "libgomp1", "liblzma5", "libsqlite3-0", "libssl3", "zlib1g")
STDLIB_LEFT_OUT = ("site-packages", "test", "idlelib", "lib2to3", "tkinter", "turtledemo", "ensurepip", "config-*")
TORCH_LEFT_OUT = ("include", "test", "*.a", "protoc*")
EVERYWHERE_LEFT_OUT = ("__pycache__", "*.pyc")
INSTALLER = "the base image\n"
"""Who has installed torch: a build that replaces it replaces this, too."""
CERTIFICATES = Path("/etc/ssl/certs/ca-certificates.crt")


def local_base(buildah: Buildah) -> str:
    """Return the name of the base image in this storage; the first who asks makes it, in a minute or two.

    Raises ImageError if debootstrap or buildah fails.
    """
    name = f"localhost/diloco-test-base:{_key()}"
    buildah.storage.mkdir(parents=True, exist_ok=True)
    with (buildah.storage / "base.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if name not in buildah("images", "--format", "{{.Name}}:{{.Tag}}").stdout.split():
            _make(buildah, name)
    return name


def _make(buildah: Buildah, name: str) -> None:
    with tempfile.TemporaryDirectory(prefix="base-", dir=buildah.storage) as folder:
        root = Path(folder) / "root"
        _debian(root)
        _python(root / PREFIX)
        _packages(root / PREFIX)
        shutil.copyfile(CERTIFICATES, root / CERTIFICATES.relative_to("/"))
        container = buildah("from", "scratch").stdout.strip()
        try:
            buildah("add", "--quiet", container, str(root), "/")
            buildah("config", "--env", f"PATH=/{PREFIX}/bin:/usr/local/bin:/usr/bin:/bin", container)
            buildah("commit", "--timestamp", str(EPOCH), "--quiet", container, name)
        finally:
            buildah("rm", container)


def _key() -> str:
    """Change with whatever the image is made of."""
    parts = [Path(__file__).read_text(), platform.python_version()]
    parts += [importlib.metadata.version(name) for name in ("torch", "pip", "setuptools")]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def _debian(root: Path) -> None:
    done = subprocess.run(
        ["debootstrap", "--variant=minbase", f"--include={','.join(PACKAGES)}", SUITE, str(root)],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise ImageError(f"debootstrap ended with {done.returncode}: {done.stdout[-2000:]}{done.stderr[-2000:]}")
    for leftover in ("var/cache/apt", "var/lib/apt/lists", "usr/share/doc", "usr/share/locale", "usr/share/man"):
        shutil.rmtree(root / leftover)
    for device in ("dev", "proc", "sys"):
        shutil.rmtree(root / device)
        (root / device).mkdir()


def _python(prefix: Path) -> None:
    """The interpreter of this environment, which finds its standard library from where it lies."""
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    base = Path(sys.base_prefix)
    (prefix / "bin").mkdir(parents=True)
    shutil.copy(base / "bin" / version, prefix / "bin" / version)
    for link in ("python", "python3"):
        (prefix / "bin" / link).symlink_to(version)
    shutil.copytree(
        base / "lib" / version,
        prefix / "lib" / version,
        ignore=shutil.ignore_patterns(*EVERYWHERE_LEFT_OUT, *STDLIB_LEFT_OUT),
        symlinks=True,
    )
    for library in (base / "lib").glob("libpython*.so*"):
        shutil.copy(library, prefix / "lib" / library.name, follow_symlinks=False)
    (prefix / "lib" / version / "site-packages").mkdir()
    # A shared libpython is found by where it was built, which is elsewhere.
    root = prefix.parents[len(PREFIX.parts) - 1]
    (root / "etc/ld.so.conf.d/python.conf").write_text(f"/{PREFIX}/lib\n")
    subprocess.run(["ldconfig", "-r", str(root)], check=True)


def _packages(prefix: Path) -> None:
    here = Path(sysconfig.get_path("purelib"))
    there = prefix / "lib" / here.parent.name / "site-packages"
    for name in ("pip", *_closure("torch")):
        distribution = importlib.metadata.distribution(name)
        tops = {Path(str(file)).parts[0] for file in distribution.files or () if ".." not in Path(str(file)).parts}
        for top in tops - {"__pycache__"}:
            if (here / top).is_dir():
                left_out = (*EVERYWHERE_LEFT_OUT, *(TORCH_LEFT_OUT if top == "torch" else ()))
                shutil.copytree(here / top, there / top, ignore=shutil.ignore_patterns(*left_out), dirs_exist_ok=True)
            else:
                shutil.copy(here / top, there / top)
    next(there.glob("torch-*.dist-info")).joinpath("INSTALLER").write_text(INSTALLER)
    script = prefix / "bin" / "pip"
    script.write_text(
        f"#!/{PREFIX}/bin/python\nimport sys\nfrom pip._internal.cli.main import main\nsys.exit(main())\n"
    )
    script.chmod(0o755)


def _closure(name: str) -> Iterator[str]:
    """A distribution and all that it requires here."""
    from packaging.requirements import Requirement

    seen, waiting = set(), [name]
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        yield name
        for line in importlib.metadata.requires(name) or ():
            requirement = Requirement(line)
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                waiting.append(requirement.name)
