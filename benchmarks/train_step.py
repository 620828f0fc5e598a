"""Step time, parity and memory of exported training programs, compared with eager PyTorch in its fastest layout.

python benchmarks/train_step.py                           # the whole zoo, one thread and two; prints tables
python benchmarks/train_step.py --json                    # ends with one JSON object
python benchmarks/train_step.py --models mlp ds_cnn --targets onnx --threads 1 --quick
python benchmarks/train_step.py --models mlp --profile    # a step's time by operator

SUBFLEET_DATA names the folder of real data; without it, learnable data are made from a seed.
"""

import argparse
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType

import torch
from rich.console import Console
from smoke import parse_arguments
from step_benchmark import parity
from step_benchmark.data import Samples, load_samples
from step_benchmark.eager import EagerStep, list_layouts
from step_benchmark.memory import measure_peak_bytes
from step_benchmark.profiling import print_profile
from step_benchmark.programs import TARGETS, ProgramStep, export, measure_lookup_ms
from step_benchmark.report import Result, print_tables, summarise
from step_benchmark.stepping import Start, Stepper
from step_benchmark.timing import measure_medians_s
from step_benchmark.zoo import ZOO, ZooModel, build_seeded

from subfleet.device_profiles import detect_packing_width
from subfleet.protocol.errors import SubfleetError
from subfleet.protocol.memory_plan import compute_peak_bytes
from subfleet.protocol.programs import Program
from subfleet.protocol.training import OptimiserSettings

OPTIMISER = OptimiserSettings(momentum=0.9, weight_decay=5e-4)
LEARNING_RATES: Mapping[str, float] = MappingProxyType(
    {
        "mlp": 0.03,
        "mobilenet_v2": 0.02,
        "mobilenet_v3_small": 0.02,
        "vgg13": 0.001,
        "char_lstm": 0.5,
        "transformer_lm": 0.03,
        "ds_cnn": 0.1,
    }
)
"""Learning rates at which ten steps learn something and small differences grow little; 0.005 for the others."""
TIMING_LEARNING_RATE = 1e-6
"""So small that thousands of steps on one batch keep all values in their usual range."""
BUSY_LOAD = 0.5
ROUNDS = 9
QUICK_ROUNDS = 3


def main() -> None:
    """Measure and print."""
    options = _parse_arguments()
    if os.getloadavg()[0] > BUSY_LOAD:
        _print_progress(
            f"the load average is {os.getloadavg()[0]:.1f}: ratios with more than one thread are not to be trusted"
        )
    console = Console(stderr=options.json, width=200)
    if options.profile:
        for model in _find_models(options.models):
            for target in options.targets:
                _profile(model, target, options.threads[0], console)
        return
    results: list[Result] = []
    for model in _find_models(options.models):
        results += _measure(model, options)
    print_tables(results, console)
    if options.json:
        print(json.dumps(summarise(results)))


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(ZOO), default=list(ZOO), metavar="MODEL")
    parser.add_argument("--targets", nargs="+", choices=TARGETS, default=list(TARGETS))
    parser.add_argument("--threads", type=_parse_numbers, default=[1, 2], help="such as 1,2")
    parser.add_argument(
        "--repeats", type=int, default=0, help=f"rounds of timing; {ROUNDS}, with --quick {QUICK_ROUNDS}"
    )
    parser.add_argument("--quick", action="store_true", help="few rounds, no measured memory")
    parser.add_argument("--no-parity", action="store_true", help="only times")
    parser.add_argument("--no-memory", action="store_true", help="no measured memory")
    parser.add_argument("--json", action="store_true", help="end with one JSON object; tables go to standard error")
    parser.add_argument("--profile", action="store_true", help="time by operator instead")
    return parse_arguments(parser, models=["mlp"], targets=["onnx"], threads=[1], repeats=1, quick=True)


def _parse_numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def _find_models(names: Sequence[str]) -> Iterator[ZooModel]:
    return (ZOO[name] for name in names)


def _print_progress(words: str) -> None:
    print(words, file=sys.stderr, flush=True)


