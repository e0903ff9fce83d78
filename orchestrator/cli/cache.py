"""`dfo cache`: look at compile caches, save them here, put them into a fresh target, remove them when told to."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from orchestrator.cli.common import LOOK, DryRunOpt, TargetArg, TargetOpt, command, duration, group
from orchestrator.cli.runtime import Runtime

if TYPE_CHECKING:
    from orchestrator.compile_cache.removal import Doomed
    from orchestrator.compile_cache.status import CacheStatus, Store

FolderOpt = Annotated[
    Path | None, typer.Option("--to", metavar="DIR", help="Folder for it [default: where `cache status` looks]")
]
DigestOpt = Annotated[
    str | None, typer.Option("--digest", metavar="DIGITS", help="The cache with this warm-up [default: the one in use]")
]
DigestsOpt = Annotated[
    list[str] | None, typer.Option("--digest", metavar="DIGITS", help="The cache with this warm-up; repeatable")
]
StaleOpt = Annotated[bool, typer.Option("--stale", help="Caches that nothing installed on the target can use any more")]
KeepOpt = Annotated[
    int | None, typer.Option("--keep", metavar="N", min=0, help="All but the N most recently filled caches")
]
YesOpt = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask")]
ArchiveArg = Annotated[
    str, typer.Argument(metavar="ARCHIVE", help="A saved cache: its file, or digits that `cache status` shows")
]
ReplaceOpt = Annotated[
    bool, typer.Option("--replace", help="Put another cache of the same name aside instead of stopping")
]
LockWaitOpt = Annotated[
    float, typer.Option("--lock-wait", parser=duration, metavar="TIME", help="Wait so long for a running command (5m)")
]

group("cache", "Look at the compile cache, save it, restore it", panel=LOOK)


@command("cache status")
def status(rt: Runtime, target: TargetArg = None) -> None:
    """Which caches there are, and what they are worth now"""
    from orchestrator.compile_cache import archive
    from orchestrator.compile_cache.status import HEADER, rows, sentence

    found = look(rt)
    saved = list(archive.saved_in(archive.default_folder(rt.target.name)))
    if found.stores:
        rt.console.table(HEADER, rows(found))
    rt.console.data(f"`{rt.target.name}`: {sentence(found)}")
    for path, manifest in saved:
        for record in manifest.records:
            state, why = found.worth(record)
            rt.console.data(f"saved here: {record.name}  {state}{f': {why}' if why else ''}  {path}")
    listed = [manifest.model_dump() | {"archive": str(path)} for path, manifest in saved]
    rt.console.result(target=rt.target.name, **found.as_dict(), saved=listed)


@command("cache save")
def save(rt: Runtime, target: TargetArg = None, digest: DigestOpt = None, to: FolderOpt = None) -> None:
    """Copy a cache here, as one archive with its hash"""
    from orchestrator.compile_cache import archive, transfer
    from orchestrator.words import count, size

    store = _store(rt, look(rt), digest)
    with rt.console.step("save") as step:
        done = transfer.save(rt.session, store, to or archive.default_folder(rt.target.name), report=step.report)
        about = done.manifest
        step.detail = f"{count(about.files, 'file')}, {size(about.unpacked)} as {size(about.bytes)}"
    for name in done.left_out:
        rt.console.warn(f"`{name}` was left out: it is no regular file")
    rt.console.data(f"{'Saved' if done.fresh else 'Saved before, and equal:'} {done.archive}")
    rt.console.say(f"  dfo cache restore {done.archive} --target NAME")
    rt.console.result(
        fresh=done.fresh, left_out=list(done.left_out), **about.model_dump() | {"archive": str(done.archive)}
    )


@command("cache restore")
def restore(
    rt: Runtime,
    archive: ArchiveArg,
    target: TargetOpt = None,
    replace: ReplaceOpt = False,
    lock_wait: LockWaitOpt = "0s",  # type: ignore[assignment]
) -> None:
    """Put a saved cache into a target, so that its next launch is warm"""
    from orchestrator.compile_cache import archive as archives
    from orchestrator.compile_cache import transfer
    from orchestrator.compile_cache.status import sentence
    from orchestrator.words import count, size

    path, manifest = archives.choose(archive, archives.default_folder(rt.target.name))
    with rt.console.step("restore") as step:
        done = transfer.restore(
            rt.session, rt.target, path, manifest, replace=replace, lock_wait=lock_wait, report=step.report
        )
        step.detail = f"{count(manifest.files, 'file')}, {size(manifest.unpacked)}, hash equal"
        step.detail = "it was there already" if done.there else step.detail
    if done.moved:
        rt.console.warn(f"it was made in {manifest.path}; compiled code may hold that path and be made again")
    if done.aside:
        rt.console.say(f"the cache that was there is kept as `{done.aside}` (`dfo cache prune` removes it)")
    found = look(rt)
    rt.console.data(f"{done.path}: {sentence(found)}")
    facts = {"path": done.path, "there": done.there, "aside": done.aside, "moved": done.moved}
    rt.console.result(target=rt.target.name, **facts, **found.as_dict())


@command("cache prune")
def prune(
    rt: Runtime,
    target: TargetArg = None,
    digests: DigestsOpt = None,
    stale: StaleOpt = False,
    keep: KeepOpt = None,
    yes: YesOpt = False,
    dry_run: DryRunOpt = False,
    lock_wait: LockWaitOpt = "0s",  # type: ignore[assignment]
) -> None:
    """Remove caches that you name, and no others"""
    from orchestrator.compile_cache import removal

    doomed = removal.choose(look(rt), digests=digests or (), stale=stale, keep=keep)
    _show(rt, doomed)
    agreed = bool(doomed) and not dry_run and (yes or _ask(rt))
    removed = removal.remove(rt.session, rt.target, doomed, lock_wait=lock_wait) if agreed else []
    rt.console.say(f"removed {', '.join(removed)}" if removed else "Nothing was removed.")
    rt.console.result(target=rt.target.name, removed=removed, chosen=[one.store.name for one in doomed])


def look(rt: Runtime) -> CacheStatus:
    """Ask the target about its caches; one step of the runbook."""
    from orchestrator.compile_cache.status import fetch
    from orchestrator.words import count

    with rt.console.step("look") as step:
        found = fetch(rt.session, rt.target)
        step.detail = count(len(found.stores), "cache")
    return found


def _store(rt: Runtime, found: CacheStatus, digest: str | None) -> str:
    """The name of the cache that is meant."""
    from orchestrator.errors import UsageError

    if digest is not None:
        return found.find(digest)[0].name
    live: Store | None = found.live() or (found.stores[0] if len(found.stores) == 1 else None)
    if live is None:
        raise UsageError(
            "unknown_cache",
            f"`{rt.target.name}` has no cache in use",
            why=f"it has {len(found.stores)} caches, and the current release uses none of them",
            fix="name one with `--digest` (`dfo cache status`), or warm up first: `dfo launch --warmup-first`",
        )
    return live.name


def _show(rt: Runtime, doomed: list[Doomed]) -> None:
    from orchestrator.terminal import printable
    from orchestrator.words import count, size

    for one in doomed:
        warmups = count(len(one.store.records), "warm-up")
        rt.console.data(f"{printable(one.store.name)}  {size(one.store.bytes)}, {warmups}  {one.why}")


def _ask(rt: Runtime) -> bool:
    """A person at a terminal says yes or no; a script has to say it beforehand."""
    from orchestrator.errors import UsageError

    if rt.console.json or not rt.console.err.isatty():
        raise UsageError(
            "usage",
            "nothing was removed",
            why="nobody is there to confirm it",
            fix="look at the list above (or with `--dry-run`), then say `--yes`",
        )
    return typer.confirm("Remove them?", err=True)
