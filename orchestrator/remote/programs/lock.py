# uses: _lock _release
# The lock as a person sees it: show, take, release, break.


def refuse(what, why, fix):
    return Fail("lock_not_held", what, why, fix)


def release_own(root, owner):
    target = owner["target"]
    with guard(root):
        held = lock_state(root)
        if held is None:
            raise refuse("`%s` is not locked" % target, "there is no `lock` folder", "nothing to do")
        if not held.get("manual") or who(held) != who(owner):
            raise held_error(held, owner)
        discard_lock(root)
    return held


def break_any(root, owner):
    with guard(root):
        held = lock_state(root)
        if held is None:
            raise refuse("`%s` is not locked" % owner["target"], "there is no `lock` folder", "nothing to do")
        discard_lock(root)
    return held


def work(request, payload):
    root, action = request["root"], request["action"]
    if action == "show":
        return {"lock": lock_state(root)}
    owner = request["owner"]
    prepare_root(root)
    if action == "take":
        take_lock(root, owner)
        held = lock_state(root)
    else:
        held = {"release": release_own, "break": break_any}[action](root, owner)
    broken = {"holder": who(held), "held_command": held.get("command")} if action == "break" else {}
    warnings = record_in_audit(root, "lock_" + action, owner, message=held.get("message"), **broken)
    return {"lock": held, "warnings": warnings}


_main(work)
