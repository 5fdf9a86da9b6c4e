"""What all questions share: their ids, the usual kernels, rules as data."""

from typing import Any

from branchgrpo.conformance.codec import encode_rule
from branchgrpo.conformance.vectors.cases import Case
from branchgrpo.reference.options import PruningRule
from branchgrpo.reference.types import Kernel, KernelKind

SDE, FLOW, CPS = Kernel(KernelKind.SDE, 0.3), Kernel(KernelKind.FLOW_SDE, 0.7), Kernel(KernelKind.CPS, 0.6)


def case(operation: str, slug: str, clauses: str, comment: str, **rest: Any) -> Case:
    """A case whose id is the operation and a few words."""
    return Case(f"{operation}-{slug}", operation, tuple(clauses.split()), comment, **rest)


def rules_of(*rules: PruningRule) -> list[dict[str, Any]]:
    """Pruning rules as data."""
    return [encode_rule(rule) for rule in rules]
