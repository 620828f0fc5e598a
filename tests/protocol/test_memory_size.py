import pytest

from subfleet.protocol.memory_size import parse_bytes


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("1", 1),
        ("300000000", 300_000_000),
        ("300M", 300_000_000),
        ("300Mi", 300 * 2**20),
        ("2K", 2000),
        ("2Ki", 2048),
        ("1.5G", 1_500_000_000),
        ("0.5Gi", 2**29),
        ("1073741824Gi", 2**60),
    ],
)
def test_a_size_is_a_number_with_a_unit(text: str, size_bytes: int) -> None:
    assert parse_bytes(text) == size_bytes


@pytest.mark.parametrize(
    "text",
    [
        *("", "M", "0", "0G", "300m", "300MB", "300 M", "+3M", "-3M", "3e6", ".5G", "1.M", "1.5", "1.0001K"),
        *("1073741825Gi", "\u0663M", "3M\n", "1_000", "inf", "9" * 19),
    ],
)
def test_anything_else_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ValueError, match="but must be a size such as 300M"):
        parse_bytes(text)
