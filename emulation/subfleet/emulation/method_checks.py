"""Three rounds of a method with the real server, agents and programs: does its loss fall, and is nothing else moved?"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from safetensors.torch import load

from subfleet.device_profiles import DeviceProfile, LogRow, ResourceLog
from subfleet.elastic.families import init_state
from subfleet.elastic.grafting import graft
from subfleet.elastic.maps import tensor_maps
from subfleet.elastic.model_state import unpacked
from subfleet.elastic.network import ModelConfig, Network
from subfleet.emulation.virtual.description import VirtualClient, VirtualExperiment
from subfleet.emulation.virtual.exports import SettledExports
from subfleet.emulation.virtual.figures import violates
from subfleet.emulation.virtual.run import VirtualResult, run_in_process
from subfleet.protocol.errors import SubfleetError
from subfleet.protocol.readings import Reading
from subfleet.protocol.subnet import SubnetSpec
from subfleet.protocol.training import TrainingSettings
from subfleet.server.config import LogClock, ServerConfig
from subfleet.server.methods import METHODS, AnyMethod
from subfleet.server.methods.fedfa import FedFA
from subfleet.server.methods.policies import as_folded
from subfleet.server.planning import plan_of
from subfleet.server.rounds import Plan
from subfleet.tasks import Dataset, digits

__all__ = ["ROUNDS", "check_methods", "verdict_of"]

ROUNDS = 3
_MODEL = ModelConfig(family="mlp", input_shape=(1, 8, 8), class_count=10, widths=(32,), depths=(3,), group_size=4)
_SAMPLES = 200
_PLENTY_BYTES = 10**9
_COMMUNICATION_S = 1.0


def check_methods(
    exports: SettledExports, methods: Mapping[str, type[AnyMethod]] = METHODS
) -> Iterator[tuple[str, str]]:
    """Try every method; yields its name and "ok", or the reason why not."""
    for name, kind in methods.items():
        yield name, verdict_of(kind(), exports)


def verdict_of(method: AnyMethod, exports: SettledExports) -> str:
    """What three rounds of a method show: "ok", or the first thing that is not as it should be."""
    try:
        experiment = _experiment(method)
        plan = plan_of(experiment.config, "check")
        result = run_in_process(experiment, exports)
    except SubfleetError as error:
        return str(error)
    return next(_complaints(plan, result), "ok")


def _experiment(method: AnyMethod) -> VirtualExperiment:
    """Three clients on digits, whose links carry a small, a middling and the second largest size of the space."""
    config = _config(method)
    space = plan_of(config, "check").candidates
    places = (0, len(space) // 2, max(0, len(space) - 2))
    whole = digits()
    clients = tuple(
        VirtualClient(
            client_id=f"client{number}",
            profile=DeviceProfile(name="checked", title="A device of a check", memory_share=1.0, runtimes=("onnx",)),
            data=_part(whole, number),
            log=_log(space[place].weight_bytes),
        )
        for number, place in enumerate(places)
    )
    return VirtualExperiment(config=config, clients=clients, evaluation=_part(whole, len(places)))


def _config(method: AnyMethod) -> ServerConfig:
    return ServerConfig(
        name="check",
        model=_MODEL,
        evaluation_data="",
        rounds=ROUNDS,
        min_clients=3,
        training=TrainingSettings(epochs=2, batch_size=16, learning_rate=0.05),
        method=method,
        rates=(0.25, 0.5, 1.0),
        communication_s=_COMMUNICATION_S,
        clock=LogClock(),
        targets=("onnx",),
        deploy_targets=(),
        seed=1,
    )


def _part(whole: Dataset, number: int) -> Dataset:
    here = slice(number * _SAMPLES, (number + 1) * _SAMPLES)
    return Dataset(inputs=whole.inputs[here], labels=whole.labels[here])


def _log(link_bytes: int) -> ResourceLog:
    rate_bps = 8 * (link_bytes + 1) / _COMMUNICATION_S
    reading = Reading(memory_free_bytes=_PLENTY_BYTES, downlink_bps=rate_bps, uplink_bps=rate_bps)
    rows = (LogRow(t_s=0.0, reading=reading),)
    return ResourceLog(device="checked", source="a check of methods", licence="none", rows=rows)


def _complaints(plan: Plan, result: VirtualResult) -> Iterator[str]:
    first, last = result.rounds[0], result.rounds[-1]
    if not last.loss < first.loss:
        yield f"the loss does not fall: {first.loss:.4f} after round 1 and {last.loss:.4f} after round {ROUNDS}"
    rows = [row for record in result.rounds for row in record.clients]
    for row in rows:
        if row.status != "folded":
            yield f"client {row.client_id} took no part: {row.status}"
        elif row.bytes_down < row.weight_bytes or row.bytes_up < row.update_bytes:
            yield f"client {row.client_id} moved {row.bytes_down} and {row.bytes_up} bytes, less than its weights"
        elif violates(row):
            yield f"client {row.client_id} was given more than its budget"
    # What a method does to the whole model after a round moves more than was trained.
    whole = plan.policies.after_round is not as_folded or plan.policies.distillation is not None
    moved = () if whole else _moved_elsewhere(plan, result)
    if moved:
        yield f"tensor {moved[0]!r} moved where nobody trained it"


def _moved_elsewhere(plan: Plan, result: VirtualResult) -> list[str]:
    """Tensors of the shared model that changed at places that no client held in any round."""
    before: Mapping[str, Any] = init_state(plan.network, plan.config.seed)
    after = unpacked(load(result.model)).shared
    specs = [one.spec for rounds in result.trained.values() for one in rounds.values()]
    if isinstance(plan.config.method, FedFA):
        specs = [graft(plan.network, spec).spec for spec in specs]
    held = _held(plan.network, specs)
    return [name for name, old in before.items() if not torch.equal(old[~held[name]], after[name][~held[name]])]


def _held(network: Network, specs: list[SubnetSpec]) -> dict[str, torch.Tensor]:
    counts = {name: torch.zeros(decl.shape, dtype=torch.int32) for name, decl in network.tensors.items()}
    for spec in specs:
        shapes = network.shapes(spec)
        for name, tensor_map in tensor_maps(network, spec).items():
            tensor_map.scatter(torch.ones(shapes[name], dtype=torch.int32), counts[name])
    return {name: count > 0 for name, count in counts.items()}
