"""The refusals with which devices answer tasks."""

from typing import get_args

import pytest

from subfleet.protocol.messages import Refusal, RefusalReason, decode, encode


@pytest.mark.parametrize("reason", get_args(RefusalReason))
def test_the_bytes_of_a_refusal_are_fixed(reason: RefusalReason) -> None:
    refusal = Refusal(
        task_id="t", run_id="r", round=1, client_id="pi", reason=reason, detail="no", available_bytes=7, message_id="m"
    )
    assert encode(refusal) == (
        b'{"available_bytes":7,"client_id":"pi","detail":"no","kind":"refusal","message_id":"m","reason":"%s","round":1,'
        b'"run_id":"r","schema":3,"task_id":"t"}' % reason.encode()
    )
    assert decode(encode(refusal)) == refusal


def test_the_reasons_are_known_to_servers() -> None:
    assert set(get_args(RefusalReason)) == {
        "memory", "runtime", "program", "data", "failed", "disk", "link", "compute", "diverged"
    }  # fmt: skip
