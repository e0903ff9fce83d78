# Which Python modules a run will find, by looking where it will look; heavy ones are never imported.
import importlib.machinery
import importlib.util


def need_python():
    """Raises `old_python` where our programs, and the trainer, cannot work."""
    if sys.version_info < (3, 8):
        raise Fail(
            "old_python",
            "the target's Python is too old",
            "`%s` is %d.%d; 3.8 is the oldest that works" % (sys.executable, *sys.version_info[:2]),
            "set `python` of the target to a newer interpreter",
        )


def ask_python(probe, environment, data=None):
    """What `probe` prints as JSON on its last line, in an interpreter started as for a run; None if it does not."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", probe],
            input=json.dumps(data).encode(),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=dict(os.environ, **environment),
            cwd="/",
            timeout=60,
        )
        return json.loads(done.stdout.decode().splitlines()[-1])
    except (subprocess.TimeoutExpired, ValueError, IndexError):
        return None


def find_module(name):
    """`found`, `missing`, or `unsure`: a dotted name that its package might make up when it is imported.

    Looks, never imports.
    """
    top, _, rest = name.partition(".")
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):
        return "found" if top in sys.modules else "missing"
    if spec is None:
        return "missing"
    if name == "os.path":
        return "found"
    for part in rest.split(".") if rest else []:
        if spec.submodule_search_locations is None:
            return "unsure"
        spec = importlib.machinery.PathFinder.find_spec(spec.name + "." + part, spec.submodule_search_locations)
        if spec is None:
            return "unsure"
    return "found"


def confirm(names, environment):
    """Import the unsure ones in one child that sees no GPU. Name → why, for those that do not import."""
    probe = (
        "import importlib, json, sys\n"
        "missing = {}\n"
        "for name in json.load(sys.stdin):\n"
        "    try: importlib.import_module(name)\n"
        "    except ModuleNotFoundError as error: missing[name] = str(error)\n"
        "    except BaseException: pass\n"
        "sys.__stdout__.write('\\n' + json.dumps(missing) + '\\n')\n"
    )
    return ask_python(probe, dict(environment, CUDA_VISIBLE_DEVICES=""), names) or {}


def module_facts(names, environment):
    """`missing`: name → why it cannot be imported. `versions`: of the installed packages that were asked for."""
    # Not at the top: it would hide from users of an older Python that theirs is too old.
    from importlib import metadata

    # Ours is isolated from PYTHONPATH and the user's site folder, a run is not.
    sys.path[:] = ask_python("import json, sys; print(json.dumps(sys.path[1:]))", environment) or sys.path
    states = {name: find_module(name) for name in names}
    missing = {name: "no module of that name is installed" for name in names if states[name] == "missing"}
    unsure = [name for name in names if states[name] == "unsure"]
    missing.update(confirm(unsure, environment) if unsure else {})
    versions = {}
    for top in sorted({name.partition(".")[0] for name in names} - set(missing)):
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[top] = metadata.version(top)
    return {"missing": missing, "versions": versions}
