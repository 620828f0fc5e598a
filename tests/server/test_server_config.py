from pathlib import Path

import pytest
from server.server_rig import config

from subfleet.device_profiles.populations import parse_population
from subfleet.device_profiles.profiles import parse_profile
from subfleet.elastic.families.records.residual import Mlp, PreactResNet
from subfleet.methods import METHODS
from subfleet.methods.fedavg import FedAvg
from subfleet.protocol.errors import ConfigError, FileError
from subfleet.protocol.training import AugmentationSettings
from subfleet.serving.run_context import create_context
from subfleet.settings.fleet import FleetSettings
from subfleet.settings.overrides import parse_override
from subfleet.settings.reading import read_run
from subfleet.settings.sections import LogClock

WHOLE = """
name = "digits"
data.test = "test.npz"
rounds = 3
rates = [0.5, 1.0]

[model]
family = "mlp"
input_shape = [64]
class_count = 10
widths = [8, 8]
depths = [1, 2]

[training]
epochs = 2
learning_rate = 0.05
optimiser = { momentum = 0.5 }

[method]
type = "fedavg"
weighting = "uniform"

[clock]
step_s = 30.0

[deadlines]
round_s = 60.0
"""


def _file(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "fleet.toml"
    path.write_text(text)
    return path


def test_a_file_gives_a_complete_configuration(tmp_path: Path) -> None:
    run = read_run(_file(tmp_path, WHOLE))
    assert (run.name, run.rounds, run.rates) == ("digits", 3, (0.5, 1.0))
    assert run.model == Mlp(input_shape=(64,), class_count=10, widths=(8, 8), depths=(1, 2))
    assert run.training.optimiser.momentum == 0.5
    assert run.method == FedAvg(weighting="uniform")
    assert run.log_time_s(3) == 60.0
    assert (run.deadlines.round_s, run.strict) == (60.0, True)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("rounds = 3", "runds = 3", "runds is an unknown key; did you mean 'rounds'?"),
        ("step_s = 30.0", "pace = 30.0", "clock.pace is an unknown key; known are ['start_s', 'step_s']"),
        ("rounds = 3", 'rounds = "3"', "rounds is '3', but must be a whole number"),
        ('data.test = "test.npz"', "", "data is missing"),
        ('family = "mlp"', 'family = "mpl"', "model has the family 'mpl', but must be one of"),
        ('data.test = "test.npz"', "data.held_out = 0.1", "data: test and name are both empty; set test"),
        ('data.test = "test.npz"', 'data.test = "test.npz"\ndata.held_out = 1.0', "held_out is 1.0, but must be"),
        ("rounds = 3", "rounds = 0", "must be 1 or more"),
        ('name = "digits"', 'name = "a/b"', "letters, digits"),
        ('type = "fedavg"', 'type = "fedsomething"', "must be one of ['anycostfl', 'clustered', 'dynamic_selection'"),
        ("step_s = 30.0", "step = 30.0", "clock.step is an unknown key; did you mean 'step_s'?"),
        ("momentum = 0.5", "momentum = 1.5", "below 1"),
        ("round_s = 60.0", "round_s = 0.0", "must be above 0"),
        (
            "rounds = 3",
            "rounds = 3\nmax_client_fraction = 0.0",
            "max_client_fraction is 0.0, but must be above 0 and at most",
        ),
        ("rates = [0.5, 1.0]", "rates = [0.5, 2.0]", "at most 1"),
        ("widths = [8, 8]", "widths = [7, 8]", "group_size"),
        ("[model]", "[model", "is not TOML"),
    ],
)
def test_a_mistake_is_one_sentence_that_names_it(tmp_path: Path, old: str, new: str, message: str) -> None:
    assert old in WHOLE
    with pytest.raises(ConfigError) as caught:
        read_run(_file(tmp_path, WHOLE.replace(old, new)))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_all_problems_are_reported_at_once(tmp_path: Path) -> None:
    wrong = WHOLE
    for old, new in (
        ('name = "digits"', 'name = "a/b"'),
        ("rounds = 3", "runds = 3\nmin_clients = 0\nquorum = 2.0\ncommunication_s = 0.0"),
        ('data.test = "test.npz"', ""),
        ("class_count = 10", "class_count = 0\ndepth = 3"),
        ("epochs = 2", 'epochs = "2"'),
        ("momentum = 0.5", "momentum = 1.5, weight_decay = -1.0"),
        ('type = "fedavg"', 'type = "fedavgg"'),
        ("step_s = 30.0", "step = 30.0"),
        ("round_s = 60.0", "round_s = 0.0\nlease_s = -1.0"),
    ):
        assert old in wrong
        wrong = wrong.replace(old, new)
    path = _file(tmp_path, wrong)
    with pytest.raises(ConfigError) as caught:
        read_run(path)
    head, *problems = str(caught.value).split("\n  - ")
    assert head == f"run {path} has 15 problems:"
    expected = [
        "data is missing",
        "runds is an unknown key; did you mean 'rounds'?",
        "name is 'a/b', but must be 1 to 64 letters",
        "min_clients is 0, but must be 1 or more",
        "quorum is 2.0, but must be above 0",
        "communication_s is 0.0, but must be above 0",
        "model.depth is an unknown key; did you mean 'depths'?",
        "model.class_count is 0, but must be 1 or more",
        "training.epochs is '2', but must be a whole number",
        "training.optimiser.momentum is 1.5",
        "training.optimiser.weight_decay is -1.0",
        "method has the type 'fedavgg', but must be one of",
        "clock.step is an unknown key; did you mean 'step_s'?",
        "deadlines.round_s is 0.0, but must be above 0",
        "deadlines.lease_s is -1.0, but must be above 0",
    ]
    assert [[text for text in problems if text.startswith(words)] for words in expected] == [
        [text] for text in sorted(problems, key=lambda text: [text.startswith(words) for words in expected].index(True))
    ]
    assert next(text for text in problems if "fedavgg" in text).endswith("; did you mean 'fedavg'?")


