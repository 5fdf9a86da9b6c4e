"""An implementation on a device against the reference on the CPU in float64: a row a variant and quantity."""

import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from branchgrpo.conformance.adapters.reference import ReferenceImplementation
from branchgrpo.conformance.blame import describe
from branchgrpo.conformance.capture import every_edge, score
from branchgrpo.conformance.case import Case, conditions
from branchgrpo.conformance.checks.base import Subject, UnsupportedError
from branchgrpo.conformance.device_models import VARIANTS, DeviceNetwork, Variant
from branchgrpo.conformance.device_modes import compiling, require_tf32, tf32
from branchgrpo.conformance.runner import Status
from branchgrpo.properties.tolerances import PARITY
from branchgrpo.reference.implementation import Implementation
from branchgrpo.reference.noise import KeyedNoise
from branchgrpo.reference.plan import Plan
from branchgrpo.training.engine.determinism import deterministic_algorithms

QUANTITIES = ("states", "log_probs", "values", "advantages", "gradient")
"""What is compared: the rollout, its log-probabilities, fused values, advantages, and the update's gradient."""

REPEATED, POISONED = "two runs", "poisoned memory"
"""The quantities of the other rows: the same bits twice, and again when fresh memory holds NaN."""

FACTOR = 2.0
"""Errors of low precision may be this many times those of the plain path in the same precision."""


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Attributes:
        variant, quantity: what was compared.
        status: passed, failed, or unsupported.
        error: norm of the difference as a share of the tensor's, the largest of all depths; None where bits are
            compared, nothing could be, or it is not finite.
        bound: the largest error that passes.
        plain_error, floor: of low precision, the parts of the bound: the reference's own error in that precision, and
            how far it moves when sums are taken from their other end.
        detail: what is wrong, or why nothing was compared.
    """

    variant: str
    quantity: str
    status: Status
    error: float | None = None
    bound: float | None = None
    plain_error: float | None = None
    floor: float | None = None
    detail: str = ""


@dataclass(frozen=True)
class DeviceTable:
    """All rows of one implementation on one device."""

    implementation: str
    device: str
    rows: tuple[Row, ...]

    def count(self, status: Status) -> int:
        """Number of rows of a status."""
        return sum(row.status == status for row in self.rows)

    def data(self) -> dict[str, Any]:
        """The table as JSON holds it."""
        rows = [asdict(row) for row in self.rows]
        return {"implementation": self.implementation, "device": self.device, "rows": rows}


@dataclass(frozen=True)
class Outcome:
    """What one run gave: levels of every quantity on the CPU, and why those that are absent are."""

    levels: dict[str, tuple[Tensor, ...]]
    reason: str = ""


def on_cpu(levels: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
    """Copies of the levels that there are."""
    return tuple(level.detach().cpu().clone() for level in levels if level is not None)


def run(implementation: Implementation, case: Case, network: DeviceNetwork) -> Outcome:
    """Rollout, tail and first update of a case; what follows a missing operation is absent."""
    subject, method, levels = Subject(implementation, case.device), case.method, {}
    plan = method.plan_at(case.iteration, case.seed)
    assert isinstance(plan, Plan)
    condition, model = conditions(case), network.to(case.device)
    asked = (plan, model, case.prompt_list, condition, KeyedNoise(case.seed))
    try:
        trace = subject.operation("rollout").rollout(*asked, **case.sampling())
        levels["states"], levels["log_probs"] = on_cpu(trace.states), on_cpu(trace.log_probs)
        rewards = score(trace, case.rewards)
        values = subject.operation("fuse").fuse(trace, rewards, method.fusion)
        levels["values"] = on_cpu(values)
        advantages = subject.operation("normalize").normalize(plan, values, case.weights, method.normalization)
        levels["advantages"] = on_cpu(advantages)
        update = ([trace], model, condition, [advantages], [every_edge(trace)], method.objective, method.log_prob, None)
        value = subject.operation("objective").objective(*update)
        levels["gradient"] = on_cpu(torch.autograd.grad(value, list(model.parameters())))
    except UnsupportedError as reason:
        return Outcome(levels, str(reason))
    return Outcome(levels)


def distance(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Norm of the difference over that of ``expected``, the largest of all levels; ∞ for other shapes and for NaN.

    Of a level of zeros, such as the advantages of lone roots, it is the norm of the difference itself.
    """
    if [level.shape for level in found] != [level.shape for level in expected]:
        return math.inf
    pairs = zip(found, expected, strict=True)
    shares = [float((a.double() - b.double()).norm()) / (float(b.double().norm()) or 1.0) for a, b in pairs]
    return max((share if math.isfinite(share) else math.inf for share in shares), default=math.inf)


