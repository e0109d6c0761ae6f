"""A set of rank processes that runs calls: the machinery under `launch`.

    parent                                            rank r
    ranks.call(packed)  ── socket pair: calls ────▶   run fn(*args, **kwargs)
                        ◀─ began, records, result ──
                        ── socket pair: control ──▶   "what are you doing?"  (a thread)
                        ◀─ pipes: stdout, stderr ───  print(...)
    store on 127.0.0.1  ◀─ TCP ─────────────────────  init_process_group()

`torch.multiprocessing.spawn` does the same first step, ``get_context("spawn").Process``
for each rank; what follows here is what a notebook needs on top. The channels are
anonymous: a rank is born with its ends, and nobody else can open them. Only the store
listens, on the loopback interface.
"""

import contextlib
import multiprocessing.util
import os
import pickle
import signal
import socket
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import reduction
from multiprocessing.connection import wait
from typing import Any

from ddp_lab.errors import Failure, RankFailed, RanksStuck
from ddp_lab.inside import Call, Failed, Returned, kill_group, rank_main
from ddp_lab.output import Output
from ddp_lab.payload import Packed, unpack
from ddp_lab.stuck import Row, Watch, stuck_table

__all__ = ["Ranks", "hold_interrupts"]

_GRACE_S = 1.0  # after a failure the other ranks may report theirs
_LOOK_AFTER_S = 0.5  # a rank that takes longer to answer is busy in C++


class _RemoteTraceback(Exception):
    """Shows a rank's traceback above the parent's, as concurrent.futures does."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


class _Rank:
    """The parent's end of one rank."""

    def __init__(self, rank: int, context: Any) -> None:
        self.rank = rank
        self.calls, calls = context.Pipe()
        self.control, control = context.Pipe()
        self.out, out = context.Pipe(duplex=False)
        self.err, err = context.Pipe(duplex=False)
        self.process = context.Process(
            target=rank_main, args=(calls, control, out, err), name=f"rank {rank}"
        )
        self.process.start()
        for end in (calls, control, out, err):
            end.close()  # the rank has its own: ours would hide that it is gone
        for stream in (self.out, self.err):
            os.set_blocking(stream.fileno(), False)
        self.outcome: Returned | Failed | None = None
        self.began = False
        self.gone = False
        self.value: Any = None
        self.asked = False

    def read(self, stream: int) -> bytes:
        """What the rank has written since, at most 1 MB; empty when that is all."""
        try:
            return os.read((self.out, self.err)[stream].fileno(), 2**20)
        except (BlockingIOError, OSError):
            return b""

    def close(self) -> None:
        for end in (self.calls, self.control, self.out, self.err):
            end.close()


