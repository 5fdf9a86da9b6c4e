"""Options, the parametrised subject, and the table at the end of a run."""

import os
import secrets
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import jaxtyping
import pytest
from hypothesis import settings

from branchgrpo.properties.budget import SLOTS
from branchgrpo.properties.findings import Finding
from branchgrpo.properties.ledger import Ledger
from branchgrpo.properties.loading import load_object, load_subject
from branchgrpo.properties.profiles import NAMES, register_profiles
from branchgrpo.properties.subject import Subject
from branchgrpo.reference.protocols import NoiseSource

REFERENCE = "branchgrpo.conformance.adapters.reference:ReferenceImplementation"
OPTIMIZED = "branchgrpo.conformance.adapters.optimized:OptimizedImplementation"
IMPLEMENTATIONS = (REFERENCE, OPTIMIZED, f"{OPTIMIZED},chunk=3")
QUICK_SCALE = 0.02
SEED = 20260101

LEDGER = pytest.StashKey[Ledger]()
register_profiles()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Options of the property run."""
    group = parser.getgroup("properties", "subjects: --branchgrpo-impl MODULE:OBJECT[,NAME=VALUE], repeated")
    with suppress(ValueError):  # the conformance plugin, where it is installed, has the same option
        group.addoption("--branchgrpo-impl", action="append", metavar="MODULE:OBJECT[,A=B]", help="subject; repeat")
    group.addoption("--properties-report", type=Path, metavar="FILE", help="write every check as a row of JSON")
    group.addoption(
        "--properties-profile", choices=NAMES, help="Hypothesis profile; default ci, and quick for -m quick"
    )
    group.addoption("--properties-scale", type=float, help="sample sizes times this; default 1, and 0.02 for -m quick")
    group.addoption("--properties-typed", action="store_true", help="check the shapes of every call: ten times slower")
    group.addoption("--vary-seed", action="store_true", help="fresh seeds, printed; the default ones are fixed")


def is_quick(config: pytest.Config) -> bool:
    """Whether the run is ``-m quick``."""
    return bool(config.getoption("markexpr") == "quick")


def profile_of(config: pytest.Config) -> str:
    """The Hypothesis profile of the run."""
    return config.getoption("--properties-profile") or ("quick" if is_quick(config) else "ci")


def pytest_configure(config: pytest.Config) -> None:
    """Markers, profile, and the run's seed."""
    config.addinivalue_line("markers", "quick: exact checks, and statistical ones at reduced size: a minute in all")
    settings.load_profile(profile_of(config))
    config.stash[LEDGER] = Ledger()


def seed_of(config: pytest.Config) -> int:
    """The run's seed: fixed, or drawn once (workers of one run share it through the environment)."""
    if not config.getoption("--vary-seed"):
        return SEED
    return int(os.environ.setdefault("BRANCHGRPO_PROPERTIES_SEED", str(secrets.randbits(40))))


def pytest_report_header(config: pytest.Config) -> list[str]:
    """The seed, so that a run can be repeated."""
    return [f"properties: seed {seed_of(config)}, profile {profile_of(config)}"]


def subjects(config: pytest.Config) -> list[str]:
    """Names of the implementations to check."""
    return list(config.getoption("--branchgrpo-impl") or IMPLEMENTATIONS)


@dataclass(frozen=True)
class Source:
    """A noise source and its name in the table."""

    name: str
    noise: NoiseSource


SOURCES = {
    "keyed": "branchgrpo.reference.noise:KeyedNoise",
    "fast": "branchgrpo.optimized.philox:PhiloxNoise",
}


@pytest.fixture(params=list(SOURCES))
def source(request: pytest.FixtureRequest, seed: int) -> Source:
    """Each noise source with the run's seed."""
    factory = load_object(SOURCES[request.param])
    assert callable(factory)
    return Source(request.param, factory(seed))


