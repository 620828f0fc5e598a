"""The plan of a score task: its training program, and a gradient of each batch beside it."""

from pathlib import Path

import pytest
import torch
from emulation.batch_cases import config

from subfleet.aggregation.views import Views
from subfleet.elastic.building import build_module
from subfleet.elastic.maps import extract
from subfleet.elastic.model_state import ModelState
from subfleet.export.pool import ExportPool
from subfleet.methods.fedfa import FedFA
from subfleet.programs.supply import Supply, build_train_request
from subfleet.programs.worker import Snapshot, Threads, Worker
from subfleet.protocol.programs import decode_program
from subfleet.rounds.signals import RequestDone
from subfleet.rounds.state import RunState
from subfleet.rounds.tasks import BATCHES, derive_score_training
from subfleet.rounds.work import ScoringRequest
from subfleet.serving.run_context import create_context
from subfleet.transport.blob_store import BlobStore

pytestmark = [pytest.mark.slow, pytest.mark.export]


def test_a_score_is_planned_with_the_gradients_that_it_keeps(exports: ExportPool, tmp_path: Path) -> None:
    context = create_context(config(method=FedFA(choice="score")), "run-1")
    threads = Threads()
    supply = Supply(
        Views(context=context, samples=torch.zeros(1, 1, 8, 8)),
        exports,
        threads,
        blobs=BlobStore(tmp_path / "blobs"),
        models_folder=tmp_path / "models",
    )
    worker, sizes = Worker(supply.duties, threads), context.space
    network = context.first.network
    model = ModelState(shared=build_module(network, network.full_architecture()).state_dict())
    request = ScoringRequest(client_id="ada", round=1, target="onnx", sizes=sizes)
    worker.begin(request, Snapshot(state=RunState(), model=model))
    worker.finish(exports=True)
    (done,) = worker.events()
    worker.close()
    assert isinstance(done, RequestDone)
    assert [scorable.size for scorable in done.result] == list(sizes)
    training = derive_score_training(context.training(1))
    for scorable in done.result:
        export = build_train_request(network, scorable.size, "onnx", training)
        manifest = decode_program(exports.submit(export).result().read_bytes()).manifest
        gradient_bytes = sum(4 * tensor.numel() for tensor in extract(network, scorable.size, model.shared).values())
        assert scorable.planned_peak_bytes >= manifest.planned_peak_bytes + BATCHES * gradient_bytes
