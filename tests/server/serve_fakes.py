"""A server process with fake exports, for a test that kills it: `python serve_fakes.py BROKER_URL STATE_FOLDER`."""

import sys
import threading
from pathlib import Path

from server.server_rig import FakeExports, Notes, config

from subfleet.link.device_link import connect_devices
from subfleet.serving.session import Server
from subfleet.transport.address import parse_url
from subfleet.transport.mqtt import MqttTransport


def main() -> None:
    folder = Path(sys.argv[2])
    server = Server(
        config(rounds=4),
        connect_devices("main", MqttTransport(parse_url(sys.argv[1]), "server")),
        Notes(),
        state_folder=folder / "state",
        exports=FakeExports(folder / "exports"),
    )
    result = server.run(threading.Event())
    sys.stdout.write(f"{result.model_path}\n")


if __name__ == "__main__":
    main()