def plain_runs(variant: Variant) -> tuple[Outcome, Outcome, Outcome]:
    """The reference on the CPU: in float64, in the variant's arithmetic, and in that with sums from their other end."""
    cpu, reference = torch.device("cpu"), ReferenceImplementation()
    elements = math.prod(variant.case(cpu).latent)
    exact = run(reference, variant.case(cpu, torch.float64), DeviceNetwork(variant, elements, exact=True))
    if variant.compute == torch.float64:
        return exact, exact, exact
    plain, turned = (
        run(reference, variant.case(cpu), DeviceNetwork(variant, elements, backwards=backwards, emulated=True))
        for backwards in (False, True)
    )
    return exact, plain, turned


def compare(variant: Variant, found: Outcome) -> list[Row]:
    """A row a quantity: its error and bound."""
    exact, plain, turned = (outcome.levels for outcome in plain_runs(variant))
    rows = []
    for name in QUANTITIES:
        if name not in found.levels:
            rows.append(Row(variant.name, name, "unsupported", detail=found.reason))
            continue
        error, bound = distance(found.levels[name], exact[name]), PARITY
        parts: dict[str, float] = {}
        if variant.compute != torch.float64:
            worst = max(distance(other[name], exact[name]) for other in (plain, turned))
            parts = {"plain_error": worst, "floor": distance(turned[name], plain[name])}
            bound = FACTOR * worst + parts["floor"]
        finite = math.isfinite(error)
        detail = "" if finite else "not finite, or of another shape"
        status: Status = "passed" if error <= bound else "failed"
        rows.append(Row(variant.name, name, status, error if finite else None, bound, detail=detail, **parts))
    return rows


def difference(found: Outcome, expected: Outcome) -> str:
    """The quantities in which two runs are not the same bits, NaN named; empty if there are none."""
    words = []
    for name, levels in found.levels.items():
        holes = any(bool(level.isnan().any()) for level in levels)
        pairs = zip(levels, expected.levels.get(name, ()), strict=False)
        if holes or len(levels) != len(expected.levels.get(name, ())) or not all(torch.equal(*pair) for pair in pairs):
            words.append(f"{name} (NaN)" if holes else name)
    return ", ".join(words)


def repeat(variant: Variant, again: Callable[[], Outcome]) -> list[Row]:
    """The rows of determinism: two runs, and one in poisoned memory, all with deterministic algorithms."""
    expected: Outcome | None = None

    def row(name: str) -> Row:
        nonlocal expected
        try:
            if expected is None:
                with deterministic_algorithms():
                    expected = again()
            with deterministic_algorithms(poisoned=name == POISONED):
                wrong = difference(again(), expected)
        except Exception as error:  # of this run alone: what another found stands
            return Row(variant.name, name, "failed", detail=describe(error))
        if not expected.levels:
            return Row(variant.name, name, "unsupported", detail=expected.reason)
        return Row(variant.name, name, "failed" if wrong else "passed", detail=wrong and f"differs: {wrong}")

    return [row(REPEATED), row(POISONED)]


def variant_rows(subject: Subject, variant: Variant) -> list[Row]:
    """All rows of one variant; each failed if the implementation raises, each unsupported if it cannot be tried."""
    implementation, case = subject.implementation, variant.case(subject.device)

    def again() -> Outcome:
        return run(implementation, case, DeviceNetwork(variant, math.prod(case.latent)))

    try:
        with ExitStack() as modes:
            if variant.tf32:
                require_tf32(subject.device)
            modes.enter_context(tf32(variant.tf32))
            if variant.compiled:
                modes.enter_context(compiling(implementation))
            found = again()
            repeated = repeat(variant, again)
        with tf32(False):
            return [*compare(variant, found), *repeated]
    except UnsupportedError as reason:
        blank = Row(variant.name, "", "unsupported", detail=str(reason))
    except Exception as error:
        blank = Row(variant.name, "", "failed", detail=describe(error))
    return [replace(blank, quantity=name) for name in (*QUANTITIES, REPEATED, POISONED)]


def device_table(
    subject: Subject, variants: Sequence[Variant] = VARIANTS, progress: Callable[[str], None] = lambda name: None
) -> DeviceTable:
    """Compare an implementation on its device with the reference on the CPU in float64, on the same keyed noise.

    Float64 must agree to ``PARITY``. Lower precision may be ``FACTOR`` times as far from it as the reference is in that
    precision on the CPU, TF32 emulated there, plus a floor that is measured: the reference's own change when it sums
    from the other end. All modes of torch are as before afterwards.

    Args:
        subject: implementation and device.
        variants: ways to do the arithmetic.
        progress: called with each variant's name.
    """
    rows: list[Row] = []
    for variant in variants:
        progress(variant.name)
        rows += variant_rows(subject, variant)
    return DeviceTable(subject.implementation.name, str(subject.device), tuple(rows))
