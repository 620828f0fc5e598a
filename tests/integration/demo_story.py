"""The properties of the demo run, checked on its summary."""

from typing import Any

__all__ = ["CLIENTS", "check_story"]

CLIENTS = ("jetson", "laptop", "phone", "pi-4", "pi-zero-2w")
Row = dict[str, Any]


def check_story(summary: dict[str, Any]) -> None:
    """The fleet is unequal in every round, by memory and by link, and its model learns nevertheless."""
    rounds = summary["rounds"]
    assert len(rounds) == 5
    rows: list[Row] = [row for record in rounds for row in record["clients"]]
    assert [row["client_id"] for row in rows] == [*CLIENTS] * 5
    assert {row["status"] for row in rows} == {"aggregated"}
    for record in rounds:
        sizes = {row["architecture"] for row in record["clients"]}
        assert len(sizes) >= 3, f"round {record['round']}: {sorted(sizes)}"
        assert record["submodels"] == len(sizes)
    changing = {
        client for client in CLIENTS if len({row["architecture"] for row in rows if row["client_id"] == client}) > 1
    }
    assert changing, "a device's submodel changes"
    _check_limits(rows)
    models = {(model["architecture"], model["accuracy"]) for model in summary["models"]}
    assert len({architecture for architecture, _ in models}) >= 3, models
    assert min(accuracy for _, accuracy in models) >= 0.80, models
    assert summary["accuracy"] >= 0.95


def _check_limits(rows: list[Row]) -> None:
    """Memory alone limits one submodel and the link alone another, by the plans of programs on other devices."""
    assert all(row["planned_peak_bytes"] <= row["budget_bytes"] for row in rows)
    assert all(4 * row["parameters"] <= _link_bytes(row) for row in rows)
    for limit in ("memory", "link"):
        limited = [row for row in rows if row["limit"] == limit]
        assert any(_excluded_alone(row, limit, rows) for row in limited), f"{limit} limits none of {limited}"
    largest = max(row["parameters"] for row in rows)
    assert {row["parameters"] for row in rows if not row["limit"]} == {largest}


def _excluded_alone(row: Row, limit: str, rows: list[Row]) -> bool:
    """Whether a larger submodel of another device with the same runtime exceeds this limit and no other."""
    for other_row in rows:
        if other_row["runtime"] == row["runtime"] and other_row["parameters"] > row["parameters"]:
            exceeded = {
                "memory": other_row["planned_peak_bytes"] > row["budget_bytes"],
                "link": 4 * other_row["parameters"] > _link_bytes(row),
            }
            if [name for name, is_exceeded in exceeded.items() if is_exceeded] == [limit]:
                return True
    return False


def _link_bytes(row: Row) -> int:
    return min(int(row["downlink_budget_bytes"]), int(row["uplink_budget_bytes"]))
