# Asking the core of a release a question, in the environment its stages get from launch.sh.


def ask_core(release, words, environment, timeout, text=""):
    """{exit_code, stdout, stderr} of `python -m dflash_core words` with `text` on stdin; code 124 when it hangs."""
    variables = dict(os.environ, PYTHONDONTWRITEBYTECODE="1", PYTHONPATH=release)
    variables.update(environment)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "dflash_core", *words],
            input=text.encode(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=release,
            env=variables,
            timeout=timeout,
        )
    except subprocess.TimeoutExpired:
        return {"exit_code": 124, "stdout": "", "stderr": "no answer after %d s" % timeout}
    out, err = (stream.decode("utf-8", "replace") for stream in (done.stdout, done.stderr))
    return {"exit_code": done.returncode, "stdout": out, "stderr": err[-8000:]}


def json_from_core(release, words, environment, timeout, text=""):
    """The object that it prints, or None when it cannot answer."""
    answer = ask_core(release, words, environment, timeout, text)
    lines = answer["stdout"].strip().splitlines() if answer["exit_code"] == 0 else []
    try:
        found = json.loads(lines[-1]) if lines else None
    except ValueError:
        found = None
    return found if isinstance(found, dict) else None
