"""A container's configuration file: `key: value` lines, raw `lxc.*` lines, and sections for snapshots."""

import os

from .world import PctError, config_path, node_name, switch

PENDING = "pve:pending"


class Section:
    """Keys and values, the raw lines, and the description (kept in `#` lines, percent-encoded)."""

    def __init__(self):
        self.values = {}
        self.raw = []

    def copy(self):
        other = Section()
        other.values, other.raw = dict(self.values), list(self.raw)
        return other

    def lines(self):
        """As `pct config` prints them."""
        return [*(f"{key}: {value}" for key, value in sorted(self.values.items())), *self.raw]

    def text(self):
        """As the file has them."""
        description = self.values.get("description", "")
        comment = [f"#{line}" for line in description.removesuffix("%0A").split("%0A")] if description else []
        return "\n".join([*comment, *(line for line in self.lines() if not line.startswith("description:"))]) + "\n"


class GuestConfig:
    """The whole file. Changing it means `write`, which the cluster file system may refuse."""

    def __init__(self, vmid):
        self.vmid = vmid
        self.main = Section()
        self.sections = {}
        with open(config_path(vmid), encoding="utf-8") as file:
            self._parse(file.read())

    def _parse(self, text):
        section, comment = self.main, []
        for line in text.splitlines():
            if line.startswith("["):
                _describe(section, comment)
                section, comment = self.sections.setdefault(line.strip("[]"), Section()), []
            elif line.startswith("#"):
                comment.append(line[1:])
            elif line.startswith("lxc."):
                key, _, value = line.partition(":")
                section.raw.append(f"{key}: {value.strip()}")
            elif ":" in line:
                key, _, value = line.partition(":")
                section.values[key] = value.strip()
        _describe(section, comment)

    @property
    def snapshots(self):
        return {name: section for name, section in self.sections.items() if name != PENDING}

    def require_unlocked(self):
        if "lock" in self.main.values:
            raise PctError(f"CT is locked ({self.main.values['lock']})")

    def apply_pending(self):
        """What waited for a start becomes so; written only if there is something."""
        pending = self.sections.pop(PENDING, None)
        if pending is not None:
            self.main.values.update(pending.values)
            self.main.raw += pending.raw
            self.write()

    def write(self):
        """Raises `PctError` without quorum: the file system is read-only then."""
        path = config_path(self.vmid)
        if switch("no-quorum") is not None:
            public = f"/etc/pve/nodes/{node_name()}/lxc/{self.vmid}.conf.tmp.{os.getpid()}"
            raise PctError(f"unable to open file '{public}' - Permission denied")
        parts = [self.main.text(), *(f"\n[{name}]\n{section.text()}" for name, section in self.sections.items())]
        with open(f"{path}.tmp", "w", encoding="utf-8") as file:
            file.write("".join(parts))
        os.rename(f"{path}.tmp", path)


def _describe(section, comment):
    if comment:
        section.values["description"] = "%0A".join(comment) + "%0A"


def description(text):
    """A description as `pct config` prints it: percent-encoded but for plain characters, with a line end."""
    plain = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789 -_.,/()+='\"!?*<>@&;"
    encoded = "".join(char if char in plain else "".join(f"%{byte:02X}" for byte in char.encode()) for char in text)
    return encoded + "%0A"
