# uses: _lock _release
# Makes a release that is already here current again, after proving that it is still what was deployed.


def work(request, payload):
    root, owner, release = request["root"], request["owner"], request["release"]
    tell("step", name="lock")
    with held_lock(root, owner, request.get("wait_s", 0.0)) as lock:
        if request.get("fingerprint"):
            check_fingerprint(root, request["fingerprint"])
        tell("step", name="verify")
        files = verify_release(root, release)
        tell("step", name="activate")
        result = activate_release(root, lock, release, request["event"], owner, request.get("removes", ()))
        return dict(result, files=files)


_main(work)
