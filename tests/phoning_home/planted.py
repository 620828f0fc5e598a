"""Sends reports in every known way, writes the file in its argument, and uses loopback, which is no report."""

import atexit
import contextlib
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

CHILD = "import contextlib, socket\nwith contextlib.suppress(OSError): socket.gethostbyname('by-a-child.example')"


def look_up(name: str, flags: int = 0) -> None:
    with contextlib.suppress(OSError):
        socket.getaddrinfo(name, 443, flags=flags)


def connect(address: str) -> None:
    with contextlib.suppress(OSError):
        socket.create_connection((address, 443), timeout=5)


def send(address: str, port: int) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
        sender.sendto(b"used", (address, port))


def look_up_later() -> None:
    time.sleep(0.1)
    look_up("by-a-thread.example")


def main(file: Path) -> None:
    look_up("at-once.example")
    look_up("where-there-is-a-network.example", socket.AI_ADDRCONFIG)
    look_up(socket.gethostname())
    connect("203.0.113.9")
    connect("2001:db8:1::9")
    send("203.0.113.9", 9999)
    send("224.0.0.251", 5353)
    subprocess.run([sys.executable, "-c", CHILD], check=True)
    threading.Thread(target=look_up_later, daemon=True).start()
    atexit.register(look_up, "at-the-end.example")
    file.write_text("who I am", encoding="utf-8")
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
        client.sendall(b"nobody else hears it")
    look_up("localhost")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
