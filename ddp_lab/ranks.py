"""A set of rank processes that runs calls: the machinery under `launch`.

    parent                                            rank r
    ranks.call(packed)  ── socket pair: calls ────▶   run fn(*args, **kwargs)
                        ◀─ began, records, result ──
                        ── socket pair: control ──▶   "what are you doing?"  (a thread)
                        ◀─ pipes: stdout, stderr ───  print(...)
                        ◀─ pipe: crash ─────────────  faulthandler's last words
    store on 127.0.0.1  ◀─ TCP ─────────────────────  init_process_group()

`torch.multiprocessing.spawn` does the same first step, ``get_context("spawn").Process``
for each rank; what follows here is what a notebook needs on top. The channels are
anonymous: a rank is born with its ends, and nobody else can open them. Only the store
listens, on the loopback interface.

A set can run one call (`launch`) or many. After a call in which every rank came to an
end, the set is ready for the next one; after any other it is gone (`alive` is False).
"""

import contextlib
import linecache
import multiprocessing.util
import os
import pickle
import signal
import sys
import time
from collections.abc import Callable, Sequence
from multiprocessing import reduction
from multiprocessing.connection import wait
from typing import Any

from ddp_lab import start
from ddp_lab.inside import STACK_SIGNAL, Call, Failed, Returned, kill_group, rank_main
from ddp_lab.output import Output
from ddp_lab.payload import Packed, unpack
from ddp_lab.stuck import Sight, Watch, sight_from_dump, stuck_table
from ddp_lab.verdict import died, failure_error, rows_of, stuck_error

__all__ = ["OnRecord", "Ranks"]

OnRecord = Callable[[int, dict[str, Any]], None]

_GRACE_S = 1.0  # after a failure, the other ranks may report theirs
_STARTING_S = 10.0  # ... and ranks that are still starting get this long
_ANSWER_S = 0.5  # a rank that does not answer by then holds the interpreter lock
_CLEAN_UP_S = 0.5  # after a stop, for the ``finally`` blocks of the user's code
_TAIL_BYTES = 4096  # of stderr, where native code says why it gives up


class _Rank:
    """The parent's end of one rank."""

    def __init__(self, rank: int, context: Any) -> None:
        self.rank = rank
        self.outcome: Returned | Failed | None = None
        self.value: Any = None
        self.began = False
        self.asked_s: float | None = None  # when a question without answer was sent
        self.tail = b""
        self.calls, calls = context.Pipe()
        self.control, control = context.Pipe()
        pipes = [context.Pipe(duplex=False) for _ in range(3)]
        self.streams = [reader for reader, _ in pipes[:2]]
        self.crash = pipes[2][0]
        ends = (calls, control, *(writer for _, writer in pipes))
        self.process = context.Process(target=rank_main, args=ends, name=f"rank {rank}")
        self.process.start()
        for end in ends:
            end.close()  # the rank has its own: ours would hide that it is gone
        for stream in (*self.streams, self.crash):
            os.set_blocking(stream.fileno(), False)
        self.open = [True, True]

    def read(self, stream: int) -> bytes:
        """What the rank has written since; empty when that is all for now."""
        try:
            data = os.read(self.streams[stream].fileno(), 2**20)
        except BlockingIOError:
            return b""
        if not data:
            self.open[stream] = False  # the rank has closed it
        elif stream == 1:
            self.tail = (self.tail + data)[-_TAIL_BYTES:]
        return data

    def ask(self) -> None:
        """Ask what the rank is doing; `answer` takes the reply when it is there."""
        if self.asked_s is None:
            with contextlib.suppress(OSError):
                self.control.send_bytes(b"look")
                self.asked_s = time.monotonic()

    def answer(self, watch: Watch) -> None:
        with contextlib.suppress(EOFError, OSError):
            watch.saw(self.rank, pickle.loads(self.control.recv_bytes()))
            self.asked_s = None

    def last_words(self, patience_s: float) -> Sight | None:
        """What faulthandler writes about the rank: where it crashed, or where it is."""
        text = b""
        until = time.monotonic() + patience_s
        while (left_s := until - time.monotonic()) > 0 and wait([self.crash], left_s):
            data = os.read(self.crash.fileno(), 2**16)
            text += data
            if (sight := sight_from_dump(text.decode("ascii", "replace"))) or not data:
                return sight
        return None

    def close(self) -> None:
        for end in (self.calls, self.control, *self.streams, self.crash):
            end.close()


