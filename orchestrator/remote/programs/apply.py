# uses: _lock _release _pushed _unpack
# One deploy as one transaction: lock, copy what did not change, unpack what did, verify all of it, switch, prune.
# Until the switch nothing but a `.partial` folder exists, and every way out removes it.
import ast
from concurrent.futures import ThreadPoolExecutor


def copy_unchanged(base, staging, copies, files):
    """Real copies, no hard links: an edit inside one release must not reach into the others."""
    for path, origin in sorted(copies.items()):
        try:
            source = open(os.path.join(base, origin), "rb")
        except FileNotFoundError:
            # It vanished since the facts: the verification says so, with its name.
            continue
        with source, create(staging, path, files[path]["mode"]) as target:
            shutil.copyfileobj(source, target, 1 << 20)


def receive(payload, size, staging, sends, files):
    """Unpack exactly the announced files; anything else in the archive ends the deploy."""
    source, pending, complaint = Counted(payload), set(sends), None
    try:
        with tarfile.open(fileobj=source, mode="r|gz", encoding="utf-8") as archive:
            for member in archive:
                name = member.name
                if not member.isreg() or name not in pending or member.size != files[name]["size"]:
                    raise transfer_failed("damaged", "the archive holds `%s`, which was not announced" % ascii(name))
                pending.remove(name)
                with create(staging, name, files[name]["mode"]) as target:
                    shutil.copyfileobj(archive.extractfile(member), target, 1 << 20)
    except (tarfile.TarError, EOFError) as error:
        complaint = "the archive cannot be read: %s" % error
    while source.read(1 << 16):
        pass
    if source.count < size:
        raise transfer_failed("truncated", "%d of %d bytes arrived" % (source.count, size))
    if pending:
        raise transfer_failed("damaged", complaint or "%d of %d files are not in it" % (len(pending), len(sends)))


def transfer_failed(kind, why):
    what = {"damaged": "the release arrived damaged", "truncated": "the transfer broke off"}[kind]
    fix = "run the command again; if it repeats, check the connection and the target's disk"
    return Fail(kind, what + "; the current release is untouched", why, fix)


def check_hashes(staging, files):
    damaged = damaged_files(staging, files)
    if damaged:
        few = ", ".join("`%s`" % ascii(path)[1:-1] for path in damaged[:3])
        more = " and %d more" % (len(damaged) - 3) if len(damaged) > 3 else ""
        raise Fail(
            "damaged",
            "%d of %d files arrived damaged; the current release is untouched" % (len(damaged), len(files)),
            "hashes differ for %s%s" % (few, more),
            "run the command again; if it repeats, check the target's disk and memory",
            files=damaged[:20],
        )


def check_syntax(staging, paths):
    """The last word of the interpreter that will run the sources, where it is not the laptop's version."""
    for path in paths:
        with open(os.path.join(staging, path), "rb") as file:
            source = file.read()
        try:
            compile(source, path, "exec", ast.PyCF_ONLY_AST, True)
        except (SyntaxError, ValueError) as error:
            place = "%s:%s:%s" % (path, getattr(error, "lineno", 1), getattr(error, "offset", 1))
            raise Fail(
                "syntax_error",
                "a file does not parse with Python %d.%d of the target" % sys.version_info[:2],
                "%s %s" % (place, getattr(error, "msg", error)),
                "correct the file; the current release is untouched",
            ) from error


def fsync_tree(folder):
    """Files before folders; several at a time, because each waits for the disk and they can share its writes."""
    files, folders = [], []
    for parent, _, names in os.walk(folder):
        folders.append(parent)
        files += [os.path.join(parent, name) for name in names]
    with ThreadPoolExecutor(8) as pool:
        for paths in (files, folders):
            list(pool.map(fsync_path, paths))


def stage(root, request, payload, staging):
    """Fill the staging folder and prove that it is the release."""
    files, sends = request["files"], request["sends"]
    if sends:
        tell("step", name="send")
        with arriving(root, request, payload) as archive:
            receive(archive, request["archive_size"], staging, sends, files)
    if request["copies"]:
        tell("step", name="copy")
        copy_unchanged(release_path(root, request["base"]), staging, request["copies"], files)
    tell("step", name="verify")
    check_hashes(staging, files)
    check_syntax(staging, request["parse"])
    manifest = {
        "v": 1,
        "release": request["release"],
        "content": request["content"],
        "created": time.time(),
        "by": who(request["owner"]),
        "python": "%d.%d" % sys.version_info[:2],
        "files": files,
    }
    with create(staging, MANIFEST, 0o644) as file:
        file.write(json.dumps(manifest, sort_keys=True).encode() + b"\n")
    fsync_tree(staging)


def work(request, payload):
    root, owner, release = request["root"], request["owner"], request["release"]
    unsafe = [path for path in request["files"] if not is_safe(path) or path == MANIFEST]
    if unsafe:
        raise Fail("unsafe_path", "a file name leads out of the release", ascii(unsafe[0]), "rename the file")
    tell("step", name="lock")
    with held_lock(root, owner, request["wait_s"]) as lock:
        check_fingerprint(root, request["fingerprint"])
        staging = release_path(root, release) + ".partial"
        try:
            os.mkdir(staging)
            stage(root, request, payload, staging)
            tell("step", name="activate")
            return activate_release(root, lock, release, "deploy", owner, request["removes"], staging)
        except (Fail, OSError):
            # Whoever broke the lock has removed our staging folder; what we stumbled over then is no news.
            lock.check()
            raise
        finally:
            # Gone already after a switch. Somebody who broke our lock may be staging under the same name.
            with uninterrupted():
                if lock.is_ours():
                    shutil.rmtree(staging, ignore_errors=True)


_main(work)
