# uses: _lock _release
# Lists releases; removes old ones. Removing takes no lock folder, only its guard, so that it works on a full disk.


def remove(root, owner, keep):
    prepare_root(root)
    with guard(root):
        held = lock_state(root)
        if held is not None and held["alive"]:
            raise held_error(held, owner)
        swept = sweep(root)
        if held is not None:
            discard_lock(root)
            swept.append("lock")
        newest_last = [release["id"] for release in list_releases(root)]
        doomed = [] if keep is None else newest_last[: max(0, len(newest_last) - keep)]
        removed, kept = prune_releases(root, doomed)
        warnings = record_in_audit(root, "prune", owner, removed=removed) if removed else []
    return {"swept": swept, "removed": removed, "kept": kept, "warnings": warnings}


def work(request, payload):
    root = request["root"]
    done = remove(root, request["owner"], request["keep"]) if request.get("clean") else {}
    return dict(
        done,
        releases=list_releases(root),
        current=current_release(root),
        in_use=releases_in_use(root) if os.path.isdir(root) else {},
        time=time.time(),
    )


_main(work)