def label(name: str) -> str:
    """Short id of a subject in test names."""
    module, *arguments = name.split(",")
    return "-".join([module.split(":")[0].rsplit(".", 1)[-1], *arguments])


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Parametrise over implementations.

    ``grower``: all.  ``batched``: all but the reference, to be compared with it.
    ``subject``: all but those that differ in chunk size alone, which only a rollout can notice.
    ``sampler``: those that draw full-size samples, all but the reference, which equality ties to them.
    """
    names = subjects(metafunc.config)
    if "grower" in metafunc.fixturenames:
        metafunc.parametrize("grower", [load_subject(name) for name in names], ids=[label(name) for name in names])
    if "batched" in metafunc.fixturenames:
        others = [name for name in names if name != REFERENCE]
        metafunc.parametrize("batched", [load_subject(name) for name in others], ids=[label(name) for name in others])
    names = [name for name in names if "chunk=" not in name] or names
    if "sampler" in metafunc.fixturenames:
        large = [name for name in names if name != REFERENCE] or names
        metafunc.parametrize("sampler", [load_subject(name) for name in large], ids=[label(name) for name in large])
    if "subject" in metafunc.fixturenames:
        metafunc.parametrize("subject", [load_subject(name) for name in names], ids=[label(name) for name in names])


@pytest.fixture(scope="session")
def seed(pytestconfig: pytest.Config) -> int:
    """Seed of the run's samples."""
    return seed_of(pytestconfig)


@pytest.fixture(scope="session")
def scale(pytestconfig: pytest.Config) -> float:
    """Sample sizes are multiplied by this."""
    given: float | None = pytestconfig.getoption("--properties-scale")
    if given is not None:
        return given
    return QUICK_SCALE if is_quick(pytestconfig) else 1.0


@pytest.fixture(scope="session")
def reference() -> Subject:
    """The reference, where a check compares with it."""
    return load_subject(REFERENCE)


@pytest.fixture(scope="session")
def optimized() -> Subject:
    """The batched path, where a check drives what only it has."""
    return load_subject(OPTIMIZED)


@pytest.fixture(scope="session")
def compiled() -> Subject:
    """The batched path with compiled steps."""
    return load_subject(f"{OPTIMIZED},compile=True")


@pytest.fixture(scope="session")
def ledger(pytestconfig: pytest.Config) -> Ledger:
    """The run's ledger."""
    return pytestconfig.stash[LEDGER]


@pytest.fixture(autouse=True)
def untyped(pytestconfig: pytest.Config) -> Iterator[None]:
    """Shape checks of every call are off: `tests/` runs this code with them, and here they cost most of the time."""
    before = jaxtyping.config.jaxtyping_disable
    jaxtyping.config.update("jaxtyping_disable", not pytestconfig.getoption("--properties-typed"))
    yield
    jaxtyping.config.update("jaxtyping_disable", before)


@pytest.fixture(autouse=True)
def clock(ledger: Ledger) -> None:
    """The time of a test's first findings starts with the test."""
    ledger.start()


@pytest.fixture(scope="session")
def judge(ledger: Ledger) -> Callable[[Iterable[Finding]], None]:
    """Keeps findings for the table and fails if one did not pass."""
    return ledger.judge


def pytest_sessionfinish(session: pytest.Session) -> None:
    """The report, and failure of a run that judged more than its budget or that Holm's step-down rejects."""
    config = session.config
    ledger = config.stash[LEDGER]
    path: Path | None = config.getoption("--properties-report")
    if path is not None:
        ledger.write(path)
    if ledger.over_budget() or ledger.holm_rejections():
        session.exitstatus = max(int(session.exitstatus), int(pytest.ExitCode.TESTS_FAILED))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """The table."""
    ledger = config.stash[LEDGER]
    if not ledger.findings:
        return
    terminalreporter.section("properties")
    for line in (*ledger.table(), f"seed {seed_of(config)}"):  # -q hides the header
        terminalreporter.write_line(line)
    for finding in ledger.holm_rejections():
        terminalreporter.write_line(f"rejected within the run's budget: {finding}", red=True)
    if ledger.over_budget():
        terminalreporter.write_line(f"{ledger.judged} p-values: the budget was split for {SLOTS}", red=True)
