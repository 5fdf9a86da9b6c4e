"""Stage: the kill matrix, stored or made again."""

import json

from branchgrpo.conformance.audit.context import Context, Data, reason
from branchgrpo.conformance.clauses import ROOT

STORED = ROOT / "spec" / "studies" / "mutants.json"


def kill_matrix_data(context: Context) -> Data:
    """Mutants, checks, and who kills whom."""
    if context.rerun_mutants:
        from branchgrpo.conformance.mutants.matrix import kill_matrix

        matrix = kill_matrix()
        mutants, checks = matrix.mutants, matrix.checks
    elif STORED.is_file():
        stored = json.loads(STORED.read_text(encoding="utf-8"))
        mutants, checks = stored["mutants"], stored["checks"]
    else:
        return {"unsupported": "no stored matrix: branchgrpo audit --mutants makes one", "reasons": []}
    living = [name for name, row in mutants.items() if not row.get("killed_by_own_clause", row["killed_by"])]
    idle = [name for name, row in checks.items() if not row["kills"]]
    reasons = []
    if living or idle:
        said = f"the judge itself: {len(living)} mutants live, {len(idle)} checks kill nothing"
        reasons.append(reason("condition", said))
    return {
        "mutants": mutants,
        "checks": checks,
        "living": living,
        "idle": idle,
        "rerun": context.rerun_mutants,
        "reasons": reasons,
    }
