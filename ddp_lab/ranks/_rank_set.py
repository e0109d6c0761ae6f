"""A set of rank processes that runs calls: the machinery under `launch`.

    parent                                            rank r
    set.call(packed)    ── socket pair: calls ────▶   run fn(*args, **kwargs)
                        ◀─ began, records, result ──
                        ── socket pair: control ──▶   "what are you doing?"  (a thread)
                        ◀─ pipes: stdout, stderr ───  print(...)
                        ◀─ pipe: crash ─────────────  faulthandler's last words
    store on 127.0.0.1  ◀─ TCP ─────────────────────  init_process_group()

`RankSet.start` is one call of `torch.multiprocessing.spawn`; what follows it is what a
notebook needs on top. The channels are anonymous: the ranks are born with their ends
(each with everybody's, it closes the others'), and no other process can open them. Only
the store listens, on the loopback interface.

A set can run one call (`launch`) or many. After a call that returned or raised on every
rank, the set is ready for the next one. If ranks had to be stopped it is gone (`alive`
is False). Whether a process has ended by itself, its exit code tells.
"""

import linecache
import multiprocessing.util
import pickle
import signal
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from multiprocessing.connection import wait
from typing import Any

from ddp_lab.ranks import _environment
from ddp_lab.ranks._calls import Call, Outcome
from ddp_lab.ranks._interrupts import (
    hold_interrupts,
    interrupts_blocked,
    raise_if_interrupted,
)
from ddp_lab.ranks._main import MARK, STACK_SIGNAL, kill_marked, rank_main
from ddp_lab.ranks._output import Output
from ddp_lab.ranks._pickling import Packed
from ddp_lab.ranks._process import ANSWER_S, RankProcess
from ddp_lab.ranks._report import failure_error, ranks_text, rows_of, stuck_error
from ddp_lab.ranks._watch import Watch, stuck_table
from ddp_lab.rendezvous.store import host_store

__all__ = ["OnRecord", "RankSet"]

OnRecord = Callable[[int, dict[str, Any]], None]

_GRACE_S = 1.0  # after a failure, the other ranks may report theirs
_STARTING_S = 10.0  # so long, a rank that is still starting is given time
_CLEAN_UP_S = 0.5  # after a stop, for the ``finally`` blocks of the user's code
_LEAVING_S = 30.0  # after a return, for the threads that the user's code has left
_LEAVING_FAILED_S = 2.0  # after a failure, nobody waits for them
_ATTENTION_S = 0.25  # between two rounds; a longer time is not the ranks'


