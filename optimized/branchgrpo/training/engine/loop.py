"""The loop of a training run: what is checked before it, what happens in every iteration, and how it ends."""

import os
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeVar

from branchgrpo.reference.errors import BranchGRPOError
from branchgrpo.training.checkpoint.errors import told_of_disk
from branchgrpo.training.checkpoint.export import export
from branchgrpo.training.checkpoint.layout import steps as checkpoints
from branchgrpo.training.checkpoint.state import TrainState
from branchgrpo.training.checkpoint.write import OnStage
from branchgrpo.training.config.reading import config_hash, write_config
from branchgrpo.training.config.schema import TrainConfig
from branchgrpo.training.engine.determinism import deterministic_algorithms
from branchgrpo.training.engine.distributed import Cluster, early_board, spoken, start_cluster
from branchgrpo.training.engine.interrupt import Interrupts
from branchgrpo.training.engine.iteration import Abandoned
from branchgrpo.training.engine.run import Run, build_run, facts, needed_prompts, outline
from branchgrpo.training.engine.run_folder import CONFIG, EXPORT, METRICS, RunFolder, open_run_folder
from branchgrpo.training.engine.saving import cut, differences, find_state, restore_run, save_run
from branchgrpo.training.engine.score_file import ScoreFile
from branchgrpo.training.logs.journal import Journal, check_logging, open_journal
from branchgrpo.training.monitors.limits import MonitorStop, judge, stop_if_asked

Found = TypeVar("Found")


@dataclass(frozen=True)
class Hooks:
    """What others may do at moments of a run.

    Attributes:
        on_iteration: told (iteration, its numbers) after each one, on every rank.
        on_stage: told of the stages of every save, on the first rank.
        on_start: given the run when it is ready, on every rank.
    """

    on_iteration: Callable[[int, Mapping[str, float]], None] | None = None
    on_stage: OnStage | None = None
    on_start: Callable[[Run], None] | None = None


@dataclass(frozen=True)
class RunResult:
    """How a run ended.

    Attributes:
        status: ``finished``, or ``interrupted`` by Ctrl-C or SIGTERM.
        folder: of the run.
        iterations: that are done.
        metrics: numbers of the last iteration of this process; empty if it did none.
        checkpoint: the newest one.
        export: folder of the exported model, if one was written.
        main: whether this process is the one that speaks.
    """

    status: Literal["finished", "interrupted"]
    folder: Path
    iterations: int
    metrics: dict[str, float] = field(default_factory=dict)
    checkpoint: Path | None = None
    export: Path | None = None
    main: bool = True


def train(config: TrainConfig, *, resume: bool | Path = False, hooks: Hooks | None = None) -> RunResult:
    """Train as ``config`` says; under ``torchrun`` or ``accelerate launch`` together with the other processes.

    Args:
        config: the whole run.
        resume: go on in ``run.folder`` from its newest checkpoint, or from the one that is named; a folder without a
            checkpoint starts from the beginning.
        hooks: for tests and for those who embed the loop.

    Raises:
        BranchGRPOError: of any kind; with several processes one of them raises it, the others ``AnotherRankFailed``.
        MonitorStop: a monitor ended the run, which was saved before.
    """
    repeatable = deterministic_algorithms() if config.run.deterministic else nullcontext()
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")  # onnxruntime, which diffusers imports, would write to $HOME
    board, cluster = early_board(), None
    try:
        with repeatable, Interrupts() as interrupts:
            cluster = start_cluster(config.run, board)
            result = Loop(config, cluster, resume, hooks or Hooks(), interrupts).run()
    except BaseException as error:
        told = spoken(board if cluster is None else cluster.board, error)
        if cluster is not None:
            cluster.close(failed=True)
        if told is error:
            raise
        raise told from error
    cluster.close()
    return result


