"""Contract tests for methods, families, data sets and observers: classes of tests that plug-ins subclass.

    class TestMine(MethodContract):
        method = Mine()

A contract holds for everything of its kind, also in Subfleet itself. Each class documents the attributes that a
subclass sets. Networks are tiny, and nothing is trained.
"""

from subfleet.testing.datasets import DatasetContract
from subfleet.testing.families import FamilyContract
from subfleet.testing.methods import MethodContract
from subfleet.testing.observers import ObserverContract

__all__ = ["DatasetContract", "FamilyContract", "MethodContract", "ObserverContract"]
