"""Which files a run's `data` setting names: decided by the launcher's check and by the replicas with the same code."""

from __future__ import annotations

import errno
import glob
import os
import sysconfig
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from diloco.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Iterator

# Generated tables, other programs and tests read unlike the library; a build's own settings differ between machines.
_NOT_LIBRARY = {
    "__pycache__",
    "dist-packages",
    "encodings",
    "idlelib",
    "lib2to3",
    "pydoc_data",
    "site-packages",
    "test",
    "tests",
    "turtledemo",
}
_TEXT_SUFFIXES = {".json", ".jsonl", ".md", ".py", ".txt"}


def _stdlib_files() -> list[Path]:
    root = Path(sysconfig.get_paths()["stdlib"])
    found = (
        (path.relative_to(root).as_posix(), path) for path in _files_below(root, _NOT_LIBRARY) if path.suffix == ".py"
    )
    return [path for name, path in sorted(found) if not name.startswith("_sysconfigdata")]


def _files_below(root: Path, skip: frozenset[str] | set[str] = frozenset()) -> Iterator[Path]:
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in skip and not name.startswith(".")]
        yield from (path for name in names if not name.startswith(".") and (path := Path(folder, name)).is_file())


def is_saved_dataset(path: Path) -> bool:
    """Whether `datasets` wrote this folder with `save_to_disk`."""
    return (path / "dataset_dict.json").is_file() or (
        (path / "dataset_info.json").is_file() and (path / "state.json").is_file()
    )


def text_files(data: str) -> list[Path] | None:
    """List the files that `data` names, sorted; None if it is a data set (a name, or a `save_to_disk` folder).

    A folder is searched to the bottom, hidden names left out; files that are not text (a NUL near the start) are left
    out of folders and globs. Raises :class:`ConfigurationError` for a path that does not exist, can't be read, or
    holds no text.
    """
    if data == "stdlib":
        files = _stdlib_files()
        if not files:
            raise ConfigurationError(
                "data 'stdlib': this Python has no source files of its library; give --data a text file or folder"
            )
        return files
    try:
        found = _find_files(data)
        if found is None or any(file.stat().st_size for file in found):
            return found
    except OSError as problem:
        where = problem.filename or data
        raise ConfigurationError(
            f"data {data!r}: {where}: {problem.strerror}; check the path and its permissions"
        ) from None
    raise ConfigurationError(f"data {data!r}: no text there; give --data a path with text files that are not empty")


def local_copy(data: str) -> str:
    """Where `data` can be read as files: `s3://bucket/prefix` is fetched into a temporary folder, all else is there.

    Raises :class:`ConfigurationError` if nothing is there or it can't be read.
    """
    if not data.startswith("s3://"):
        return data
    import fsspec
    from botocore.exceptions import BotoCoreError, ClientError

    folder = Path(tempfile.mkdtemp(prefix="diloco-data-"))
    try:
        files, path = fsspec.core.url_to_fs(data)
        found = [name for name in files.find(path) if not name.endswith("/")]
        targets = [folder / (name.removeprefix(path).strip("/") or Path(name).name) for name in found]
        for target in targets:
            target.parent.mkdir(parents=True, exist_ok=True)
        files.get(found, [str(target) for target in targets])
    except (OSError, BotoCoreError, ClientError) as problem:
        raise ConfigurationError(f"data {data!r} can't be read: {problem}; may the replicas' role read it?") from None
    if not found:
        raise ConfigurationError(f"data {data!r}: nothing is there; give --data a prefix that holds objects")
    return str(folder if len(targets) > 1 else targets[0])


def _find_files(data: str) -> list[Path] | None:
    path = Path(data).expanduser()
    if path.is_dir():
        if is_saved_dataset(path):
            return None
        next(path.iterdir(), None)  # os.walk would pass over a folder that can't be listed
        return sorted(file for file in _files_below(path) if _is_text(file))
    if path.exists():
        with path.open("rb"):
            return [path]
    if glob.has_magic(data):
        matches = (Path(name) for name in glob.glob(str(path), recursive=True))  # noqa: PTH207 - the pattern may be absolute
        return sorted(match for match in matches if match.is_file() and _is_text(match))
    if data.startswith(("/", ".", "~")) or data.count("/") > 1 or path.suffix in _TEXT_SUFFIXES:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), data)
    return None


def _is_text(path: Path) -> bool:
    with path.open("rb") as file:
        return b"\0" not in file.read(8192)
