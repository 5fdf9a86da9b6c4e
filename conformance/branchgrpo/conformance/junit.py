"""A report as JUnit XML, which build servers read."""

from xml.etree.ElementTree import Element, SubElement, indent, tostring

from branchgrpo.conformance.report import Report


def junit(report: Report) -> str:
    """One test case a check: class = chapter and clause, name = check; unsupported and xfailed are skipped."""
    by_status = {s: [r for r in report.results if r.status == s] for s in ("failed", "unsupported", "xfailed")}
    suite = Element(
        "testsuite",
        name=f"branchgrpo conformance of {report.implementation}",
        tests=str(len(report.results)),
        failures=str(len(by_status["failed"])),
        skipped=str(len(by_status["unsupported"]) + len(by_status["xfailed"])),
        errors="0",
    )
    for result in report.results:
        case = SubElement(suite, "testcase", classname=f"spec.{result.clause}", name=result.check)
        if result.status == "failed":
            SubElement(case, "failure", message=result.detail)
        elif result.status != "passed":
            SubElement(case, "skipped", message=f"{result.status}: {result.detail}")
    indent(suite)
    return tostring(suite, encoding="unicode", xml_declaration=True) + "\n"