def _measure(model: ZooModel, options: argparse.Namespace) -> list[Result]:
    """Measure one model on all targets."""
    torch.set_num_threads(1)
    results, programs = [], {}
    for target in options.targets:
        result = Result(model=model.name, target=target, smooth=model.smooth)
        program = _export(model, target, result)
        if program is not None:
            programs[target] = program
        results.append(result)
    exported = [result for result in results if result.target in programs]
    if not exported:
        return results
    samples = load_samples(model, parity.STARTS * model.batch_size)
    if not options.no_parity:
        _compare(model, samples, programs, exported)
    rounds = options.repeats or (QUICK_ROUNDS if options.quick else ROUNDS)
    for threads in options.threads:
        _measure_times(model, samples, programs, exported, threads=threads, rounds=rounds)
    if not (options.quick or options.no_memory):
        for result in exported:
            result.measured_bytes = measure_peak_bytes(programs[result.target], _create_start(model, 0.001), samples)
            _print_progress(f"{model.name} {result.target}: grew by {result.measured_bytes / 1e6:.1f} MB")
    return results


def _export(model: ZooModel, target: str, result: Result) -> Program | None:
    _print_progress(f"{model.name} {target}: exporting")
    try:
        exported = export(model, target, OPTIMISER)
    except SubfleetError as error:
        result.error = f"{type(error).__name__}: {error}"
    # One model that cannot be exported must not end the run, whatever its exporter raised.
    except Exception as error:  # noqa: BLE001
        result.error = f"unexpected {type(error).__name__}: {error}".partition("\n")[0]
    else:
        result.export_s = exported.export_s
        result.program_bytes = len(exported.program.body)
        memory = exported.program.manifest.memory
        result.planned_bytes = compute_peak_bytes(memory.peak_bytes, memory.packings, detect_packing_width())
        result.cached_first_ms, result.cached_ms = measure_lookup_ms(exported.program)
        return exported.program
    _print_progress(f"{model.name} {target}: {result.error}")
    return None


def _create_start(model: ZooModel, learning_rate: float) -> Start:
    state = {name: tensor.clone() for name, tensor in build_seeded(model, 0).state_dict().items()}
    return Start(model=model, state=state, optimiser=OPTIMISER, learning_rate=learning_rate)


def _compare(model: ZooModel, samples: Samples, programs: Mapping[str, Program], results: Sequence[Result]) -> None:
    torch.set_num_threads(1)
    start = _create_start(model, LEARNING_RATES.get(model.name, 0.005))
    steppers = {target: ProgramStep(program, start, threads=1) for target, program in programs.items()}
    parities = parity.compare(start, samples, steppers, layouts=list_layouts(model.build()))
    for result in results:
        result.parity = parities[result.target]
        _print_progress(
            f"{model.name} {result.target}: after one step {result.parity.one_step_over_eager:.2f} times as far as "
            f"eager, after {parity.STEPS} {result.parity.distance_over_eager:.2f} times"
        )


def _measure_times(
    model: ZooModel,
    samples: Samples,
    programs: Mapping[str, Program],
    results: Sequence[Result],
    *,
    threads: int,
    rounds: int,
) -> None:
    torch.set_num_threads(threads)
    start = _create_start(model, TIMING_LEARNING_RATE)
    layouts = list_layouts(model.build())
    steppers: dict[str, Stepper] = {layout: EagerStep(start, layout=layout) for layout in layouts}
    steppers |= {target: ProgramStep(program, start, threads=threads) for target, program in programs.items()}
    batch = parity.take_samples(samples, 0, model.batch_size)
    runners = {name: partial(stepper.step, stepper.prepare(batch)) for name, stepper in steppers.items()}
    found_s = measure_medians_s(runners, rounds=rounds)
    best = min(layouts, key=lambda layout: found_s[layout])
    for result in results:
        result.step_ms[threads] = found_s[result.target] * 1e3
        result.eager_ms[threads] = found_s[best] * 1e3
        result.eager_layout[threads] = best
        _print_progress(
            f"{model.name} {result.target}: {threads} thr, {result.step_ms[threads]:.2f} ms, eager "
            f"{result.eager_ms[threads]:.2f} ms, ratio {result.ratios[threads]:.2f}"
        )


def _profile(model: ZooModel, target: str, threads: int, console: Console) -> None:
    result = Result(model=model.name, target=target, smooth=model.smooth)
    program = _export(model, target, result)
    if program is not None:
        samples = load_samples(model, model.batch_size)
        print_profile(program, _create_start(model, TIMING_LEARNING_RATE), samples, threads, console)


if __name__ == "__main__":
    main()
