"""Methods on a chain with a separate width for each layer: all sizes that they assign are its submodels."""

from dataclasses import replace
from pathlib import Path

import pytest
from server.methods.method_cases import QUICK

from subfleet.elastic.families.records.plain import Vgg
from subfleet.methods.fedfa import FedFA
from subfleet.protocol.errors import ConfigError
from subfleet.testing import MethodContract
from subfleet.testing.rounds import make_context

MODEL = Vgg(
    input_shape=(1, 4, 4), class_count=4, widths=(4, 2), depths=(3, 2), group_size=2, layer_widths=(6, 8, 4, 6, 2)
)
METHODS = {**QUICK, "fedfa": FedFA(grafting=False), "fedfa of widths": FedFA(depth=False)}
"""Every method, except for FedFA's grafting, which copies blocks between layers of different widths."""


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
def test_sizes_are_submodels_and_untrained_elements_do_not_change(name: str, tmp_path: Path) -> None:
    contract = MethodContract()
    contract.method, contract.model = METHODS[name], MODEL
    contract.test_placed_submodels_keep_their_size()
    contract.test_a_round_with_learning_rate_0_changes_nothing(tmp_path / "still")
    contract.test_elements_that_no_client_has_keep_their_bits(tmp_path / "moved")


def test_what_grafts_blocks_refuses_layers_with_widths_of_their_own() -> None:
    with pytest.raises(ConfigError, match=r"leave layer_widths empty, or set grafting = false or depth = false"):
        make_context(FedFA(), MODEL)
    assert len(make_context(FedFA(), replace(MODEL, layer_widths=())).space) > 1