class Ranks:
    """``num_ranks`` processes that run calls, until `close` or `kill`."""

    def __init__(self, num_ranks: int, *, start_method: str = "spawn") -> None:
        import torch.multiprocessing

        self.num_ranks = num_ranks
        self.alive = True
        context = torch.multiprocessing.get_context(start_method)
        if start_method == "forkserver":
            context.set_forkserver_preload(["torch", "ddp_lab.inside"])
        self._ranks: list[_Rank] = []
        self._store: Any = None
        self._finalizer = multiprocessing.util.Finalize(
            self, _kill_all, args=(self._ranks,), exitpriority=10
        )
        with hold_interrupts(), _nothing_to_import(), _environment(_early_env()):
            for rank in range(num_ranks):
                self._ranks.append(_Rank(rank, context))

    def call(
        self,
        packed: Packed,
        *,
        init: bool = False,
        device: str = "auto",
        num_threads: int | None = None,
        timeout_s: float | None = None,
        stuck_after_s: float = 30.0,
        echo: bool = True,
        on_record: Callable[[int, dict[str, Any]], None] | None = None,
    ) -> list[Any]:
        """Run one packed call on every rank and return the values in rank order."""
        port = self._host_store()
        threads = num_threads or max(1, _num_cores() // self.num_ranks)
        output = Output(self.num_ranks, echo=echo)
        watch = Watch(self.num_ranks, stuck_after_s)
        try:
            for rank in self._ranks:
                rank.outcome, rank.value, rank.began = None, None, False
                env = _torchrun_env(rank.rank, self.num_ranks, port, threads)
                _send_call(
                    rank,
                    Call(
                        env=env,
                        num_threads=threads,
                        init=init,
                        device=device,
                        sources=packed.sources,
                        num_shared=len(packed.storages),
                    ),
                    packed,
                )
            self._pump(output, watch, timeout_s, on_record)
        except BaseException:
            self.kill()
            raise
        finally:
            with hold_interrupts():
                self._drain(output)
                output.finish()
        if any(isinstance(rank.outcome, Failed) for rank in self._ranks):
            raise self._failure(watch)
        return [rank.value for rank in self._ranks]

    def _host_store(self) -> int:
        """Host the key-value store where the ranks meet, on the loopback only."""
        import torch.distributed as dist

        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            listener.listen(128)
            port = int(listener.getsockname()[1])
            self._store = dist.TCPStore(
                "127.0.0.1",
                port,
                is_master=True,
                wait_for_workers=False,
                master_listen_fd=listener.detach(),
            )
        return port

    def _pump(
        self,
        output: Output,
        watch: Watch,
        timeout_s: float | None,
        on_record: Callable[[int, dict[str, Any]], None] | None,
    ) -> None:
        """Move output, records and results until every rank has come to an end."""
        started = time.monotonic()
        failed_at: float | None = None
        looked_at = started
        look_every_s = min(1.0, watch._stuck_after_s / 5)
        while running := [rank for rank in self._ranks if rank.outcome is None]:
            now = time.monotonic()
            if timeout_s is not None and now - started > timeout_s:
                raise self._stuck(f"timeout_s={timeout_s:g} is over", watch)
            failed = [r for r in self._ranks if isinstance(r.outcome, Failed)]
            if failed and failed_at is None:
                failed_at = now
            if failed_at is not None:
                patient_s = _GRACE_S if all(r.began for r in running) else 10.0
                if now - failed_at > patient_s:
                    self._look(running, watch)
                    raise self._failure(watch)
            if now - looked_at >= look_every_s:
                looked_at = now
                for rank in running:
                    _ask(rank)
                ended = len(running) < len(self._ranks)
                if watch.stuck([r.rank for r in running], ended):
                    raise self._stuck(
                        f"no progress for {watch._stuck_after_s:g} s", watch
                    )
            sources: dict[Any, tuple[str, _Rank]] = {}
            for rank in self._ranks:
                if not rank.gone:
                    sources[rank.out] = ("out", rank)
                    sources[rank.err] = ("err", rank)
                if rank.outcome is None:
                    sources[rank.calls] = ("calls", rank)
                    sources[rank.control] = ("control", rank)
                    sources[rank.process.sentinel] = ("sentinel", rank)
            pause_s = output.show()
            for source in wait(list(sources), min(pause_s or 0.1, look_every_s)):
                kind, rank = sources[source]
                if kind == "out" or kind == "err":
                    stream = ("out", "err").index(kind)
                    data = rank.read(stream)
                    if data:
                        output.feed(rank.rank, stream, data)
                        watch.moved(rank.rank)
                    else:
                        rank.gone = True
                elif kind == "control":
                    with contextlib.suppress(EOFError, OSError):
                        watch.saw(rank.rank, pickle.loads(rank.control.recv_bytes()))
                        rank.asked = False
                elif kind == "calls":
                    self._receive(rank, on_record)
                elif rank.outcome is None:
                    self._receive(rank, on_record, ended=True)

    def _receive(
        self,
        rank: _Rank,
        on_record: Callable[[int, dict[str, Any]], None] | None,
        ended: bool = False,
    ) -> None:
        """Take what a rank reports; a rank that ends without a report has failed."""
        try:
            if ended and not rank.calls.poll():
                raise EOFError
            kind, body = pickle.loads(rank.calls.recv_bytes())
            if kind == "began":
                rank.began = True
            elif kind == "record":
                if on_record is not None:
                    on_record(rank.rank, body)
            elif kind == "failed":
                rank.outcome = body
            else:
                rank.value = unpack(rank.calls.recv_bytes())
                rank.outcome = body
        except (EOFError, ConnectionError):
            rank.outcome = _died(rank)

    def _look(self, ranks: Sequence[_Rank], watch: Watch) -> None:
        """Ask each rank once more what it does, and wait a moment for the answers."""
        waiting = {rank.control: rank for rank in ranks}
        for rank in ranks:
            _ask(rank)
        until = time.monotonic() + _LOOK_AFTER_S
        while waiting and (left_s := until - time.monotonic()) > 0:
            for control in wait(list(waiting), left_s):
                rank = waiting.pop(control)  # type: ignore[index]
                with contextlib.suppress(EOFError, OSError):
                    watch.saw(rank.rank, pickle.loads(rank.control.recv_bytes()))
                    rank.asked = False

    def _stuck(self, why: str, watch: Watch) -> RanksStuck:
        running = [
            rank for rank in self._ranks if not isinstance(rank.outcome, Returned)
        ]
        self._look([rank for rank in running if rank.outcome is None], watch)
        rows = [_row(rank, watch) for rank in self._ranks]
        numbers = ", ".join(str(rank.rank) for rank in running)
        table = stuck_table(rows)
        stacks = "\n".join(
            f"Stack of rank {rank.rank}:\n{sight.stack}"
            for rank in running
            if (sight := watch.last[rank.rank]) is not None
        )
        plural = "s" if len(running) > 1 else ""
        return RanksStuck(
            f"rank{plural} {numbers} of {self.num_ranks} stopped: {why}\n{table}",
            rows=rows,
            stacks=stacks,
        )

    def _failure(self, watch: Watch) -> RankFailed | RanksStuck:
        outcomes = {
            rank.rank: rank.outcome
            for rank in self._ranks
            if isinstance(rank.outcome, Failed)
        }
        root = _root_of(outcomes)
        if outcomes[root].consequence and len(outcomes) < self.num_ranks:
            return self._stuck("a rank that they waited for has left", watch)
        order = [root, *(rank for rank in outcomes if rank != root)]
        failures = [_failure_of(rank, outcomes[rank]) for rank in order]
        rows = [_row(rank, watch) for rank in self._ranks if rank.rank != root]
        error = RankFailed(
            f"rank {root} of {self.num_ranks} failed: {failures[0].headline}",
            failures=failures,
            others=[f"rank {row.rank}: {row.state}, {row.where}" for row in rows],
        )
        cause = failures[0].exception
        if cause is not None:
            cause.__cause__ = _RemoteTraceback(error.report)
        error.__cause__ = cause or _RemoteTraceback(error.report)
        return error

    def _drain(self, output: Output) -> None:
        for rank in self._ranks:
            for stream in range(2):
                while data := rank.read(stream):
                    output.feed(rank.rank, stream, data)

    def close(self) -> None:
        """Let the ranks end by themselves, and make sure that they do."""
        with hold_interrupts():
            for rank in self._ranks:
                with contextlib.suppress(OSError):
                    rank.calls.send_bytes(pickle.dumps(None))
            until = time.monotonic() + 2.0
            for rank in self._ranks:
                wait([rank.process.sentinel], max(0.0, until - time.monotonic()))
            self.kill()

    def kill(self) -> None:
        """End every rank now, with the processes it has started."""
        with hold_interrupts():
            _kill_all(self._ranks)
            self.alive = False
            self._store = None
            self._finalizer.cancel()

    def __enter__(self) -> "Ranks":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
        for rank in self._ranks:
            rank.close()


def _kill_all(ranks: Sequence[_Rank]) -> None:
    for rank in ranks:
        pid = rank.process.pid
        # before it is waited for, a dead rank keeps its number and its group
        kill_group(pid)
        with contextlib.suppress(ProcessLookupError):
            if rank.process.exitcode is None:
                os.kill(pid, signal.SIGKILL)  # it may not have its group yet
    for rank in ranks:
        rank.process.join(5)


def _send_call(rank: _Rank, call: Call, packed: Packed) -> None:
    try:
        rank.calls.send_bytes(pickle.dumps(call))
        rank.calls.send_bytes(packed.blob)
        sizes = []
        for storage in packed.storages:
            handle, size = storage._share_fd_cpu_()
            reduction.send_handle(rank.calls, handle, rank.process.pid)
            sizes.append(size)
        for size in sizes:
            rank.calls.send_bytes(pickle.dumps(size))
    except OSError:
        rank.outcome = _died(rank)


def _ask(rank: _Rank) -> None:
    if not rank.asked:
        with contextlib.suppress(OSError):
            rank.control.send_bytes(b"look")
            rank.asked = True


def _died(rank: _Rank) -> Failed:
    """Describe a rank that ended without a word."""
    wait([rank.process.sentinel], 2.0)
    kill_group(rank.process.pid)
    rank.process.join(2)
    code = rank.process.exitcode
    if code is not None and code < 0:
        kind = _signal_name(-code)
        message = _LIKELY_CAUSE.get(kind, "the process was killed")
    else:
        kind = "exit"
        message = f"the process ended with exit code {code} before fn returned"
    return Failed(
        kind=kind,
        message=message,
        text="",
        where="",
        at_s=time.monotonic(),
        consequence=False,
        exit_code=code,
        exception=None,
        collective="-",
    )


_LIKELY_CAUSE = {
    "SIGKILL": "killed from outside, most likely because memory ran out "
    "(each rank holds its own copy of what it is given)",
    "SIGSEGV": "crashed in native code (SIGSEGV)",
    "SIGBUS": "bus error, most likely because /dev/shm is full "
    "(more shared memory, or DataLoader(num_workers=0))",
    "SIGABRT": "native code gave up (SIGABRT); its message is in the output above",
    "SIGTERM": "ended from outside (SIGTERM)",
}


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _failure_of(rank: int, failed: Failed) -> Failure:
    exception = None
    if failed.exception is not None:
        with contextlib.suppress(Exception):
            exception = unpack(failed.exception)
    return Failure(
        rank=rank,
        kind=failed.kind,
        message=failed.message,
        traceback=failed.text,
        where=failed.where,
        consequence=failed.consequence,
        exit_code=failed.exit_code,
        exception=exception,
    )


def _root_of(failed: dict[int, Failed]) -> int:
    """The rank whose failure came first; lost connections are what it led to."""
    first = min(failed.values(), key=lambda f: (f.consequence, f.at_s))
    # the same mistake on several ranks: whoever was faster, the lowest rank speaks
    return min(
        rank
        for rank, f in failed.items()
        if (f.kind, f.where) == (first.kind, first.where)
    )


def _row(rank: _Rank, watch: Watch) -> Row:
    outcome = rank.outcome
    if isinstance(outcome, Returned):
        return Row(rank.rank, "finished", outcome.collective, "returned")
    if isinstance(outcome, Failed):
        text = f"{outcome.kind}: {outcome.message}".splitlines()[0]
        if outcome.consequence:
            return Row(rank.rank, "waiting", outcome.collective, outcome.where)
        where = f"{outcome.where} ({text})" if outcome.where else text
        return Row(rank.rank, "failed", outcome.collective, where)
    sight = watch.last[rank.rank]
    if sight is None:
        return Row(rank.rank, "running", "-", "gives no answer, busy in native code")
    state = "waiting" if sight.in_collective else "idle"
    if not sight.in_collective and not watch.still(rank.rank):
        state = "running"
    return Row(rank.rank, state, sight.collective, sight.where)


def _torchrun_env(rank: int, num_ranks: int, port: int, threads: int) -> dict[str, str]:
    """The variables that torchrun sets, for one rank on one machine."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "GROUP_RANK": "0",
        "ROLE_RANK": str(rank),
        "ROLE_NAME": "default",
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "GROUP_WORLD_SIZE": "1",
        "ROLE_WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_RUN_ID": "ddp_lab",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "OMP_NUM_THREADS": str(threads),
    }


def _early_env() -> dict[str, str]:
    """What a rank needs before it imports torch, unless it is set already."""
    wanted = {
        "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo",
        "TORCH_FR_BUFFER_SIZE": "256",  # the flight recorder: last collectives entered
        "USE_LIBUV": "0" if sys.platform == "win32" else "1",
    }
    return {name: value for name, value in wanted.items() if name not in os.environ}


@contextlib.contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in variables:
            os.environ.pop(name, None)


@contextlib.contextmanager
def _nothing_to_import() -> Iterator[None]:
    """Keep multiprocessing from running the main script again in each rank.

    Functions travel by value, so a rank needs nothing of it: a script needs no
    ``if __name__ == "__main__"`` guard, and a notebook whose namespace has a
    ``__file__`` runs the cell's function, not that file's.
    """
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


@contextlib.contextmanager
def hold_interrupts() -> Iterator[None]:
    """Let a Ctrl-C wait until the block is done, so that no process is forgotten."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    held: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: held.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if held:
        raise KeyboardInterrupt


def _num_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