class RankSet:
    """``num_ranks`` processes that run calls.

    with RankSet(2) as ranks:
        values = ranks.call(pack_call(fn, args, kwargs))

    Args:
        num_ranks: number of processes, 1 or more.
        num_threads: CPU threads of a rank; None for `threads_per_rank`.
    """

    def __init__(self, num_ranks: int, *, num_threads: int | None = None) -> None:
        self.num_ranks = num_ranks
        self.num_threads = num_threads or _environment.threads_per_rank(num_ranks)
        self.alive = False
        self._echo = True
        self._mark = uuid.uuid4().hex
        self._ranks: list[RankProcess] = []
        self._store: Any = None
        self._port = 0

    def start(self) -> None:
        """Start the processes; they import torch while this returns."""
        with _environment.one_at_a_time:
            self._start()

    def _start(self) -> None:
        import torch.multiprocessing

        # at the interpreter's end multiprocessing waits for children: be there first
        multiprocessing.util.Finalize(
            self, _kill_all, args=(self._ranks, self._mark), exitpriority=10
        )
        self.alive = True
        born_with = {**_environment.early_env(self.num_threads), MARK: self._mark}
        with (
            hold_interrupts(),
            interrupts_blocked(),
            _environment.nothing_to_import(),
            _environment.inherited(born_with),
        ):
            ranks = [RankProcess(rank) for rank in range(self.num_ranks)]
            try:
                context = torch.multiprocessing.spawn(
                    rank_main,
                    args=([rank.ends for rank in ranks],),
                    nprocs=self.num_ranks,
                    join=False,
                )
            except BaseException:
                for rank in ranks:  # those that were started end by themselves
                    rank.close()
                raise
            for rank, process in zip(ranks, context.processes, strict=True):
                rank.has_started(process)
            self._ranks += ranks

    def call(
        self,
        packed: Packed,
        *,
        init: bool = False,
        device: str = "auto",
        timeout_s: float | None = None,
        stuck_after_s: float = 30.0,
        echo: bool = True,
        on_record: OnRecord | None = None,
        only: Sequence[int] | None = None,
    ) -> list[Any]:
        """Run one packed call on every rank; see `launch` for the arguments.

        Args:
            only: the ranks to run it on, None for all.

        Returns:
            The values of these ranks, in rank order.

        Raises:
            RankFailed, RanksStuck, KeyboardInterrupt: see `launch`. Unless every rank
                came to an end by itself, the set is killed.
        """
        __tracebackhide__ = True
        assert self.alive, "not started, or killed after a call that did not end"
        if not any(self.groups_open):
            with _environment.one_at_a_time:
                self._port, self._store = host_store()
        self._echo = echo
        output = Output(self.num_ranks, echo=echo)
        watch = Watch(self.num_ranks, stuck_after_s)
        for name, lines in packed.sources.items():  # for lines told by faulthandler
            linecache.cache[name] = (0, None, lines, name)
        failed = True
        with hold_interrupts():
            try:
                for rank in self._ranks:
                    if only is not None and rank.rank not in only:
                        rank.leave_out()
                        continue
                    env = _environment.torchrun_env(
                        rank.rank, self.num_ranks, self._port, self.num_threads
                    )
                    call = Call(
                        env=env,
                        num_threads=self.num_threads,
                        init=init,
                        device=device,
                        sources=packed.sources,
                        fork_loaders=_environment.no_start_method_chosen(),
                        num_shared=len(packed.storages),
                    )
                    rank.send(call, packed)
                self._pump(output, watch, timeout_s, on_record)
                failed = self._some_failed
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
        asked = self._ranks if only is None else [self._ranks[r] for r in sorted(only)]
        values = [rank.value for rank in asked]
        for rank in asked:
            rank.value = None  # it is the caller's
        return values

    @property
    def pids(self) -> list[int]:
        """The ranks' process ids, in rank order."""
        return [rank.process.pid for rank in self._ranks]

    @property
    def exit_codes(self) -> list[int | None]:
        """None for each rank that lives, minus the signal's number if it was killed."""
        return [rank.exit_code for rank in self._ranks]

    @property
    def groups_open(self) -> list[bool]:
        """Whether each rank had a process group open when its last call ended."""
        return [o is not None and o.group_open for o in self._outcomes]

    @property
    def _outcomes(self) -> list[Outcome | None]:
        return [rank.outcome for rank in self._ranks]

    @property
    def _some_failed(self) -> bool:
        return any(o is not None and o.failure is not None for o in self._outcomes)

    def _pump(
        self,
        output: Output,
        watch: Watch,
        timeout_s: float | None,
        on_record: OnRecord | None,
    ) -> None:
        """Move output, records and results until every rank has come to an end."""
        __tracebackhide__ = True
        before = time.monotonic()
        now = looked = 0.0  # on a clock that stands still while nobody attends to it
        failed: float | None = None
        look_every_s = min(1.0, watch.stuck_after_s / 5)
        num_running = self.num_ranks
        while running := [rank for rank in self._ranks if rank.outcome is None]:
            raise_if_interrupted()
            if len(running) < num_running:  # it may have just released the others
                num_running = len(running)
                for rank in running:
                    watch.moved(rank.rank)
            # a callback that takes its time, or a pause of this process, is not theirs
            now += min(time.monotonic() - before, _ATTENTION_S)
            before = time.monotonic()
            if timeout_s is not None and now > timeout_s:
                raise self._stuck(
                    f"still running: timeout_s={timeout_s:g} is over", watch
                )
            if failed is None and self._some_failed:
                failed = now
            if failed is not None:
                patience_s = _GRACE_S if all(r.began for r in running) else _STARTING_S
                if now - failed > patience_s:
                    self._look(running, watch)
                    self._take_hidden(running, watch)
                    raise failure_error(self._outcomes, watch)
            if now - looked >= look_every_s:
                looked = now
                for rank in running:
                    rank.ask()
                    if rank.silent_s > ANSWER_S * 4:
                        watch.moved(rank.rank)
            still = watch.stuck([rank.rank for rank in running])
            if still and failed is None:  # a failure explains more
                why = f"stuck: no progress for {watch.stuck_after_s:g} s"
                raise self._stuck(why, watch)
            pause_s = min(output.show() or 0.1, look_every_s)
            self._move(output, watch, on_record, pause_s)
            for rank in running:
                if rank.has_ended() and not rank.calls.poll():
                    rank.died()

    def _move(
        self, output: Output, watch: Watch, on_record: OnRecord | None, pause_s: float
    ) -> None:
        """Take whatever the ranks have sent, or wait for it at most ``pause_s``."""
        sources: dict[Any, tuple[RankProcess, str | int]] = {}
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
                watch.moved(rank.rank)  # it has begun, or sent a record
                self._report(rank, on_record)

    def _report(self, rank: RankProcess, on_record: OnRecord | None) -> None:
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
                rank.take_value(rank.calls.recv_bytes(), body)
        except (EOFError, ConnectionError):
            rank.died()

    def _look(self, ranks: Sequence[RankProcess], watch: Watch) -> None:
        """Ask each rank what it does, twice: whether it computes shows in between."""
        for pause_s in (0.1, 0.0):
            silent: dict[Any, RankProcess] = {rank.control: rank for rank in ranks}
            for rank in ranks:
                rank.ask()
            until = time.monotonic() + ANSWER_S
            while silent and (left_s := until - time.monotonic()) > 0:
                for control in wait(list(silent), left_s):
                    silent.pop(control).answer(watch)
            time.sleep(pause_s)
        for rank in silent.values():  # a signal handler needs no interpreter lock
            rank.signal(STACK_SIGNAL)
        for rank in silent.values():
            if sight := rank.last_words(ANSWER_S):
                watch.last[rank.rank] = sight

    def _take_hidden(self, ranks: Sequence[RankProcess], watch: Watch) -> None:
        """Take what ranks have raised and not yet told, where nothing else explains.

        An exception is told when the function has ended, and its ``finally`` may wait.
        """
        told = [o.failure for o in self._outcomes if o is not None and o.failure]
        if any(not failure.consequence for failure in told):
            return
        for rank in ranks:
            sight = watch.last[rank.rank]
            if sight and sight.handled and not sight.handled.consequence:
                rank.outcome = Outcome(
                    failure=sight.handled, collective=sight.collective, group_open=True
                )

    def _stuck(self, why: str, watch: Watch) -> Exception:
        running = [rank for rank in self._ranks if rank.outcome is None]
        self._look(running, watch)
        self._take_hidden(running, watch)
        if self._some_failed:
            return failure_error(self._outcomes, watch)
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
                rank.signal(signal.SIGINT)
        until = time.monotonic() + _CLEAN_UP_S
        waiting = {rank.calls for rank in running if rank.began}
        while waiting and (left_s := until - time.monotonic()) > 0:
            waiting -= set(wait(list(waiting), left_s))
        self.kill()
        left = [r.rank for r in self._ranks if r.exit_code is None]
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

    def close(self, patience_s: float = _LEAVING_S) -> None:
        """Let the ranks end by themselves, and make sure that they do.

        They end as `torch.multiprocessing.spawn`'s do: with their threads and exit
        hooks done, whose output is shown.

        Args:
            patience_s: seconds after which they are ended; a line says so.
        """
        with hold_interrupts():
            for rank in self._ranks:
                rank.say_enough()
            output = Output(self.num_ranks, echo=self._echo)
            try:
                left = self._let_end(output, patience_s)
            finally:
                self.kill()
                self._drain(output)
                output.finish()
                for rank in self._ranks:
                    rank.close()
            if left and patience_s >= _LEAVING_S:
                print(
                    f"{ranks_text(left)} had returned, but did not end within "
                    f"{patience_s:g} s: threads or exit hooks that still ran there "
                    "were cut off; join() what the function starts",
                    file=sys.stderr,
                )

    def _let_end(self, output: Output, patience_s: float) -> list[int]:
        """Wait until the ranks have ended; return those that have not in time."""
        until = time.monotonic() + patience_s
        while left := [rank for rank in self._ranks if not rank.has_ended()]:
            if time.monotonic() > until:
                return [rank.rank for rank in left]
            raise_if_interrupted()
            wait([rank.process.sentinel for rank in left], 0.02)
            self._drain(output)
            output.show()
        return []

    def kill(self) -> None:
        """End every rank now, with the processes it has started."""
        with hold_interrupts():
            _kill_all(self._ranks, self._mark)
            self.alive = False
            self._store = None

    def __enter__(self) -> "RankSet":
        try:
            self.start()
        except BaseException:
            self.kill()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(_LEAVING_S if kind is None else _LEAVING_FAILED_S)


def _kill_all(ranks: Sequence[RankProcess], mark: str) -> None:
    for rank in ranks:
        rank.kill()
    kill_marked(mark)
    for rank in ranks:
        rank.process.join(5.0)
