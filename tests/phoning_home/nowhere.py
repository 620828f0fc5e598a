"""Runs a command in an isolated network, and writes down everything that the command sends.

Usage: `unshare --net --mount [--map-root-user] python nowhere.py REPORT COMMAND ...`. The new network has only a
loopback device, to which every address is routed, so that all packets are captured and refused. Names are looked up
with a server that does not exist; the network has an address, as some programs look nothing up without one. Commands
are not traced, and run at full speed. REPORT gets a line for each address and port, and for each name.
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
"""An address that is reserved for documentation."""
_OWN = ("192.0.2.1/32", "2001:db8::1/128")
"""Addresses of the machine besides loopback; without them, some programs look nothing up."""
_ETC = {
    "resolv.conf": f"nameserver {NAME_SERVER}\noptions timeout:1 attempts:1\n",
    "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files dns\n",
    "hosts": "127.0.0.1 localhost\n::1 localhost\n",
}
_CACHES = ("/run/nscd", "/var/run/nscd", "/run/systemd/resolve", "/run/dbus")
"""Folders of services that look up names outside this network."""
_ALL_PROTOCOLS = 0x0003
_IPV4, _IPV6 = 0x0800, 0x86DD
_OUTGOING = 4
_SO_ATTACH_FILTER = 26


def main(report: Path, command: list[str]) -> int:
    """Run the command, and return its exit code."""
    _make_network()
    _make_names(report.parent)
    traffic: set[str] = set()
    listener = _open_listener()
    threading.Thread(target=_capture, args=(listener, traffic), daemon=True).start()
    process = subprocess.Popen(command, start_new_session=True)
    code = process.wait()
    time.sleep(0.05)  # the last packets may still be in the listener's queue
    with contextlib.suppress(ProcessLookupError):  # usually no child process is left
        os.killpg(process.pid, signal.SIGKILL)
    report.write_text("".join(f"{line}\n" for line in sorted(traffic)), encoding="utf-8")
    return code


def _make_network() -> None:
    with socket.socket() as any_socket:
        fcntl.ioctl(any_socket, 0x8914, struct.pack("16sH14x", b"lo", 0x41))  # SIOCSIFFLAGS: up and running
    for network in _OWN:
        address, _, length = network.partition("/")
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        packed = socket.inet_pton(family, address)
        head = struct.pack("=BBBBI", family, int(length), 0x80, 0, 1)  # IFA_F_PERMANENT, on the first device
        _ask_kernel(20, head + _attribute(2, packed) + _attribute(1, packed), family)
        # A local route to the first device, so that every address of the family is local.
        route = struct.pack("=BBBBBBBBI", family, 0, 0, 0, 255, 3, 254, 2, 0)
        _ask_kernel(24, route + _attribute(4, struct.pack("=I", 1)), family)


def _attribute(kind: int, content: bytes) -> bytes:
    return struct.pack("=HH", 4 + len(content), kind) + content


def _ask_kernel(kind: int, content: bytes, family: int) -> None:
    """Send a request by rtnetlink(7), and wait for its acknowledgement."""
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0) as kernel:
        kernel.send(struct.pack("=IHHII", 16 + len(content), kind, 0x405, 1, 0) + content)
        (error,) = struct.unpack_from("=i", kernel.recv(4096), 16)
    if error and family == socket.AF_INET:  # some machines have no IPv6
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


def _open_listener() -> socket.socket:
    """A socket that receives each packet to an address that is not loopback; the kernel drops the others."""
    # Offsets count from the network header. An instruction: code, jumps if true and if false, operand.
    code = [
        (0x28, 0, 0, 0xFFFFF000),  # the protocol
        (0x15, 0, 3, _IPV4),
        (0x20, 0, 0, 16),  # the destination of an IPv4 packet
        (0x54, 0, 0, 0xFF000000),
        (0x15, 9, 10, 0x7F000000),
        (0x15, 0, 8, _IPV6),
        (0x20, 0, 0, 24),  # the destination of an IPv6 packet, four bytes at a time
        (0x15, 0, 7, 0),
        (0x20, 0, 0, 28),
        (0x15, 0, 5, 0),
        (0x20, 0, 0, 32),
        (0x15, 0, 3, 0),
        (0x20, 0, 0, 36),
        (0x15, 0, 1, 1),
        (0x06, 0, 0, 0),  # drop
        (0x06, 0, 0, 512),  # accept
    ]
    packed = b"".join(struct.pack("=HBBI", *instruction) for instruction in code)
    buffer = ctypes.create_string_buffer(packed)
    listener = socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM, 0)
    program = struct.pack("HL", len(code), ctypes.addressof(buffer))
    listener.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)
    listener.bind(("lo", _ALL_PROTOCOLS))
    return listener


def _capture(listener: socket.socket, traffic: set[str]) -> None:
    while True:
        packet, (_, protocol, direction, *_) = listener.recvfrom(512)
        if direction == _OUTGOING:
            traffic.update(filter(None, [_describe_packet(protocol, packet)]))


def _describe_packet(protocol: int, packet: bytes) -> str:
    """Describe a packet; empty for answers of the kernel."""
    if protocol == _IPV4:
        start, transport = 4 * (packet[0] & 15), packet[9]
        address = str(ipaddress.ip_address(packet[16:20]))
    else:
        start, transport = 40, packet[6]
        address = str(ipaddress.ip_address(packet[24:40]))
    (port,) = struct.unpack_from("!H", packet, start + 2)
    if transport == socket.IPPROTO_TCP:
        is_syn = packet[start + 13] & 0x12 == 0x02  # SYN without ACK
        return f"connects to {address} port {port} (TCP)" if is_syn else ""
    if transport == socket.IPPROTO_UDP:
        return f"looks up {_read_name(packet[start + 20 :])}" if port == 53 else f"sends to {address} port {port} (UDP)"
    if transport in (socket.IPPROTO_ICMP, socket.IPPROTO_ICMPV6):
        return f"pings {address}" if packet[start] in (8, 128) else ""
    return f"sends to {address} (protocol {transport})"


def _read_name(question: bytes) -> str:
    labels, offset = [], 0
    while offset < len(question) and question[offset]:
        labels.append(question[offset + 1 : offset + 1 + question[offset]].decode("ascii", "replace"))
        offset += 1 + question[offset]
    return ".".join(labels)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
