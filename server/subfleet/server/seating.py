"""One client's seat: what it is given, and what follows from its answers. Pure."""

from collections.abc import Sequence
from dataclasses import replace

from subfleet.protocol.messages import Profile, Refusal, Task, Telemetry
from subfleet.protocol.programs import ProgramRef
from subfleet.protocol.readings import Budget
from subfleet.server.answers import task_id
from subfleet.server.assignment import budget_of, why_nothing_fits
from subfleet.server.rounds import Action, Plan, Prepare, Prepared, RunState, Seat, SendTask

__all__ = ["assigned_seat", "measured_seat", "prepared_seat", "refused_seat", "task_for_models"]

_MOST_CHARACTERS = 400  # of a reason, as it stands in tables


def measured_seat(plan: Plan, profile: Profile, telemetry: Telemetry) -> Seat:
    """The seat of a client that has told what it can give; skipped where it can take no part at all."""
    seat = Seat(
        client_id=profile.client_id,
        device=profile.device,
        stage="answered",
        runtime=next((name for name in profile.runtimes if name in plan.config.targets), ""),
        budget=budget_of(telemetry.reading, telemetry.memory_budget_bytes, plan.config.communication_s),
        memory_free_bytes=telemetry.reading.memory_free_bytes,
        memory_budget_bytes=telemetry.memory_budget_bytes,
    )
    reason = _why_not(plan, profile, telemetry, seat.runtime)
    return replace(seat, stage="skipped", reason=reason[:_MOST_CHARACTERS]) if reason else seat


def _why_not(plan: Plan, profile: Profile, telemetry: Telemetry, runtime: str) -> str:
    model = plan.config.model
    if not telemetry.reading.available:
        return "the device is not available now"
    if profile.input_shape != model.input_shape:
        return f"its samples have shape {profile.input_shape}, but the model takes {model.input_shape}"
    if len(profile.class_counts) > model.class_count:
        return f"its data have {len(profile.class_counts)} classes, but the model has {model.class_count}"
    if not runtime:
        return f"it runs {', '.join(profile.runtimes)}, but programs are made for {', '.join(plan.config.targets)}"
    return ""


def assigned_seat(plan: Plan, state: RunState, seat: Seat) -> tuple[Seat, tuple[Action, ...]]:
    """Choose a subnet for a client that has answered."""
    return _choose(plan, state.round, seat, below=None)


def prepared_seat(
    plan: Plan, state: RunState, seat: Seat, event: Prepared, now_s: float
) -> tuple[Seat, tuple[Action, ...]]:
    """Send the task if the program's own plan fits the budget; else look at the next smaller subnet."""
    if seat.budget is None or seat.place is None or event.planned_peak_bytes > seat.budget.memory_bytes:
        return _choose(plan, state.round, seat, below=event.place)
    task_name = task_id(plan, state.round, seat.client_id, seat.attempt)
    task = Task(
        task_id=task_name,
        work="train",
        run_id=plan.run_id,
        round=state.round,
        client_id=seat.client_id,
        spec=plan.candidates[seat.place].spec,
        programs=(event.program,),
        weights=event.weights,
        training=plan.training(state.round),
        planned_peak_bytes=event.planned_peak_bytes,
        budget=seat.budget,
        deadline_s=max(0.0, plan.config.deadlines.round_s - (now_s - state.entered_s)),
        message_id=task_name,
    )
    return replace(seat, stage="out", task=task, reason=""), (SendTask(task=task),)


def refused_seat(plan: Plan, state: RunState, seat: Seat, refusal: Refusal) -> tuple[Seat, tuple[Action, ...]]:
    """A smaller task after a refusal for memory, while there is one and attempts are left; else the seat is refused."""
    # It is shown in terminals, where control characters act.
    detail = "".join(character if character.isprintable() else " " for character in refusal.detail)
    reason = f"{refusal.reason}: {detail}"[:_MOST_CHARACTERS]
    final = replace(seat, stage="refused", reason=reason)
    if refusal.reason != "memory" or state.phase != "train" or seat.attempt + 1 >= plan.config.max_attempts:
        return final, ()
    if seat.budget is None or seat.place is None:
        return final, ()
    memory_bytes = seat.budget.memory_bytes
    if refusal.available_bytes is not None:
        memory_bytes = max(0, min(memory_bytes, refusal.available_bytes))
    smaller = replace(seat, attempt=seat.attempt + 1, budget=replace(seat.budget, memory_bytes=memory_bytes))
    chosen, actions = _choose(plan, state.round, smaller, below=seat.place)
    return (chosen, actions) if chosen.open else (final, ())


def task_for_models(plan: Plan, state: RunState, seat: Seat, programs: Sequence[ProgramRef], now_s: float) -> Task:
    """The task that brings a client its own models."""
    task_name = task_id(plan, 0, seat.client_id, 0)
    return Task(
        task_id=task_name,
        work="deploy",
        run_id=plan.run_id,
        round=state.round,
        client_id=seat.client_id,
        spec=plan.candidates[seat.place or 0].spec,
        programs=tuple(programs),
        weights=None,
        training=None,
        planned_peak_bytes=0,
        budget=seat.budget or Budget(memory_bytes=0),
        deadline_s=max(0.0, plan.config.deadlines.deploy_s - (now_s - state.entered_s)),
        message_id=task_name,
    )


def _choose(plan: Plan, round_number: int, seat: Seat, *, below: int | None) -> tuple[Seat, tuple[Action, ...]]:
    if seat.budget is None:
        return replace(seat, stage="skipped", reason="it told no budget"), ()
    place = plan.method.assign(plan.candidates, seat.runtime, seat.budget, below=below)
    if place is None:
        return replace(seat, stage="skipped", place=None, reason=_why_none(plan, seat, below)), ()
    action = Prepare(
        client_id=seat.client_id, round=round_number, attempt=seat.attempt, place=place, target=seat.runtime
    )
    return replace(seat, stage="preparing", place=place, task=None), (action,)


def _why_none(plan: Plan, seat: Seat, below: int | None) -> str:
    if seat.budget is not None and below is not None:
        name = plan.candidates[below].spec.name
        return f"no subnet below {name!r} fits: the program needs more than the budget of {seat.budget.memory_bytes}"
    return why_nothing_fits(plan.candidates, seat.runtime, seat.budget) if seat.budget else "it told no budget"
