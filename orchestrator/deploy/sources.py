"""Which files belong to a release, and the archive that carries them.

`collect` reads everything once, so that what is checked, hashed and sent is the same even while an editor saves.
The identity of a release is its content: the SHA-256 of its manifest, which knows paths, hashes, sizes and the
executable bit, and neither times nor owners.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import stat
import tarfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path

from orchestrator.deploy.ignore import IgnoreRules
from orchestrator.errors import SourceError
from orchestrator.inventory.models import DeployConfig
from orchestrator.resources import locate
from orchestrator.terminal import printable
from orchestrator.words import count, size

MANIFEST_NAME = ".dfo-manifest.json"


@dataclass(frozen=True, slots=True)
class Entry:
    """One file in a manifest; `mode` is 0o644 or 0o755."""

    sha256: str
    size: int
    mode: int


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A file as it was read. `path` is relative to the release, with `/`."""

    path: str
    data: bytes
    entry: Entry


@dataclass(frozen=True)
class Sources:
    """All files of a release, by path in sorted order."""

    files: Mapping[str, SourceFile]

    @cached_property
    def manifest(self) -> dict[str, Entry]:
        return {path: file.entry for path, file in self.files.items()}

    def manifest_json(self) -> dict[str, dict[str, object]]:
        """The manifest as the target keeps it."""
        return {path: asdict(entry) for path, entry in self.manifest.items()}

    @cached_property
    def content(self) -> str:
        """SHA-256 (hex) of the manifest as canonical JSON."""
        text = json.dumps(self.manifest_json(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode("ascii")).hexdigest()

    @property
    def num_bytes(self) -> int:
        return sum(len(file.data) for file in self.files.values())

    def archive(self, paths: Iterable[str]) -> bytes:
        """A gzipped tar of these files; equal files give equal bytes."""
        raw = io.BytesIO()
        with tarfile.open(fileobj=raw, mode="w", format=tarfile.PAX_FORMAT, encoding="utf-8") as archive:
            for path in sorted(paths):
                info = tarfile.TarInfo(path)
                info.size, info.mode = len(self.files[path].data), self.files[path].entry.mode
                archive.addfile(info, io.BytesIO(self.files[path].data))
        return gzip.compress(raw.getbuffer(), compresslevel=6, mtime=0)


@dataclass(frozen=True, slots=True)
class _Found:
    """A file before it is read. `folder` is what links may not lead out of."""

    path: str
    full: Path
    info: os.stat_result
    folder: Path

    @property
    def is_link(self) -> bool:
        return stat.S_ISLNK(self.info.st_mode)


def collect(project: Path, deploy: DeployConfig) -> Sources:
    """Read the files that `deploy` includes, relative to `project`. Raises SourceError."""
    found: dict[str, _Found] = {}
    for entry in deploy.include:
        found.update((item.path, item) for item in _entry(entry, project, deploy.ignore_files))
    if not found:
        raise SourceError(
            "no_sources",
            "the release would be empty",
            why=f"nothing in {', '.join(f'`{e}`' for e in deploy.include)} is left after the ignore files",
            fix="correct `deploy.include` or the ignore files",
        )
    _check_limits(list(found.values()), deploy)
    by_place = {os.path.realpath(item.full): item for item in found.values() if not item.is_link}
    return Sources(
        {path: _read(item, _follow(item, by_place) if item.is_link else item) for path, item in sorted(found.items())}
    )


def _entry(entry: str, project: Path, ignore_files: list[str]) -> Iterator[_Found]:
    """Everything that one line of `deploy.include` stands for."""
    path = "/".join(part for part in entry.split("/") if part not in ("", "."))
    start = locate(path, project=project)
    if start is None:
        raise SourceError(
            "no_sources",
            f"`{entry}` of `deploy.include` does not exist",
            why=f"there is no `{project / path}`",
            fix="correct `deploy.include`, or start dfo where the project is",
        )
    rules = IgnoreRules.default(ignore_files)
    if start != project / path:
        # Installed with dfo: what lies above it (a virtual environment, somebody else's repository) has no say.
        yield from _walk(start, path, rules, start)
        return
    if not start.parent.resolve().is_relative_to(project.resolve()) and path:
        raise _unsafe(
            path, f"lies in `{start.parent.resolve()}`, out of the project", "include a folder of the project"
        )
    folder, prefix = project, ""
    for part in path.split("/") if path else []:
        rules = rules.entering(folder, prefix)
        folder, prefix = folder / part, f"{prefix}{part}/"
        if rules.ignores(prefix if folder.is_dir() else prefix[:-1]):
            raise SourceError(
                "no_sources",
                f"`{entry}` of `deploy.include` is ignored",
                why=f"a pattern in {' or '.join(ignore_files)}, or a built-in one, matches `{prefix}`",
                fix=f"add `!/{prefix}` to `.dfoignore` in `{project}`, or remove it from `deploy.include`",
            )
    yield from _walk(start, path, rules, project)


def _walk(full: Path, path: str, rules: IgnoreRules, folder: Path) -> Iterator[_Found]:
    info = _lstat(full)
    if not path.isascii() and any("\ud800" <= c <= "\udfff" for c in path):
        raise _unsafe(path, "has a name that is not valid UTF-8", "rename it")
    if not stat.S_ISDIR(info.st_mode):
        if not (stat.S_ISREG(info.st_mode) or stat.S_ISLNK(info.st_mode)):
            raise _unsafe(path, "is neither a file nor a folder", "remove it, or name it in `.dfoignore`")
        yield _Found(path, full, info, folder)
        return
    prefix = f"{path}/" if path else ""
    inside = rules.entering(full, prefix)
    try:
        children = sorted(os.scandir(full), key=lambda child: child.name)
    except OSError as error:
        raise _unreadable(path, error) from error
    for child in children:
        is_folder = child.is_dir(follow_symlinks=False)
        name = f"{prefix}{child.name}"
        if child.name not in (".git", MANIFEST_NAME) and not inside.ignores(f"{name}/" if is_folder else name):
            yield from _walk(full / child.name, name, inside, folder)


def _check_limits(found: list[_Found], deploy: DeployConfig) -> None:
    if len(found) > deploy.max_files:
        folders = Counter(item.path.rpartition("/")[0] or "." for item in found).most_common(5)
        raise SourceError(
            "too_many_files",
            f"{count(len(found), 'file')} would be sent; `deploy.max_files` is {deploy.max_files:,}",
            why="most are in " + ", ".join(f"`{printable(name)}` ({number:,})" for name, number in folders),
            fix="name what is no source in `.dfoignore`, or raise `deploy.max_files`",
            files=len(found),
        )
    total = sum(item.info.st_size for item in found)
    if total > deploy.max_size:
        largest = sorted(found, key=lambda item: -item.info.st_size)[:5]
        names = ", ".join(f"`{printable(item.path)}` ({size(item.info.st_size)})" for item in largest)
        raise SourceError(
            "too_large",
            f"{size(total)} would be sent; `deploy.max_size` is {size(deploy.max_size)}",
            why=f"the largest: {names}",
            fix="name what is no source in `.dfoignore`, or raise `deploy.max_size`",
            bytes=total,
        )


def _follow(link: _Found, by_place: Mapping[str, _Found]) -> _Found:
    """A link travels as the file it points to, and may only point to a file that travels anyway."""
    target = os.path.realpath(link.full)
    if target in by_place:
        return by_place[target]
    if not Path(target).is_relative_to(os.path.realpath(link.folder)):
        raise _unsafe(link.path, f"is a link out of the project, to `{target}`", "replace it by a copy of the file")
    raise _unsafe(
        link.path,
        f"is a link to `{target}`, which is no file of the release",
        "replace it by a copy, or include the file it points to",
    )


def _read(item: _Found, origin: _Found) -> SourceFile:
    try:
        data = origin.full.read_bytes()
    except OSError as error:
        raise _unreadable(item.path, error) from error
    mode = 0o755 if origin.info.st_mode & stat.S_IXUSR else 0o644
    entry = Entry(sha256=hashlib.sha256(data).hexdigest(), size=len(data), mode=mode)
    return SourceFile(item.path, data, entry)


def _lstat(full: Path) -> os.stat_result:
    try:
        return full.lstat()
    except OSError as error:
        raise _unreadable(str(full), error) from error


def _unsafe(path: str, why: str, fix: str) -> SourceError:
    shown = printable(path)
    return SourceError("unsafe_path", f"`{shown}` cannot be part of a release", why=f"it {why}", fix=fix, path=shown)


def _unreadable(path: str, error: OSError) -> SourceError:
    shown = printable(path)
    return SourceError(
        "unreadable_source",
        f"cannot read `{shown}`",
        why=error.strerror or str(error),
        fix="correct its rights, or name it in `.dfoignore`",
        path=shown,
    )
