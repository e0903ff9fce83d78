# uses: _runs _devices
# Where the runs stand: one of them, the newest few, and always those that are alive. With `every`, again and again
# after so many seconds, until nobody listens any more.


def work(request, payload):
    while request.get("every"):
        emit("status", **look(request))
        time.sleep(request["every"])
    return look(request)


def look(request):
    root = request["root"]
    marked = marked_processes()
    if request.get("run") is not None:
        numbers = [find_run(root, request["run"])[0]]
    else:
        known = run_numbers(root)
        alive = [run["run"] for run in alive_runs(root)]
        numbers = sorted({*known[-request["last"] :], *alive})
    runs = [describe_run(root, number, marked) for number in numbers]
    wanted = any(gpu_numbers(run["devices"]) for run in runs if run["state"] not in TERMINAL)
    return {"release": current_release(root), "runs": runs, "gpus": gpu_table() if wanted else []}


_main(work)
