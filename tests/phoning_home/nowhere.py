"""A network that leads nowhere and hears everything: a command is run in it, and all that it sends is written down.

Started as `unshare --net --mount [--map-root-user] python nowhere.py REPORT COMMAND ...`. The new network has a
loopback device alone, to which every address is routed, so that whatever is sent is seen there, and refused: names are
looked up with a server that nobody runs, and what looks nothing up where there is no network finds one. Nothing is
traced, so that a command is as fast as anywhere. REPORT gets a line for each address and port, and for each name.
"""

import contextlib
import ctypes
import fcntl
import ipaddress
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path

NAME_SERVER = "192.0.2.53"
"""Of the addresses that are kept for documentation: nobody has it."""
_OWN = ("192.0.2.1/32", "2001:db8::1/128")
"""What the machine seems to have beside its loopback addresses; without one, some look nothing up."""
_ETC = {
    "resolv.conf": f"nameserver {NAME_SERVER}\noptions timeout:1 attempts:1\n",
    "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files dns\n",
    "hosts": "127.0.0.1 localhost\n::1 localhost\n",
}
_CACHES = ("/run/nscd", "/var/run/nscd", "/run/systemd/resolve", "/run/dbus")
"""Where services of the machine answer for names, outside this network."""
_ALL_PROTOCOLS = 0x0003
_IPV4, _IPV6 = 0x0800, 0x86DD
_OUTGOING = 4
_SO_ATTACH_FILTER = 26


def main(report: Path, command: list[str]) -> int:
    """Run the command; returns its exit code."""
    _make_network()
    _make_names(report.parent)
    heard: set[str] = set()
    listener = _listener()
    threading.Thread(target=_hear, args=(listener, heard), daemon=True).start()
    process = subprocess.Popen(command, start_new_session=True)
    code = process.wait()
    time.sleep(0.05)  # what it sent last is in the listener's queue
    with contextlib.suppress(ProcessLookupError):  # whatever it has left running, as a rule nothing
        os.killpg(process.pid, signal.SIGKILL)
    report.write_text("".join(f"{line}\n" for line in sorted(heard)), encoding="utf-8")
    return code


def _make_network() -> None:
    with socket.socket() as any_socket:
        fcntl.ioctl(any_socket, 0x8914, struct.pack("16sH14x", b"lo", 0x41))  # SIOCSIFFLAGS: up and running
    for own in _OWN:
        address, _, length = own.partition("/")
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        packed = socket.inet_pton(family, address)
        head = struct.pack("=BBBBI", family, int(length), 0x80, 0, 1)  # IFA_F_PERMANENT, on the first device
        _ask_kernel(20, head + _attribute(2, packed) + _attribute(1, packed), family)
        # Local, in the local table, to the first device: every address of that family is one of ours.
        route = struct.pack("=BBBBBBBBI", family, 0, 0, 0, 255, 3, 254, 2, 0)
        _ask_kernel(24, route + _attribute(4, struct.pack("=I", 1)), family)


def _attribute(kind: int, content: bytes) -> bytes:
    return struct.pack("=HH", 4 + len(content), kind) + content


def _ask_kernel(kind: int, content: bytes, family: int) -> None:
    """One request by rtnetlink(7), acknowledged."""
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0) as kernel:
        kernel.send(struct.pack("=IHHII", 16 + len(content), kind, 0x405, 1, 0) + content)
        (error,) = struct.unpack_from("=i", kernel.recv(4096), 16)
    if error and family == socket.AF_INET:  # many a machine has no IPv6
        raise OSError(-error, f"the kernel refuses request {kind}")


def _make_names(scratch: Path) -> None:
    for name, content in _ETC.items():
        (scratch / name).write_text(content, encoding="utf-8")
        if Path("/etc", name).exists():
            _mount("--bind", str(scratch / name), f"/etc/{name}")
    for folder in _CACHES:
        if Path(folder).is_dir():
            _mount("-t", "tmpfs", "none", folder)


def _mount(*arguments: str) -> None:
    subprocess.run(["mount", *arguments], check=True)


def _listener() -> socket.socket:
    """Hears each packet to anything but a loopback address; the kernel drops the others."""
    # Offsets count from the network's header. An instruction: code, how many to jump if so, if not, operand.
    code = [
        (0x28, 0, 0, 0xFFFFF000),  # which protocol it is
        (0x15, 0, 3, _IPV4),
        (0x20, 0, 0, 16),  # where an IPv4 packet goes
        (0x54, 0, 0, 0xFF000000),
        (0x15, 9, 10, 0x7F000000),
        (0x15, 0, 8, _IPV6),
        (0x20, 0, 0, 24),  # where an IPv6 packet goes, four bytes at a time
        (0x15, 0, 7, 0),
        (0x20, 0, 0, 28),
        (0x15, 0, 5, 0),
        (0x20, 0, 0, 32),
        (0x15, 0, 3, 0),
        (0x20, 0, 0, 36),
        (0x15, 0, 1, 1),
        (0x06, 0, 0, 0),  # dropped
        (0x06, 0, 0, 512),  # heard
    ]
    packed = b"".join(struct.pack("=HBBI", *one) for one in code)
    buffer = ctypes.create_string_buffer(packed)
    listener = socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM, 0)
    program = struct.pack("HL", len(code), ctypes.addressof(buffer))
    listener.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)
    listener.bind(("lo", _ALL_PROTOCOLS))
    return listener


def _hear(listener: socket.socket, heard: set[str]) -> None:
    while True:
        packet, (_, protocol, direction, *_) = listener.recvfrom(512)
        if direction == _OUTGOING:
            heard.update(filter(None, [_told(protocol, packet)]))


def _told(protocol: int, packet: bytes) -> str:
    """What a packet is, in words; empty for answers of the kernel."""
    if protocol == _IPV4:
        start, kind = 4 * (packet[0] & 15), packet[9]
        address = str(ipaddress.ip_address(packet[16:20]))
    else:
        start, kind = 40, packet[6]
        address = str(ipaddress.ip_address(packet[24:40]))
    (port,) = struct.unpack_from("!H", packet, start + 2)
    if kind == socket.IPPROTO_TCP:
        begins = packet[start + 13] & 0x12 == 0x02  # SYN without ACK
        return f"connects to {address} port {port} (TCP)" if begins else ""
    if kind == socket.IPPROTO_UDP:
        return f"looks up {_name(packet[start + 20 :])}" if port == 53 else f"sends to {address} port {port} (UDP)"
    if kind in (socket.IPPROTO_ICMP, socket.IPPROTO_ICMPV6):
        return f"pings {address}" if packet[start] in (8, 128) else ""
    return f"sends to {address} (protocol {kind})"


def _name(question: bytes) -> str:
    labels, at = [], 0
    while at < len(question) and question[at]:
        labels.append(question[at + 1 : at + 1 + question[at]].decode("ascii", "replace"))
        at += 1 + question[at]
    return ".".join(labels)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
