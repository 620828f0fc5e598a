"""The four liars: each changes the messages that its member sends or receives, and all messages stay valid."""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import numpy as np

from subfleet.arrays import decode_arrays, encode_arrays
from subfleet.emulation.batch.fleet import Interference
from subfleet.protocol.candidate_scores import CandidateScore
from subfleet.protocol.errors import SubfleetError
from subfleet.protocol.identifiers import make_message_id
from subfleet.protocol.limits import MAX_SAMPLES
from subfleet.protocol.messages import (
    Evaluated,
    Message,
    Presence,
    Profile,
    Refusal,
    Scores,
    Task,
    Telemetry,
    Update,
    decode,
    encode,
)
from subfleet.protocol.paths import PathScore
from subfleet.protocol.topics import CHUNK, Topics
from subfleet.transport.base import Delivery, Event, Transport, Will

__all__ = ["LIARS", "Churner", "Claimer", "GarblingTrainer", "LyingLink", "Silent", "create_link_wrapper"]

LARGE_LOSS = 1e30
PACES = (5e-324, 1e300)
"""Multiplications per second that are claimed in turn."""
LARGE_BYTES = 2**62
MOST_EXAMPLES = 2**53
REPEATED = 4
"""Number of answers that a churner remembers and repeats."""
FACTOR = -30.0


class LyingLink:
    """A liar's transport. Chunks of updates pass unchanged.

    Args:
        inner: the transport.
        topics: the fleet's topics.
        liar: changes the messages.
    """

    def __init__(self, inner: Transport, topics: Topics, liar: Interference) -> None:
        self._inner = inner
        self._topics = topics
        self._liar = liar

    def open(self, subscriptions: tuple[str, ...], will: Will | None = None) -> None:
        """See `Transport.open`."""
        self._inner.open(subscriptions, will)

    def publish(self, topic: str, payload: bytes, *, retain: bool = False) -> None:
        """See `Transport.publish`; the liar rewrites the message first."""
        address = self._topics.parse(topic)
        if address.direction != "up" or address.kind == CHUNK or not payload:
            self._inner.publish(topic, payload, retain=retain)
            return
        for message in self._liar.rewrite(decode(payload)):
            retained = retain and address.kind == message.KIND
            self._inner.publish(self._topics.uplink(address.client_id, message.KIND), encode(message), retain=retained)

    def poll(self, timeout_s: float) -> Event | None:
        """See `Transport.poll`; messages that the liar does not accept are dropped."""
        event = self._inner.poll(timeout_s)
        while isinstance(event, Delivery) and not self._liar.accepts(self._topics.parse(event.topic).kind):
            event = self._inner.poll(0.0)
        return event

    def close(self) -> None:
        """See `Transport.close`."""
        self._inner.close()


