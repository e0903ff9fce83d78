# Where in the logs of a run to start: a place, a moment, or so many lines before the end.
LOOK_BACK = 1 << 20  # how far back the start of a line is searched


def start_at(logs, start):
    """`STAGE:OFFSET`: what comes before it was seen already."""
    stages = [log.stage for log in logs]
    if start["stage"] not in stages:
        raise Fail(
            "usage",
            "there is no log of stage `%s`" % start["stage"],
            "the run has logs of: %s" % (", ".join(stages) or "no stage yet"),
            "give one of these in `--from STAGE:OFFSET`",
        )
    place = stages.index(start["stage"])
    for log in logs[:place]:
        log.offset = log.size
    if logs[place].size < start["offset"]:
        raise Fail(
            "usage",
            "the log of stage `%s` has no byte %d" % (start["stage"], start["offset"]),
            "it is %d bytes long; it was replaced, or the offset is of another run" % logs[place].size,
            "leave out `--from`, or give a smaller offset",
        )
    logs[place].offset = start["offset"]


def start_since(logs, folder, moment):
    """The sizes the supervisor noted at that moment, each moved back to the start of its line."""
    sizes = sizes_at(os.path.join(folder, "logs", "index.jsonl"), moment)
    for log in logs:
        if sizes is not None:
            log.offset = line_start(log, min(sizes.get(log.stage, 0), log.size))
        elif os.fstat(log.fd).st_mtime < moment:
            log.offset = log.size


def sizes_at(path, moment):
    """`sizes` of the last index line not after `moment`; {} before the first, None without an index.

    Found by bisection: the index of a long run has hundreds of thousands of lines.
    """
    try:
        file = open(path, "rb")
    except OSError:
        return None
    with file:
        low, high, found = 0, os.fstat(file.fileno()).st_size, None
        if not high:
            return None
        while low < high:
            middle = (low + high) // 2
            file.seek(max(middle - 1, 0))
            if middle:
                file.readline()
            start, line = file.tell(), file.readline()
            entry = _entry(line) if start < high else None
            if entry is None or entry["t"] > moment:
                high = middle
            else:
                found, low = entry["sizes"], start + len(line)
        return found or {}


def _entry(line):
    try:
        entry = json.loads(line.decode())
    except ValueError:
        return None
    good = isinstance(entry, dict) and isinstance(entry.get("t"), (int, float))
    return entry if good and isinstance(entry.get("sizes"), dict) else None


def line_start(log, offset):
    """The start of the line that `offset` is in."""
    low = max(0, offset - LOOK_BACK)
    found = os.pread(log.fd, offset - low, low).rfind(b"\n")
    if found < 0:
        return offset if low else 0
    return low + found + 1


def start_tail(logs, lines):
    """The last `lines` lines of the run, without reading its logs from the start."""
    for log in reversed(logs):
        offset, lines = line_from_end(log, lines)
        log.offset = max(log.offset, offset)


def line_from_end(log, lines):
    """(offset of the last `lines` lines, how many of them this log does not have)."""
    end = log.size
    if lines <= 0 or end == 0:
        return end, lines
    # The newline that ends the last line starts no further one.
    position = end - 1 if os.pread(log.fd, 1, end - 1) == b"\n" else end
    while position > 0:
        low = max(0, position - 64 * 1024)
        block = os.pread(log.fd, position - low, low)
        count = block.count(b"\n")
        if count >= lines:
            cut = len(block)
            for _ in range(lines):
                cut = block.rindex(b"\n", 0, cut)
            return low + cut + 1, 0
        lines -= count
        position = low
    return 0, lines - 1


def choose_starts(logs, folder, request):
    since, start, tail = request.get("since"), request.get("start"), request.get("tail")
    if start is not None:
        start_at(logs, start)
    if since is not None:
        # An age is measured by the clock that stamped the index.
        start_since(logs, folder, since["at"] if "at" in since else time.time() - since["ago"])
    if tail is not None:
        start_tail(logs, tail)
