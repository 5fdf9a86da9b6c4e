"""The processes of a run: found in the launcher's environment, joined through accelerate, ended together."""

import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from branchgrpo.optimized.ranks import Ranks
from branchgrpo.reference.errors import BranchGRPOError, InputError, OptionError
from branchgrpo.training.config.schema import RunConfig

TIMEOUT = timedelta(minutes=30)
"""Of one collective: a slow judge or a large export is no fault. Faults travel by ``FailureBoard`` within seconds."""

FAILURE = "branchgrpo/failure"
POLL_S = 0.5
GRACE_S = 10.0
"""What a process may still take to end on its own after another one has failed."""


class AnotherRankFailed(SystemExit):
    """Ends this process without a word: the process that failed first has said why."""

    def __init__(self) -> None:
        super().__init__(1)


class LostProcess(BranchGRPOError):
    """Another process of the run ended without saying why."""


def lost(error: BaseException) -> bool:
    """Whether an error says no more than that another process does not answer."""
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and any(word in str(error) for word in ("gloo", "NCCL", "Connection closed"))
    )


class FailureBoard:
    """Where the first process that fails leaves its name, and where all others look every half second.

    A process that waits in a collective cannot look by itself: a thread does, and ends the process.
    """

    def __init__(self, rank: int, size: int) -> None:
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        self.rank = rank
        self.store = TCPStore(host, port, size, is_master=False, timeout=timedelta(seconds=30))
        self.closed = threading.Event()
        threading.Thread(target=self.watch, daemon=True).start()

    def watch(self) -> None:
        """End the process soon after another one has failed."""
        own = TCPStore(self.store.host, self.store.port, None, is_master=False, timeout=timedelta(seconds=30))
        try:
            while not self.closed.wait(POLL_S):
                if own.check([FAILURE]):
                    if int(own.get(FAILURE)) != self.rank and not self.closed.wait(GRACE_S):
                        os._exit(1)
                    return
        except (RuntimeError, OSError):  # the store is gone: its host has ended
            if not self.closed.wait(GRACE_S):
                os._exit(1)

    def first(self) -> bool:
        """Whether this process is the first to fail: it speaks, the others are silent."""
        try:
            return bool(int(self.store.compare_set(FAILURE, "", str(self.rank))) == self.rank)
        except (RuntimeError, OSError):
            return False

    def close(self) -> None:
        """Stop looking."""
        self.closed.set()


@dataclass
class Cluster:
    """The processes of a run, this one among them.

    Attributes:
        rank, size: this process and the number of processes.
        device: where this process computes.
        ranks: collectives on small Python values, over the CPU; None for one process.
        fsdp: the weights are sharded over the processes; otherwise each has all of them.
        board: where failures are told; None for one process.
        owner: this object started the process group, and ends it.
    """

    rank: int = 0
    size: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    ranks: Ranks | None = None
    fsdp: bool = False
    board: FailureBoard | None = None
    owner: bool = False

    @property
    def main(self) -> bool:
        """Whether this process writes the run's files."""
        return self.rank == 0

    def everyone(self, value: Any) -> list[Any]:
        """The values of all processes, in rank order."""
        return [value] if self.ranks is None else self.ranks.everyone(value)

    def agree(self, error: BranchGRPOError | None) -> None:
        """Raise the lowest rank's error on every rank, or return on every rank."""
        if self.ranks is not None:
            self.ranks.agree(error)
        elif error is not None:
            raise error

    def wait(self) -> None:
        """Return when every process has come here."""
        self.everyone(None)

    def close(self, failed: bool = False) -> None:
        """Leave the process group; after a failure without waiting for anybody."""
        if self.board is not None:
            self.board.close()
        if self.owner and not failed and dist.is_initialized():
            dist.destroy_process_group()


