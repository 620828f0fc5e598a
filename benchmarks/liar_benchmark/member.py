"""A liar's process: the agent of a real device, with a lying link or trainer.

python benchmarks/liar_benchmark/member.py silent mqtt://127.0.0.1:1883 data.npz held-out.npz profile.toml log.csv state
"""

import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from liar_benchmark.lying import GarblingTrainer, create_link_wrapper
from subfleet.agent.states import AgentSettings
from subfleet.device.describing import describe_device
from subfleet.device.meters import ReplayMeter
from subfleet.device.runtimes import choose_trainer
from subfleet.device_profiles import ReplayedLog, load_log, load_profile
from subfleet.edge_client.session import Device, EdgeSession
from subfleet.edge_client.store import AgentStore
from subfleet.edge_client.thread_worker import TrainingWorker
from subfleet.protocol.jobs import Trainer
from subfleet.protocol.topics import Topics
from subfleet.transport.address import mqtt_client_id, parse_url
from subfleet.transport.mqtt import MqttTransport
from subfleet.transport.waiting import WaitingTransport


def main(arguments: Sequence[str]) -> int:
    """Take part until the run is finished."""
    kind, address, data, held_out, profile_file, log_file, state = arguments
    topics, profile = Topics(), load_profile(profile_file)
    trainer, summary = choose_trainer(profile.runtimes, data, profile.provider)
    lying_trainer: Trainer = GarblingTrainer(trainer) if kind == "garbler" else trainer
    meter = ReplayMeter(ReplayedLog(load_log(log_file)))
    description = describe_device(kind, profile, trainer.target, summary, meter, held_out=trainer.describe(held_out))
    settings = AgentSettings(profile=description, data_bytes=summary.data_bytes, leave_when_finished=True)
    broker = WaitingTransport(MqttTransport(parse_url(address), mqtt_client_id("main", "device", kind)), lambda: False)
    with AgentStore.open(Path(state), profile.disk_limit_bytes) as store:
        worker = TrainingWorker(
            {trainer.target: lying_trainer},
            blobs=store.blobs,
            work_folder=store.work_folder,
            data=data,
            held_out=held_out,
            threads=profile.threads,
        )
        device = Device(store=store, worker=worker, meter=meter)
        EdgeSession(settings, create_link_wrapper(kind, topics)(broker), topics, device).run(lambda: False)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
