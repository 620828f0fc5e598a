"""Contracts for methods, families, data sets and observers of one's own: classes of tests, to be subclassed.

    class TestMine(MethodContract):
        method = Mine()

A contract states what everything of its kind must keep, ours as well. What a subclass may say besides stands at the
contract. Networks are tiny and nothing is trained.
"""

from subfleet.testing.datasets import DatasetContract
from subfleet.testing.families import FamilyContract
from subfleet.testing.methods import MethodContract
from subfleet.testing.observers import ObserverContract

__all__ = ["DatasetContract", "FamilyContract", "MethodContract", "ObserverContract"]
