"""What operators do with dimensions, a table for each kind of operator."""

from collections.abc import Mapping
from types import MappingProxyType

from subfleet.elastic.recording.following import Rule
from subfleet.elastic.recording.rules.elementwise import ELEMENTWISE
from subfleet.elastic.recording.rules.indexing import INDEXING
from subfleet.elastic.recording.rules.movement import MOVEMENT
from subfleet.elastic.recording.rules.norms import NORMS
from subfleet.elastic.recording.rules.products import PRODUCTS
from subfleet.elastic.recording.rules.recurrent import RECURRENT
from subfleet.elastic.recording.rules.reductions import REDUCTIONS

__all__ = ["RULES"]

RULES: Mapping[str, Rule] = MappingProxyType(
    {**ELEMENTWISE, **INDEXING, **MOVEMENT, **NORMS, **PRODUCTS, **RECURRENT, **REDUCTIONS}
)
"""By name of the operator without its overload; an operator in place has the rule of its name without "_"."""