class Ranks:
    """``num_ranks`` processes that run calls.

    with Ranks(2) as ranks:
        values = ranks.call(pack_call(fn, args, kwargs))
    """

    def __init__(self, num_ranks: int, *, start_method: str = "spawn") -> None:
        import torch.multiprocessing

        self.num_ranks = num_ranks
        self.alive = False
        self._context = torch.multiprocessing.get_context(start_method)
        if start_method == "forkserver":
            self._context.set_forkserver_preload(["torch", "ddp_lab.inside"])
        self._ranks: list[_Rank] = []
        self._store: Any = None
        self._port = 0

    def start(self) -> None:
        """Start the processes; they import what they need while this returns."""
        # at the interpreter's end multiprocessing waits for children: be there first
        multiprocessing.util.Finalize(
            self, _kill_all, args=(self._ranks,), exitpriority=10
        )
        self.alive = True
        with (
            start.hold_interrupts(),
            start.interrupts_blocked(),
            start.nothing_to_import(),
            start.environment(start.early_env()),
        ):
            for rank in range(self.num_ranks):
                self._ranks.append(_Rank(rank, self._context))

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
        on_record: OnRecord | None = None,
    ) -> list[Any]:
        """Run one packed call on every rank; see `launch` for the arguments.

        Returns:
            The values, in rank order.

        Raises:
            RankFailed, RanksStuck, KeyboardInterrupt: see `launch`. Unless every rank
                came to an end by itself, the set is killed.
        """
        __tracebackhide__ = True
        assert self.alive, "not started, or killed after a call that did not end"
        if not any(outcome and outcome.group_open for outcome in self._outcomes):
            self._port, self._store = start.host_store()
        threads = num_threads or start.threads_per_rank(self.num_ranks)
        output = Output(self.num_ranks, echo=echo)
        watch = Watch(self.num_ranks, stuck_after_s)
        for name, lines in packed.sources.items():  # for lines told by faulthandler
            linecache.cache[name] = (0, None, lines, name)
        failed = True
        with start.hold_interrupts():
            try:
                for rank in self._ranks:
                    rank.outcome, rank.value, rank.began = None, None, False
                    env = start.torchrun_env(
                        rank.rank, self.num_ranks, self._port, threads
                    )
                    call = Call(
                        env=env,
                        num_threads=threads,
                        init=init,
                        device=device,
                        sources=packed.sources,
                        num_shared=len(packed.storages),
                    )
                    _send(rank, call, packed)
                self._pump(output, watch, timeout_s, on_record)
                failed = any(isinstance(o, Failed) for o in self._outcomes)
            except KeyboardInterrupt:
                self._stop(watch)
                raise
            except BaseException:
                self.kill()
                raise
            finally:
                self._drain(output)
                output.finish(failed=failed)
        if failed:
            raise failure_error(self._outcomes, watch)
        return [rank.value for rank in self._ranks]

    @property
    def _outcomes(self) -> list[Returned | Failed | None]:
        return [rank.outcome for rank in self._ranks]

    def _pump(
        self,
        output: Output,
        watch: Watch,
        timeout_s: float | None,
        on_record: OnRecord | None,
    ) -> None:
        """Move output, records and results until every rank has come to an end."""
        __tracebackhide__ = True
        started = looked = time.monotonic()
        failed: float | None = None
        look_every_s = min(1.0, watch.stuck_after_s / 5)
        while running := [rank for rank in self._ranks if rank.outcome is None]:
            start.raise_if_interrupted()
            now = time.monotonic()
            if timeout_s is not None and now - started > timeout_s:
                raise self._stuck(
                    f"still running: timeout_s={timeout_s:g} is over", watch
                )
            if failed is None and any(isinstance(o, Failed) for o in self._outcomes):
                failed = now
            if failed is not None:
                patience_s = _GRACE_S if all(r.began for r in running) else _STARTING_S
                if now - failed > patience_s:
                    self._look(running, watch)
                    raise failure_error(self._outcomes, watch)
            if now - looked >= look_every_s:
                looked = now
                for rank in running:
                    rank.ask()
                    if rank.asked_s is not None and now - rank.asked_s > _ANSWER_S * 4:
                        watch.moved(rank.rank)
                some_ended = len(running) < self.num_ranks
                if watch.stuck([rank.rank for rank in running], some_ended):
                    why = f"stuck: no progress for {watch.stuck_after_s:g} s"
                    raise self._stuck(why, watch)
            pause_s = min(output.show() or 0.1, look_every_s)
            self._move(output, watch, on_record, pause_s)

    def _move(
        self, output: Output, watch: Watch, on_record: OnRecord | None, pause_s: float
    ) -> None:
        """Take whatever the ranks have sent, or wait for it at most ``pause_s``."""
        sources: dict[Any, tuple[_Rank, str | int]] = {}
        for rank in self._ranks:
            for stream in range(2):
                if rank.open[stream]:
                    sources[rank.streams[stream]] = rank, stream
            if rank.outcome is None:
                sources[rank.control] = rank, "answer"
                sources[rank.calls] = rank, "report"
                sources[rank.process.sentinel] = rank, "report"
        for ready in wait(list(sources), pause_s):
            rank, what = sources[ready]
            if isinstance(what, int):
                if data := rank.read(what):
                    output.feed(rank.rank, what, data)
                    watch.moved(rank.rank)
            elif what == "answer":
                rank.answer(watch)
            elif rank.outcome is None:
                self._report(rank, on_record)

    def _report(self, rank: _Rank, on_record: OnRecord | None) -> None:
        """Take what a rank reports; a rank that ends without a report has failed."""
        try:
            if not rank.calls.poll():  # the process has ended, and that was all
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
            wait([rank.process.sentinel], 2.0)
            kill_group(rank.process.pid)
            rank.process.join(2.0)
            rank.read(1)
            rank.outcome = died(
                rank.process.exitcode,
                rank.last_words(_ANSWER_S),
                rank.tail.decode("utf-8", "replace"),
            )

    def _look(self, ranks: Sequence[_Rank], watch: Watch) -> None:
        """Ask each rank what it does, twice: whether it computes shows in between."""
        for pause_s in (0.1, 0.0):
            silent = {rank.control: rank for rank in ranks}
            for rank in ranks:
                rank.ask()
            until = time.monotonic() + _ANSWER_S
            while silent and (left_s := until - time.monotonic()) > 0:
                for control in wait(list(silent), left_s):
                    silent.pop(control).answer(watch)
            time.sleep(pause_s)
        for rank in silent.values():  # a signal handler needs no interpreter lock
            with contextlib.suppress(OSError):
                os.kill(rank.process.pid, STACK_SIGNAL)
        for rank in silent.values():
            if sight := rank.last_words(_ANSWER_S):
                watch.last[rank.rank] = sight

    def _stuck(self, why: str, watch: Watch) -> Exception:
        self._look([rank for rank in self._ranks if rank.outcome is None], watch)
        verb = "are" if self._outcomes.count(None) > 1 else "is"
        if why.startswith("still"):
            verb = {"are": "were", "is": "was"}[verb]
        return stuck_error(f"{verb} {why}", self._outcomes, watch)

    def _stop(self, watch: Watch) -> None:
        """End the ranks because the user said so, and leave a receipt."""
        before = time.monotonic()
        running = [rank for rank in self._ranks if rank.outcome is None]
        self._look(running, watch)
        rows = rows_of(self._outcomes, watch)
        for rank in running:
            if rank.began:
                with contextlib.suppress(OSError):
                    os.kill(rank.process.pid, signal.SIGINT)
        until = time.monotonic() + _CLEAN_UP_S
        waiting = {rank.calls for rank in running if rank.began}
        while waiting and (left_s := until - time.monotonic()) > 0:
            waiting -= set(wait(list(waiting), left_s))
        self.kill()
        left = [r.rank for r in self._ranks if r.process.exitcode is None]
        print(
            f"Interrupted: {len(running)} running rank(s) of {self.num_ranks} stopped "
            f"in {time.monotonic() - before:.1f} s, "
            + (f"ranks {left} do not end" if left else "no process is left")
            + f"\n{stuck_table(rows)}",
            file=sys.stderr,
        )

    def _drain(self, output: Output) -> None:
        for rank in self._ranks:
            for stream in range(2):
                while rank.open[stream] and (data := rank.read(stream)):
                    output.feed(rank.rank, stream, data)

    def close(self) -> None:
        """Let the ranks end by themselves, and make sure that they do."""
        with start.hold_interrupts():
            for rank in self._ranks:
                with contextlib.suppress(OSError):
                    rank.calls.send_bytes(pickle.dumps(None))
            until = time.monotonic() + 2.0
            for rank in self._ranks:
                wait([rank.process.sentinel], max(0.0, until - time.monotonic()))
            self.kill()
            for rank in self._ranks:
                rank.close()

    def kill(self) -> None:
        """End every rank now, with the processes it has started."""
        with start.hold_interrupts():
            _kill_all(self._ranks)
            self.alive = False
            self._store = None

    def __enter__(self) -> "Ranks":
        try:
            self.start()
        except BaseException:
            self.kill()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _kill_all(ranks: Sequence[_Rank]) -> None:
    for rank in ranks:
        if rank.process.exitcode is None:
            # a dead rank keeps its number and its group until it is waited for
            kill_group(rank.process.pid)
            with contextlib.suppress(OSError):
                os.kill(rank.process.pid, signal.SIGKILL)  # it may have no group yet
    for rank in ranks:
        rank.process.join(5.0)


def _send(rank: _Rank, call: Call, packed: Packed) -> None:
    # a rank that is gone already is noticed, and explained, when its report is read
    with contextlib.suppress(OSError):
        rank.calls.send_bytes(pickle.dumps(call))
        rank.calls.send_bytes(packed.blob)
        for storage in packed.storages:
            handle, size = storage._share_fd_cpu_()
            rank.calls.send_bytes(pickle.dumps(size))
            reduction.send_handle(rank.calls, handle, rank.process.pid)
