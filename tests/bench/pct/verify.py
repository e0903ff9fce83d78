"""What the values of parameters must look like, with the original's words for those that do not."""


def verify(command, values):
    """Raises `PctError` (2) for the first value that is out of form; turns the vmid into a number."""
    if "vmid" in values:
        values["vmid"] = _vmid(command, values["vmid"])
    if "snapname" in values and not _is_configuration_id(values["snapname"]):
        raise command.invalid("snapname", f"invalid format - invalid configuration ID '{values['snapname']}'\n")
    for key in ("memory", "swap", "cores", "timeout"):
        if key in values:
            _number(command, key, values[key], 16 if key == "memory" else 0)
    if "hostname" in values and not _is_dns_name(values["hostname"]):
        raise command.invalid("hostname", "invalid format - value does not look like a valid DNS name\n")
    for key, value in values.items():
        if key.startswith("dev") and key[3:].isdigit():
            path = value.split(",")[0].removeprefix("path=")
            if not path.startswith("/dev/"):
                wrong = f"{key}.path: invalid format - {path} is not a valid device path"
                raise command.invalid(key, f"invalid format - format error\n{wrong}\n\n")


def _vmid(command, text):
    if not text.removeprefix("-").isascii() or not text.removeprefix("-").isdigit():
        raise command.invalid("vmid", f"type check ('integer') failed - got '{text}'")
    if not 3 <= len(text) <= 9 or text[0] in "0-":
        raise command.invalid("vmid", "invalid format - value does not look like a valid VM ID\n")
    return int(text)


def _number(command, key, text, least):
    if not text.removeprefix("-").isascii() or not text.removeprefix("-").isdigit():
        raise command.invalid(key, f"type check ('integer') failed - got '{text}'")
    if int(text) < least:
        raise command.invalid(key, f"value must have a minimum value of {least}")


def _is_configuration_id(text):
    plain = text.replace("-", "").replace("_", "")
    return text.isascii() and len(text) > 1 and text[0].isalpha() and (plain.isalnum() or not plain)


def _is_dns_name(text):
    parts = text.split(".")
    return text.isascii() and all(
        part and part.replace("-", "").isalnum() and part[0] != "-" and part[-1] != "-" for part in parts
    )