class Loop:
    """One call of ``train``."""

    def __init__(
        self, config: TrainConfig, cluster: Cluster, resume: bool | Path, hooks: Hooks, interrupts: Interrupts
    ) -> None:
        self.config, self.cluster, self.resume, self.hooks = config, cluster, resume, hooks
        self.interrupts = interrupts
        self.path = Path(config.run.folder)
        self.journal: Journal | None = None
        self.done = 0
        self.saved_at = -1
        self.evaluated_at = -1

    def run(self) -> RunResult:
        """Prepare, iterate, end; the folder is locked meanwhile."""
        plan = outline(self.config, self.cluster)
        check_logging(self.config.logging)
        folder, failed = self.locked(), True
        try:
            state = self.agreed(lambda: find_state(self.config, self.resume))
            run = build_run(self.config, self.cluster, plan, ScoreFile(self.path) if self.scores else None)
            self.prepare(run, state)
            result = self.iterations(run)
            failed = False
            return result
        except BaseException as error:
            told = told_of_disk(self.path, error)
            self.last_words(told)
            if told is error:
                raise
            raise told from error
        finally:
            with suppress(OSError) if failed else nullcontext():  # a full disk has been reported
                if self.journal is not None:
                    self.journal.close()
            if folder is not None:
                folder.release()

    def last_words(self, error: BaseException) -> None:
        """Note down why the run ends, if the log can still be written."""
        if self.journal is not None and not isinstance(error, SystemExit):
            reasons = {MonitorStop: "stopped", KeyboardInterrupt: "interrupted"}
            reason = next((word for kind, word in reasons.items() if isinstance(error, kind)), "failed")
            with suppress(OSError):
                self.journal.end(self.done, reason, f"{type(error).__name__}: {error}")

    @property
    def scores(self) -> bool:
        """Whether every leaf's scores are written down."""
        return self.config.logging.scores

    def locked(self) -> RunFolder | None:
        """The run's folder, made and locked by the first rank; its error is every rank's."""
        folder, error = None, None
        if self.cluster.main:
            try:
                folder = open_run_folder(self.path, self.resume is not False)
            except BranchGRPOError as fault:
                error = fault
        self.cluster.agree(error)
        return folder

    def agreed(self, make: Callable[[], Found]) -> Found:
        """What every rank makes on its own; one rank's error is every rank's."""
        found, error = None, None
        try:
            found = make()
        except BranchGRPOError as fault:
            error = fault
        self.cluster.agree(error)
        return found  # type: ignore[return-value]

    def prepare(self, run: Run, state: TrainState | None) -> None:
        """Restore what was saved, cut the logs to it, encode the prompts, and make the first evaluation."""
        self.agreed(lambda: None if state is None else restore_run(run, state))
        if state is not None:
            self.done = self.saved_at = state.iteration
            every = self.config.evaluation.every
            self.evaluated_at = self.done if every and self.done % every == 0 else -1
        if self.cluster.main:
            cut(self.path, state)
            write_config(self.config, self.path / CONFIG)
            length = 0 if state is None else state.log_bytes.get(METRICS, 0)
            self.journal = open_journal(self.config, self.path, start=self.done, length=length)
            told = facts(run, config_hash(self.config))
            if state is not None:
                told["differences"] = differences(self.config, state, self.cluster.size)
            self.journal.start(self.done, self.cluster.size, str(run.task.device), told)
        run.task.prepare(needed_prompts(self.config, run.plan, self.done))
        self.cluster.wait()
        if self.hooks.on_start is not None:
            self.hooks.on_start(run)
        if state is None and run.evaluator is not None:
            self.evaluate(run)

    def iterations(self, run: Run) -> RunResult:
        """All iterations that are left, and the end of the run."""
        metrics: dict[str, float] = {}
        while self.done < self.config.run.iterations:
            if any(self.cluster.everyone(self.interrupts.requested is not None)):
                return self.interrupted(run, metrics)
            try:
                metrics = self.iteration(run)
            except Abandoned:
                if run.scores is not None and self.cluster.main:
                    run.scores.rewind()
                return self.interrupted(run, metrics)
        if run.evaluator is not None and self.evaluated_at != self.done:
            self.evaluate(run)
        self.save(run)
        exported = self.export(run)
        if self.journal is not None:
            self.journal.end(self.done, "finished")
        return self.result("finished", metrics, exported)

    def interrupted(self, run: Run, metrics: dict[str, float]) -> RunResult:
        """Save and leave; a checkpoint that is there already is enough."""
        self.save(run)
        if self.journal is not None:
            self.journal.end(self.done, "interrupted", self.interrupts.requested or "another process was interrupted")
        return self.result("interrupted", metrics, None)

    def result(
        self, status: Literal["finished", "interrupted"], metrics: dict[str, float], exported: Path | None
    ) -> RunResult:
        """How the run ended."""
        newest = next(reversed(checkpoints(self.path)), None)
        return RunResult(status, self.path, self.done, metrics, newest, exported, self.cluster.main)

    def iteration(self, run: Run) -> dict[str, float]:
        """One iteration, its numbers written down and judged, an evaluation and a checkpoint where they are due.

        Raises:
            MonitorStop: a number beyond its limit, and the run was saved; or one that is not finite.
        """
        number = self.done
        measured = run.iterate(number, lambda: self.interrupts.requested is not None)
        start = time.perf_counter()
        metrics = run.metrics(measured)
        findings = judge(metrics, self.config.monitors)
        seconds = measured.seconds | {"monitors": time.perf_counter() - start}
        del measured  # the trees: an evaluation grows its own
        self.done += 1
        if self.journal is not None:
            self.journal.iteration(number, metrics, seconds, findings)
        self.end_if_asked(run, lambda: stop_if_asked(findings, number))
        if run.evaluator is not None and self.done % self.config.evaluation.every == 0:
            self.evaluate(run)
        if self.config.checkpoint.every and self.done % self.config.checkpoint.every == 0:
            self.save(run)
        if self.hooks.on_iteration is not None:
            self.hooks.on_iteration(number, metrics)
        return metrics

    def evaluate(self, run: Run) -> None:
        """Evaluate, write down and judge.

        Raises:
            MonitorStop: as for an iteration.
        """
        start = time.perf_counter()
        evaluation, metrics = run.evaluate()
        self.evaluated_at = self.done
        findings = judge(metrics, self.config.monitors)
        if self.journal is not None:
            seconds = time.perf_counter() - start
            self.journal.evaluation(self.done, evaluation, metrics, findings, seconds, run.ema is not None)
        self.end_if_asked(run, lambda: stop_if_asked(findings, self.done))

    def end_if_asked(self, run: Run, ask: Callable[[], None]) -> None:
        """Save before a monitor ends the run; all ranks have the same numbers and come here together.

        After a number that is not finite nothing is saved: the newest checkpoint is the last state that can be trusted.
        """
        try:
            ask()
        except MonitorStop as stop:
            if stop.finite:
                self.save(run)
            raise

    def save(self, run: Run) -> None:
        """Save unless this state is saved already."""
        if self.saved_at != self.done:
            save_run(run, self.path, self.done, self.hooks.on_stage)
            self.saved_at = self.done

    def export(self, run: Run) -> Path | None:
        """Write the model as others load it, with the averaged weights where there are any."""
        if not self.config.checkpoint.export:
            return None
        ema, error = None if run.ema is None else run.ema.mean, None
        try:
            export(run.task.network, self.path / EXPORT, ema, self.cluster.main)
        except BranchGRPOError as fault:
            error = fault
        self.cluster.agree(error)
        return self.path / EXPORT
