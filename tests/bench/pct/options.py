"""How `pct` reads its command line: commands, their parameters, and the errors about them.

Options may stand anywhere before `--`, with one dash or two, abbreviated while unique; a boolean takes a value when
the next word is not an option. Perl's Getopt::Long reads the original's command line, and its habits are kept.
"""

from .world import PctError

# The original's own list, in its order; a command's parameters are read from its line.
USAGE = """\
clone <vmid> <newid> [OPTIONS]
create <vmid> <ostemplate> [OPTIONS]
destroy <vmid> [OPTIONS]
list 
migrate <vmid> <target> [OPTIONS]
move-volume <vmid> <volume> [<storage>] [<target-vmid>] [<target-volume>] [OPTIONS]
pending <vmid>
resize <vmid> <disk> <size> [OPTIONS]
restore <vmid> <ostemplate> [OPTIONS]
template <vmid>

config <vmid> [OPTIONS]
set <vmid> [OPTIONS]

delsnapshot <vmid> <snapname> [OPTIONS]
listsnapshot <vmid>
rollback <vmid> <snapname> [OPTIONS]
snapshot <vmid> <snapname> [OPTIONS]

reboot <vmid> [OPTIONS]
resume <vmid>
shutdown <vmid> [OPTIONS]
start <vmid> [OPTIONS]
stop <vmid> [OPTIONS]
suspend <vmid>

console <vmid> [OPTIONS]
cpusets 
df <vmid>
enter <vmid> [OPTIONS]
exec <vmid> [<extra-args>] [OPTIONS]
fsck <vmid> [OPTIONS]
fstrim <vmid> [OPTIONS]
mount <vmid>
pull <vmid> <path> <destination> [OPTIONS]
push <vmid> <file> <destination> [OPTIONS]
remote-migrate <vmid> [<target-vmid>] <target-endpoint> --target-bridge <string> --target-storage <string> [OPTIONS]
rescan  [OPTIONS]
status <vmid> [OPTIONS]
unlock <vmid>
unmount <vmid>

help [<extra-args>] [OPTIONS]
"""

BOOL, TEXT, LIST = "boolean", "text", "list"
OWNER = {"perms": TEXT, "user": TEXT, "group": TEXT}
INDEXED = {f"{kind}{number}": TEXT for kind in ("dev", "mp", "net") for number in range(16)}
RESOURCES = ("arch", "cores", "cpulimit", "cpuunits", "memory", "rootfs", "swap")
DETAILS = ("description", "hookscript", "hostname", "lock", "nameserver", "ostype", "searchdomain", "startup", "tags")
SETTINGS = dict.fromkeys((*RESOURCES, *DETAILS, "features", "timezone", "tty"), TEXT)
FLAGS = dict.fromkeys(("console", "debug", "force", "onboot", "protection", "template", "unprivileged"), BOOL)
OPTIONS = {
    "config": {"current": BOOL, "snapshot": TEXT},
    "delsnapshot": {"force": BOOL},
    "enter": {"keep-env": BOOL},
    "exec": {"keep-env": BOOL},
    "pull": OWNER,
    "push": OWNER,
    "reboot": {"timeout": TEXT},
    "rollback": {"start": BOOL},
    "set": {**SETTINGS, **FLAGS, **INDEXED, "delete": LIST, "revert": LIST, "digest": TEXT},
    "shutdown": {"forceStop": BOOL, "timeout": TEXT},
    "snapshot": {"description": TEXT},
    "start": {"debug": BOOL, "skiplock": BOOL},
    "status": {"verbose": BOOL},
    "stop": {"overrule-shutdown": BOOL, "skiplock": BOOL},
}
TRUE, FALSE = ("1", "on", "yes", "true"), ("0", "off", "no", "false")


class Command:
    """One `pct` command: its name and the words it takes."""

    def __init__(self, line):
        self.usage = f"pct {line}"
        words = line.split()
        self.name = words[0]
        self.words = [word.strip("<>[]") for word in words[1:] if word.startswith(("<", "[<"))]
        self.optional = {word.strip("<>[]") for word in words[1:] if word.startswith("[<")}
        self.options = OPTIONS.get(self.name, {})

    def refuse(self, text):
        """A `400` with the usage line below it."""
        return PctError(f"400 {text}\n{self.usage}", 2)

    def invalid(self, field, text):
        return self.refuse(f"Parameter verification failed.\n{field}: {text}")


COMMANDS = {line.split()[0]: Command(line) for line in USAGE.splitlines() if line}


def find(argv):
    """The command that `argv[0]` means, which may be the beginning of its name."""
    if not argv:
        raise PctError("ERROR: no command specified\n" + overview("pct"))
    word = argv[0]
    hits = [word] if word in COMMANDS else [name for name in COMMANDS if name.startswith(word)]
    if not hits:
        raise PctError(f"ERROR: unknown command 'pct {word}'\n{overview('pct')}")
    if len(hits) > 1:
        lines = [f"       pct {word} {line}" for line in USAGE.splitlines() if line]
        raise PctError("\n".join([f"ERROR: incomplete command 'pct {word}'", _HEAD, "", *lines]))
    return COMMANDS[hits[0]]


_HEAD = "USAGE: pct <COMMAND> [ARGS] [OPTIONS]"


def overview(prefix):
    lines = [f"       {prefix} {line}" if line else "" for line in USAGE.splitlines()]
    return "\n".join([_HEAD, "", *lines])


def parse(command, argv):
    """Words and options of a command as one dict; raises `PctError` (2) with the original's text."""
    words, values, noise = _scan(argv, command.options)
    if noise:
        raise PctError("\n".join([*noise, command.refuse("unable to parse option").text]), 2)
    for name in command.words:
        if name == "extra-args":
            values[name], words = words, []
        elif words:
            values[name] = words.pop(0)
        elif name not in command.optional:
            raise command.refuse("not enough arguments")
    if words:
        raise command.refuse("too many arguments")
    for name, kind in command.options.items():
        if kind is BOOL and name in values:
            values[name] = _boolean(command, values[name])
    return values


def _scan(argv, options):
    words, values, noise = [], {}, []
    rest = list(argv)
    while rest:
        word = rest.pop(0)
        if word == "--":
            return words + rest, values, noise
        if not word.startswith("-") or word == "-":
            words.append(word)
            continue
        given, equals, value = word[2 if word.startswith("--") else 1 :].partition("=")
        name = _complete(given, options, noise)
        if name is None:
            continue
        if not equals:
            value = _next_value(options[name], rest)
        if value is None:
            noise.append(f"Option {given} requires an argument")
        elif options[name] is LIST:
            values.setdefault(name, []).append(value)
        else:
            values[name] = value
    return words, values, noise


def _complete(given, options, noise):
    lower = given.lower()
    hits = [name for name in options if name.lower() == lower]
    hits = hits or [name for name in options if name.lower().startswith(lower)]
    if len(hits) == 1:
        return hits[0]
    noise.append(f"Option {given} is ambiguous ({', '.join(sorted(hits))})" if hits else f"Unknown option: {given}")
    return None


def _next_value(kind, rest):
    """The value of an option: a boolean may do without one, a text takes whatever comes."""
    if kind is BOOL:
        takes = rest and rest[0] != "--" and not (rest[0].startswith("-") and len(rest[0]) > 1)
        return rest.pop(0) if takes else ""
    return rest.pop(0) if rest else None


def _boolean(command, text):
    if text == "" or text.lower() in TRUE:
        return True
    if text.lower() in FALSE:
        return False
    raise command.refuse("unable to parse boolean option")