def test_a_missing_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="cannot be read"):
        read_run(tmp_path / "none.toml")


def test_the_fingerprint_follows_the_outcome_and_nothing_else() -> None:
    base = config()
    same = config(min_clients=1, fleet=FleetSettings(name="another"), keep_rounds=9)
    assert same.fingerprint() == base.fingerprint()
    variants = [config(seed=1), config(clock=LogClock(step_s=1.0)), config(method=FedAvg()), config(rates=(1.0,))]
    variants.append(config(max_client_fraction=1.0))
    assert len({base.fingerprint(), *(other.fingerprint() for other in variants)}) == 6


def test_the_table_of_methods_names_each_by_its_type() -> None:
    assert all(name == kind.TYPE for name, kind in METHODS.items())
    assert len({kind.INFO.title for kind in METHODS.values()}) == len(METHODS) >= 9


def test_the_learning_rate_follows_the_rounds_and_the_seed_the_run(tmp_path: Path) -> None:
    changed = WHOLE.replace("rounds = 3", "rounds = 3\nseed = 5\nlearning_rate_decay = 0.5")
    config = read_run(_file(tmp_path, changed))
    trainings = [config.compute_training(number) for number in (1, 2, 3)]
    assert [training.learning_rate for training in trainings] == [0.05, 0.025, 0.0125]
    assert {training.seed for training in trainings} == {5}
    assert {training.epochs for training in trainings} == {2}


AUGMENTED = WHOLE.replace("epochs = 2\n", 'epochs = 2\naugmentation = { name = "crop", padding = 2 }\n')


def test_images_are_augmented_by_one_line_and_other_inputs_are_refused_before_a_run(tmp_path: Path) -> None:
    run = read_run(_file(tmp_path, AUGMENTED.replace("[64]", "[1, 8, 8]")))
    assert run.training.augmentation == AugmentationSettings(name="crop", padding=2)
    assert create_context(run, "digits-1").training(1).augmentation.padding == 2
    with pytest.raises(ConfigError, match=r"samples have shape \(64,\)"):
        create_context(read_run(_file(tmp_path, AUGMENTED)), "digits-1")
    with pytest.raises(ConfigError, match="augmentation 'flip' has no padding"):
        read_run(_file(tmp_path, AUGMENTED.replace('"crop"', '"flip"')))


def test_a_preset_names_a_published_network_and_may_be_changed(tmp_path: Path) -> None:
    start = WHOLE.index("[model]")
    end = WHOLE.index("\n[", start) + 1
    model = (
        '[model]\npreset = "resnet50"\ninput_shape = [3, 32, 32]\nclass_count = 10\ngroup_size = 8\nnorm = "group"\n\n'
    )
    network = read_run(_file(tmp_path, WHOLE[:start] + model + WHOLE[end:])).model
    assert isinstance(network, PreactResNet)
    assert (network.TYPE, network.block, network.depths, network.norm, network.group_size) == (
        "preact_resnet",
        "bottleneck",
        (3, 4, 6, 3),
        "group",
        8,
    )
    wrong = model.replace("resnet50", "resnet51").replace("group_size", "groups")
    with pytest.raises(ConfigError, match=r"no preset 'resnet51'; choose one of .* did you mean 'resnet5"):
        read_run(_file(tmp_path, WHOLE[:start] + wrong + WHOLE[end:]))
    wrong = model.replace("input_shape = [3, 32, 32]\nclass_count = 10", 'class_count = "ten"\ngroups = 1')
    with pytest.raises(ConfigError) as caught:
        read_run(_file(tmp_path, (WHOLE[:start] + wrong + WHOLE[end:]).replace("rounds = 3", "rounds = 0")))
    assert sorted(str(caught.value).split("\n  - ")[1:]) == [
        "model.class_count is 'ten', but must be a whole number",
        "model.groups is an unknown key; did you mean 'group_size'?",
        "model.input_shape is missing",
        "rounds is 0, but must be 1 or more",
    ]


@pytest.mark.parametrize("value", ["[" * 100_000 + "]" * 100_000, "9" * 5000], ids=["nested", "digits"])
def test_toml_that_python_cannot_hold_is_one_sentence_too(tmp_path: Path, value: str) -> None:
    path = tmp_path / "run.toml"
    path.write_text(f"rounds = {value}\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="is not TOML: ") as caught:
        read_run(path)
    assert len(str(caught.value)) < 400
    with pytest.raises(ConfigError, match="is not valid TOML: "):
        parse_profile(f"name = {value}", "x")
    with pytest.raises(ConfigError, match="is not valid TOML: "):
        parse_population(f"name = {value}", "x")
    assert parse_override(f"rounds={value}") == (("rounds",), value)
