# Asks the target's own pip which files it would install for exact pins, and their hashes. Installs nothing.
import importlib.util
import tempfile


def resolve(pins, timeout):
    """pip's installation report for the pins, or the last line of its complaint."""
    with tempfile.TemporaryDirectory() as folder:
        listed, report = os.path.join(folder, "pins.txt"), os.path.join(folder, "report.json")
        with open(listed, "w") as file:
            file.write("\n".join(pins) + "\n")
        argv = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
        argv += ["--dry-run", "--ignore-installed", "--no-deps", "--report", report, "-r", listed]
        try:
            done = subprocess.run(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, timeout=timeout)
        except subprocess.TimeoutExpired:
            return None, "pip did not finish in %d s" % timeout
        lines = done.stderr.decode(errors="replace").strip().splitlines() or ["no message"]
        return read_json(report) if done.returncode == 0 else None, lines[-1][:300]


def hashes_of(report):
    """[[name, version, [sha256, …]], …] of a report."""
    found = []
    for item in report.get("install", []):
        archive = item.get("download_info", {}).get("archive_info", {})
        digests = archive.get("hashes") or {}
        sums = [digests["sha256"]] if "sha256" in digests else []
        found.append([item["metadata"]["name"], item["metadata"]["version"], sums])
    return found


def work(request, payload):
    pins, timeout = request["pins"], request["timeout"]
    if importlib.util.find_spec("pip") is None:
        raise Fail(
            "remote_failed",
            "`%s` has no pip" % sys.executable,
            "hashes come from the package index that the target uses, through its own pip",
            "`%s -m ensurepip`, then run the command again" % sys.executable,
        )
    report, complaint = resolve(pins, timeout)
    if report is not None:
        return {"found": hashes_of(report), "missing": []}
    # One pin the index does not know spoils the whole answer, so ask one by one.
    found, missing = [], []
    for pin in pins:
        report, complaint = resolve([pin], timeout)
        emit("progress", pin=pin)
        if report is None:
            missing.append([pin, complaint])
        else:
            found += hashes_of(report)
    return {"found": found, "missing": missing}


_main(work)