def launched() -> int:
    """Number of processes that the launcher (``torchrun``, ``accelerate launch``) started; 1 without one.

    Raises:
        InputError: an environment that no launcher makes: the processes would wait for others that never come.
    """
    size = os.environ.get("WORLD_SIZE", "1").strip()
    if not size.isdecimal() or int(size) < 1:
        raise InputError("WORLD_SIZE", size, "an integer ≥ 1, as a launcher sets it, or unset")
    if int(size) > 1:
        for name in ("RANK", "MASTER_ADDR", "MASTER_PORT"):
            if not os.environ.get(name):
                legal = f"set beside WORLD_SIZE = {size}: start through torchrun, or unset WORLD_SIZE"
                raise InputError(name, None, legal)
        if not os.environ["RANK"].isdecimal() or int(os.environ["RANK"]) >= int(size):
            raise InputError("RANK", os.environ["RANK"], f"an integer in 0..{int(size) - 1}, as a launcher sets it")
    return int(size)


def chosen_device(name: str) -> torch.device:
    """The device of ``run.device``; ``auto`` is this process's GPU where there is one.

    Raises:
        OptionError: a device that is not there.
    """
    local = int(os.environ.get("LOCAL_RANK", "0"))
    if name == "auto":
        name = f"cuda:{local}" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise OptionError("run.device", name, "cpu, cuda, cuda:N or auto") from None
    if device.type not in ("cpu", "cuda"):
        raise OptionError("run.device", name, "cpu, cuda, cuda:N or auto")
    if device.type == "cuda":
        count = torch.cuda.device_count()
        index = local if device.index is None else device.index
        if index >= count:
            raise OptionError("run.device", name, f"one of {count} CUDA devices" if count else "cpu: no GPU is there")
        if launched() > 1 and device.index is not None and name != f"cuda:{local}":
            raise OptionError("run.device", name, "auto or cuda where several processes run: each has its own GPU")
        device = torch.device("cuda", index)
    return device


def early_board() -> FailureBoard | None:
    """The board, where the launcher itself hosts it: then even an error before the processes have met is told once."""
    if launched() > 1 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return FailureBoard(int(os.environ["RANK"]), launched())
    return None


def start_cluster(run: RunConfig, board: FailureBoard | None = None) -> Cluster:
    """Join the processes that the launcher started; without a launcher, one process.

    Args:
        run: device and kind of parallelism.
        board: from ``early_board``; None makes one after the processes have met.

    Raises:
        OptionError: a device that is not there; FSDP2 for one process.
        InputError: several processes without accelerate.
    """
    device, size = chosen_device(run.device), launched()
    if size == 1:
        if run.parallel == "fsdp2":
            raise OptionError("run.parallel", "fsdp2", "auto or ddp for one process; start several by torchrun")
        return Cluster(device=device)
    try:
        from accelerate import PartialState  # type: ignore[import-untyped]
    except ImportError:
        legal = "1, or accelerate installed (pip install 'branchgrpo[training]')"
        raise InputError("WORLD_SIZE", size, legal) from None
    if device.type == "cuda":
        torch.cuda.set_device(device)
    mine = not dist.is_initialized()
    PartialState(cpu=device.type == "cpu", timeout=TIMEOUT)
    ranks = Ranks.of_group(dist.new_group(backend="gloo", timeout=TIMEOUT))
    board = FailureBoard(ranks.rank, ranks.size) if board is None else board
    return Cluster(ranks.rank, ranks.size, device, ranks, run.parallel == "fsdp2", board, owner=mine)


def spoken(board: FailureBoard | None, error: BaseException) -> BaseException:
    """What this process raises for its error: the error itself where it is the first to fail.

    Args:
        board: of the run's processes; None for one process.
        error: that ended the work here.
    """
    if board is None or isinstance(error, AnotherRankFailed):
        return error
    if not board.first():
        return AnotherRankFailed()
    if lost(error):
        legal = "running until the end; its own output, or the system's log (out of memory), says why it ended"
        return LostProcess("another process", str(error).splitlines()[0][:200], legal)
    return error


def concatenated(parts: Sequence[Sequence[Any]]) -> list[Any]:
    """The entries of all parts, in order."""
    return [entry for part in parts for entry in part]