class Claimer:
    """Claims the largest values that messages can hold: samples, losses, memory, speed, scores.

    Args:
        networks: the networks to declare, as in profiles; the first one counts, and empty declares none.
    """

    def __init__(self, networks: Sequence[str] = ()) -> None:
        self._networks = networks
        self._profiles = 0

    def accepts(self, kind: str) -> bool:
        """See `Interference.accepts`."""
        return True

    def rewrite(self, message: Message) -> Iterator[Message]:
        """See `Interference.rewrite`."""
        if isinstance(message, Profile):
            message = self._falsify_profile(message)
        elif isinstance(message, Telemetry):
            reading = replace(
                message.reading, memory_free_bytes=LARGE_BYTES, downlink_bps=1e300, uplink_bps=1e300, latency_s=0.0
            )
            low = None
            if message.log_low is not None:
                low = replace(message.log_low, memory_budget_bytes=LARGE_BYTES, downlink_bps=1e300, uplink_bps=1e300)
            message = replace(
                message,
                reading=reading,
                log_low=low,
                memory_budget_bytes=LARGE_BYTES,
                disk_budget_bytes=LARGE_BYTES,
            )
        elif isinstance(message, Update):
            message = self._falsify_update(message)
        elif isinstance(message, Evaluated):
            message = _falsify_evaluation(message, loss=LARGE_LOSS, accuracy=0.0, samples=MAX_SAMPLES)
        elif isinstance(message, Scores):
            message = replace(message, scores=tuple(CandidateScore(score=1e300) for _ in message.scores))
        yield message

    def _falsify_profile(self, profile: Profile) -> Profile:
        self._profiles += 1
        return replace(
            profile,
            sample_count=MAX_SAMPLES,
            held_out_count=MAX_SAMPLES if profile.held_out_count else 0,
            class_counts=tuple(MAX_SAMPLES for _ in profile.class_counts),
            memory_total_bytes=LARGE_BYTES,
            macs_per_s=PACES[self._profiles % 2],
            network=self._networks[0] if self._networks else profile.network,
        )

    def _falsify_update(self, update: Update) -> Update:
        examples = tuple(
            (choice, tuple((operator, MOST_EXAMPLES) for operator, _ in counts))
            for choice, counts in update.operator_examples
        )
        return replace(
            update,
            sample_count=MAX_SAMPLES,
            step_count=LARGE_BYTES,
            loss=LARGE_LOSS,
            square_loss=None if update.square_loss is None else LARGE_LOSS,
            train_seconds=1e300,
            seconds=1e300,
            measured_peak_bytes=LARGE_BYTES,
            operator_examples=examples,
        )


class Silent:
    """Joins and reports its data, but never answers a task, since no task reaches it."""

    def accepts(self, kind: str) -> bool:
        """See `Interference.accepts`."""
        return kind != Task.KIND

    def rewrite(self, message: Message) -> Iterator[Message]:
        """See `Interference.rewrite`."""
        yield message


class Truthful:
    """Passes all messages on; the lie is in the trained weights."""

    def accepts(self, kind: str) -> bool:
        """See `Interference.accepts`."""
        return True

    def rewrite(self, message: Message) -> Iterator[Message]:
        """See `Interference.rewrite`."""
        yield message


class Churner:
    """Returns with a new session and profile at every heartbeat, and answers out of phase.

    In every other round it claims one byte of memory. It refuses tasks that it has trained and sends their updates at
    the next heartbeat, repeats old messages, and reports extreme scores.

    Args:
        networks: the networks to declare in turn; empty declares none.
    """

    def __init__(self, networks: Sequence[str] = ()) -> None:
        self._networks = networks
        self._beats = 0
        self._profile: Profile | None = None
        self._late: dict[str, Update] = {}
        self._history: deque[Message] = deque(maxlen=REPEATED)
        self._telemetry: Telemetry | None = None

    def accepts(self, kind: str) -> bool:
        """See `Interference.accepts`."""
        return True

    def rewrite(self, message: Message) -> Iterator[Message]:
        """See `Interference.rewrite`."""
        if isinstance(message, Presence):
            yield from self._rewrite_presence(message)
        elif isinstance(message, Profile):
            self._profile = message
            yield self._falsify_profile(message)
        elif isinstance(message, Telemetry):
            yield from self._falsify_telemetry(message)
        elif isinstance(message, Update):
            self._late[message.task_id] = message
            yield _refuse(message)
        elif isinstance(message, Evaluated):
            best = self._beats % 2
            yield from self._send(
                _falsify_evaluation(
                    message, loss=0.0 if best else LARGE_LOSS, accuracy=float(best), samples=MAX_SAMPLES
                )
            )
        elif isinstance(message, Scores):
            extremes = (CandidateScore(score=(-1e300, 1e300)[index % 2]) for index, _ in enumerate(message.scores))
            yield from self._send(replace(message, scores=tuple(extremes)))
        else:
            yield message

    def _rewrite_presence(self, presence: Presence) -> Iterator[Message]:
        if not presence.online:
            yield presence
            return
        self._beats += 1
        yield replace(presence, session_id=self._name_session(presence.client_id))
        if self._profile is not None:
            yield replace(self._falsify_profile(self._profile), message_id=make_message_id())
        for update in self._late.values():
            yield from self._send(update)
        self._late.clear()
        if self._history:
            old = self._history[0]
            self._history.rotate()
            yield replace(old, message_id=make_message_id())

    def _send(self, message: Message) -> Iterator[Message]:
        self._history.append(message)
        yield message

    def _falsify_telemetry(self, telemetry: Telemetry) -> Iterator[Message]:
        claim = replace(telemetry, session_id=self._name_session(telemetry.client_id))
        if (telemetry.round or 0) % 2:
            claim = replace(claim, memory_budget_bytes=1, disk_budget_bytes=1)
        if self._telemetry is not None:
            yield replace(self._telemetry, message_id=make_message_id())
        self._telemetry = claim
        yield claim

    def _falsify_profile(self, profile: Profile) -> Profile:
        networks = self._networks
        return replace(
            profile,
            session_id=self._name_session(profile.client_id),
            sample_count=1 + self._beats % 1000,
            macs_per_s=PACES[self._beats % 2],
            network=networks[self._beats % len(networks)] if networks else profile.network,
        )

    def _name_session(self, client_id: str) -> str:
        return f"{client_id}-again-{self._beats}"


