"""Adopt, adopt with conditions, or reject, from the reasons that the stages gave."""

from collections.abc import Mapping
from typing import Literal

from branchgrpo.conformance.audit.context import Data

Decision = Literal["adopt", "adopt with conditions", "reject"]
ORDER = ("reject", "condition", "note")


def decide(stages: Mapping[str, Data]) -> Data:
    """The verdict: ``reject`` if a stage has a reason to, else the conditions, else ``adopt``; unsupported is one."""
    reasons = [{**found, "stage": name} for name, data in stages.items() for found in data["reasons"]]
    for name, data in stages.items():
        if "unsupported" in data:
            # The kill matrix speaks of the judge, not of what is judged.
            grade = "note" if name == "mutants" else "condition"
            text = f"{name.replace('_', ' ')} not measured: {data['unsupported']}"
            reasons.append({"grade": grade, "text": text, "clause": "", "stage": name})
    reasons.sort(key=lambda found: ORDER.index(found["grade"]))
    grades = {found["grade"] for found in reasons}
    decision: Decision = (
        "reject" if "reject" in grades else "adopt with conditions" if "condition" in grades else "adopt"
    )
    return {"decision": decision, "reasons": reasons}
