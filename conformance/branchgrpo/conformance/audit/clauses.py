"""Stage: conformance, clause by clause."""

from branchgrpo.conformance.audit.context import Context, Data, reason
from branchgrpo.conformance.judge import judge
from branchgrpo.conformance.report import Report, make_report
from branchgrpo.conformance.runner import Result


def conformance(context: Context) -> Data:
    """All cases and checks; a failed MUST rejects, an unsupported or expected one is a condition."""
    report = judge(context.subject, context.expected)
    rows = [
        {"check": r.check, "clause": r.clause, "status": r.status, "detail": r.detail[:500]} for r in report.results
    ]
    return {"implementation": report.implementation, "results": rows, "reasons": reasons_of(report)}


def reasons_of(report: Report) -> list[Data]:
    """What the clauses say for the verdict."""
    levels = {clause.id: clause.level for clause in report.clauses}
    found = report.statuses()
    details = {r.clause: r for r in report.results if r.status == "failed"}
    reasons = []
    for clause, status in found.items():
        must = levels.get(clause, "MUST") == "MUST"
        if status == "failed":
            first = details[clause]
            text = f"{clause} fails: {first.check.replace('_', ' ')}: {first.detail[:300]}"
            reasons.append(reason("reject" if must else "condition", text, clause))
        elif status == "xfailed":
            reasons.append(reason("condition", f"{clause} fails as expected", clause))
    lacking = [clause for clause, status in found.items() if status == "unsupported"]
    if lacking:
        text = f"{len(lacking)} clauses could not be judged: {', '.join(lacking)}"
        reasons.append(reason("condition", text))
    return reasons


def report_of(data: Data, expected: dict[str, str]) -> Report:
    """The report that a stage's data stand for."""
    rows = [Result(row["check"], row["clause"], row["status"], row["detail"]) for row in data["results"]]
    return make_report(data["implementation"], rows, expected)