def _refuse(update: Update) -> Refusal:
    return Refusal(
        task_id=update.task_id,
        run_id=update.run_id,
        round=update.round,
        client_id=update.client_id,
        reason="memory",
        detail="as it says",
        available_bytes=1,
    )


def _falsify_evaluation(message: Evaluated, *, loss: float, accuracy: float, samples: int) -> Evaluated:
    return replace(
        message,
        loss=loss,
        accuracy=accuracy,
        sample_count=samples,
        label_count=samples,
        class_counts=tuple(samples // len(message.class_counts) for _ in message.class_counts),
        class_correct=tuple(0 for _ in message.class_correct),
        scores=tuple(
            PathScore(loss=(0.0, LARGE_LOSS)[index % 2], accuracy=float(index % 2 == 0))
            for index, _ in enumerate(message.scores)
        ),
    )


class GarblingTrainer:
    """A trainer that multiplies its changes by -30; every third and fourth change is NaN or tiny."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self._trainings = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def train(self, job: Any, stopped: Callable[[], bool]) -> Any:
        """See `Trainer.train`."""
        result = self._inner.train(job, stopped)
        kind = self._trainings % 4
        self._trainings += 1
        try:
            arrays = decode_arrays(job.output_path.read_bytes())
        except SubfleetError:  # encoded updates are damaged instead
            job.output_path.write_bytes(job.output_path.read_bytes()[::-1])
            return result
        job.output_path.write_bytes(encode_arrays({name: _garble(array, kind) for name, array in arrays.items()}))
        return result


def _garble(array: Any, kind: int) -> Any:
    values = np.asarray(array)
    if not np.issubdtype(values.dtype, np.floating):
        return values
    if kind == 2:
        return np.full_like(values, np.nan)
    if kind == 3:
        return np.full_like(values, 1e-42)  # below the smallest normal number of single precision
    return (FACTOR * values).astype(values.dtype)


LIARS: Mapping[str, Callable[[Sequence[str]], Interference]] = MappingProxyType(
    {
        "claimer": Claimer,
        "silent": lambda _: Silent(),
        "garbler": lambda _: Truthful(),
        "churner": Churner,
    }
)
"""By name, which is also the member's id."""


def create_link_wrapper(kind: str, topics: Topics, networks: Sequence[str] = ()) -> Callable[[Transport], Transport]:
    """Create a function that wraps the transport of a liar.

    Args:
        kind: a key of `LIARS`.
        topics: the fleet's topics.
        networks: the networks to declare, if it declares any.
    """
    return lambda inner: LyingLink(inner, topics, LIARS[kind](networks))
