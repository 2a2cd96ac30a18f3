"""Which sockets processes listen on, as the kernel tells it."""

import contextlib
import ipaddress
import struct
from pathlib import Path

LISTENS = "0A"


def listening(pids):
    """(address, port) of every TCP socket on which one of the processes listens."""
    sockets = set()
    for pid in pids:
        with contextlib.suppress(OSError):  # the process has ended
            for file in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(OSError):  # closed meanwhile
                    sockets.add(str(file.readlink()))
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == LISTENS and f"socket:[{fields[9]}]" in sockets:
                number, port = fields[1].split(":")
                found.append((_address(number), int(port, 16)))
    return found


def _address(number):
    """Words of the machine's own byte order, in hexadecimal."""
    words = bytes.fromhex(number)
    packed = b"".join(
        struct.pack("=I", int.from_bytes(words[i : i + 4], "big")) for i in range(0, len(words), 4)
    )
    address = ipaddress.ip_address(packed)
    mapped = getattr(address, "ipv4_mapped", None)
    return str(address if mapped is None else mapped)


def is_loopback(address):
    return ipaddress.ip_address(address).is_loopback
