# uses: _lock _runs _core _cache
# Looks at compile caches (`op` status), and removes those it is told to (`op` prune).


def status(request):
    root = request["root"]
    release, answer, complaint = current_release(root), None, ""
    if release is not None and request["config"] is not None:
        folder = os.path.join(root, "releases", release)
        asked = ask_core(folder, ["cache", "--config", "/dev/stdin"], request["environment"], ASK_S, request["config"])
        if asked["exit_code"] == 0:
            answer = json.loads(asked["stdout"].strip().splitlines()[-1])
        else:
            complaint = asked["stderr"].strip()[-2000:] or "exit code %s" % asked["exit_code"]
    return {
        "release": release,
        "answer": answer,
        "complaint": complaint,
        "stores": cache_stores(root),
        "time": time.time(),
    }


def prune(request):
    root, owner, removed = request["root"], request["owner"], []
    with held_lock(root, owner, request["wait_s"]) as lock:
        for name, expected in sorted(request["stores"].items()):
            if name not in store_names(root):
                continue
            refuse_runs(root, name, request["environment"])
            with nobody_fills(root, name):
                if sorted(record["digest"] for record in records_in(store_path(root, name))) != sorted(expected):
                    raise Fail(
                        "plan_stale",
                        "the cache `%s` changed after you saw it" % name,
                        "a warm-up has been recorded in it or removed from it meanwhile; removed so far: %s"
                        % (", ".join(removed) or "nothing"),
                        "`dfo cache status`, then decide again",
                    )
                # Renamed first: half a cache must not look like one.
                doomed = os.path.join(cache_home(root), ".doomed-%s" % name)
                with lock.sealed():
                    shutil.rmtree(doomed, ignore_errors=True)
                    os.rename(store_path(root, name), doomed)
                shutil.rmtree(doomed)
                removed.append(name)
        if removed:
            audit(root, "cache_prune", by=who(owner), command=owner["command"], removed=removed)
    return {"removed": removed}


def work(request, payload):
    return {"status": status, "prune": prune}[request["op"]](request)


_main(work)
