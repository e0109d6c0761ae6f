"""Ten ways to get stuck: the right rank and the right line; and no false alarm.

When a verdict must come is a rule about the parent's clock. It is tested with a clock
of our own and ranks that only play a part; real ranks show what the verdict says.
"""

import inspect
import json
import linecache
import socket
import sys
from types import SimpleNamespace

import pytest

import rank_functions
from ddp_lab.errors import Failure, RankFailed, RanksStuck
from ddp_lab.ranks import _main, _rank_set, _watch
from ddp_lab.ranks._calls import Outcome
from ddp_lab.ranks._rank_set import RankSet
from ddp_lab.ranks._report import rows_of
from ddp_lab.ranks._watch import Sight, Watch, last_collective, sight_from_dump
from ddp_lab.rendezvous import meeting

STUCK_AFTER_S = 1.0


def line_of(fn, mark="# HERE"):
    """The line of ``fn`` that ends with the mark, as a table shows it."""
    lines, first = inspect.getsourcelines(fn)
    (offset,) = [i for i, line in enumerate(lines) if line.rstrip().endswith(mark)]
    return f"rank_functions.py, line {first + offset}: {lines[offset].strip()}"


W, F = "waiting", "finished"
SHAPES = {
    # name: state and last collective of each rank
    "rank_0_only": [(W, "all_reduce #1"), (F, "-")],
    "barrier_missed": [(W, "barrier #2"), (F, "all_reduce #1")],
    "other_order": [(W, "all_reduce #1"), (W, "broadcast #1")],
    "returned_early": [(W, "all_reduce #3"), (F, "all_reduce #2")],
    "recv_without_send": [(W, "recv"), (F, "-")],
}


def stuck(workers, fn, *args, **options):
    with pytest.raises(RanksStuck) as caught:
        workers.run(fn, *args, **{"stuck_after_s": STUCK_AFTER_S, **options})
    print(caught.value)  # pytest -s shows the tables
    return caught.value


@pytest.mark.parametrize("name", SHAPES)
def test_shape(name, request):
    # after returned_early the ranks can go on: the group was closed, and both know it
    ranks = "warm" if name == "returned_early" else "doomed"
    workers = request.getfixturevalue(ranks)
    fn = getattr(rank_functions, name)
    error = stuck(workers, fn)
    assert workers._ranks.alive == (name == "returned_early")
    rows = [(row.state, row.collective) for row in error.rows]
    assert rows == SHAPES[name]
    assert error.rows[0].where == line_of(fn)
    if name == "recv_without_send":
        assert "one recv for each send" in str(error)
    elif name == "other_order":
        assert error.rows[1].where == line_of(fn, "# HERE TOO")
        assert "different collectives" in str(error)
    else:
        assert "rank 1 returned without it" in str(error)


def test_uneven_number_of_batches(doomed):
    error = stuck(doomed, rank_functions.uneven_batches)
    assert [row.state for row in error.rows] == [W, F]
    assert error.rows[0].where == line_of(rank_functions.uneven_batches)
    assert error.rows[0].collective == "all_reduce #8"  # of DDP


@pytest.mark.parametrize("name", ["other_place", "other_world_size"])
def test_ranks_that_never_meet(name, doomed):
    fn = getattr(rank_functions, name)
    with socket.socket() as taken:  # bound but not listening: nobody answers there
        taken.bind(("127.0.0.1", 0))
        args = [taken.getsockname()[1]] if name == "other_place" else []
        error = stuck(doomed, fn, *args)
    assert [row.state for row in error.rows] == [W, W]
    assert error.rows[0].collective == "init_process_group"
    assert error.rows[0].where == line_of(fn)
    assert "leave RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT as they" in str(error)


class Leap:
    """The parent's clock, which a test can put forward."""

    def __init__(self, real):
        self._real = real
        self.sleep = real.sleep
        self.ahead_s = 0.0

    def monotonic(self):
        return self._real.monotonic() + self.ahead_s


@pytest.fixture
def leap(monkeypatch):
    leap = Leap(_rank_set.time)
    monkeypatch.setattr(_rank_set, "time", leap)
    monkeypatch.setattr(_rank_set, "_ATTENTION_S", 1e9)  # or a leap would not count
    return leap


def test_endless_loop_ends_with_the_time_limit(doomed, leap, monkeypatch):
    fn = rank_functions.endless_loop
    loop = ("step += 1  # HERE TOO", "while dist.get_rank() == 1:")

    class Follow(Watch):
        def saw(self, rank, sight):
            super().saw(rank, sight)
            first, second = self.last
            if first and second and first.waits and second.where.endswith(loop):
                leap.ahead_s = 1000.0  # both are where they will stay

    monkeypatch.setattr(_rank_set, "Watch", Follow)
    error = stuck(doomed, fn, timeout_s=1000.0)
    assert "timeout_s=1000 is over" in str(error)
    assert error.rows[0].state == W
    assert error.rows[1].state in ("running", "idle")  # as much as it gets of a core
    assert error.rows[0].where == line_of(fn)
    assert error.rows[1].where.endswith(loop)


def test_a_rank_that_holds_the_interpreter_lock(doomed, leap, monkeypatch):
    """It cannot answer a thread's question; a signal handler still tells its line."""

    class Follow(Watch):
        def moved(self, rank):
            super().moved(rank)
            waiting = self.last[0] is not None and "barrier" in self.last[0].collective
            if rank == 1 and waiting:  # nothing comes from it: it is taken for work
                leap.ahead_s = 1000.0

    monkeypatch.setattr(_rank_set, "Watch", Follow)
    error = stuck(doomed, rank_functions.hold_the_lock, timeout_s=1000.0)
    assert error.rows[0].state == W
    assert error.rows[1].where.endswith("ctypes.PyDLL(None).sleep(3600)")
    assert "timeout_s=1000" in str(error)  # for all we know, it computes


def test_shapes_differ(doomed):
    """gloo ends the process itself; the call still says which line it was."""
    with pytest.raises(RankFailed, match="tensors of different sizes") as caught:
        doomed.run(rank_functions.shapes_differ)
    line = line_of(rank_functions.shapes_differ)
    assert caught.value.failures[0].where == line
    assert line in caught.value.others[0]


def test_a_failure_is_told_though_others_have_waited_for_long(
    doomed, tmp_path, monkeypatch
):
    enough = tmp_path / "enough"

    class Follow(Watch):
        def stuck(self, running):
            if self.still(0, running):
                enough.touch()
            return super().stuck(running)

    monkeypatch.setattr(_rank_set, "Watch", Follow)
    fn = rank_functions.raised
    with pytest.raises(RankFailed) as caught:
        doomed.run(fn, enough, stuck_after_s=STUCK_AFTER_S)
    failure = caught.value.failures[0]
    assert (failure.rank, failure.message) == (1, "cannot write the result")
    assert failure.where == line_of(fn, "# HERE TOO")
    assert caught.value.others == (f"rank 0: waiting, {line_of(fn)}",)


def test_torchs_own_time_limit_is_no_riddle(warm):
    with pytest.raises(RanksStuck, match="cannot go on: gave up waiting") as caught:
        warm.run(rank_functions.give_up_after, 0.3)
    assert [row.state for row in caught.value.rows] == [W, W]
    assert "Timed out" in caught.value.stacks


@pytest.mark.parametrize("name", rank_functions.HONEST)
def test_what_may_end_by_itself_is_left_alone(name, warm, tmp_path, monkeypatch):
    """However long the other rank has waited for it by then."""

    class Follow(Watch):
        def stuck(self, running):
            if self.still(0, running) and self._still[0].seconds > 4 * STUCK_AFTER_S:
                (tmp_path / "enough").touch()
            return super().stuck(running)

    monkeypatch.setattr(_rank_set, "Watch", Follow)
    fn = rank_functions.wait_honestly
    ended = warm.run(fn, name, tmp_path / "enough", stuck_after_s=STUCK_AFTER_S / 4)
    assert ended == ["waited", name]


@pytest.mark.parametrize("clean_up", ["leave_the_group", "sleep"])
def test_an_exception_reaches_the_caller_though_its_finally_waits(
    clean_up, doomed, leap, monkeypatch
):
    class Follow(Watch):
        def saw(self, rank, sight):
            super().saw(rank, sight)
            if clean_up == "sleep" and all(
                s and (s.waits or s.handled) for s in self.last
            ):
                leap.ahead_s = 1000.0

    monkeypatch.setattr(_rank_set, "Watch", Follow)
    fn = rank_functions.raise_and_clean_up
    options = {"stuck_after_s": STUCK_AFTER_S, "timeout_s": 1000.0}
    with pytest.raises(
        RankFailed, match="rank 1 of 2 failed: ValueError: boom"
    ) as error:
        doomed.run(fn, clean_up, **options)
    (failure,) = error.value.failures
    assert failure.where == line_of(fn)
    assert "raise ValueError" in failure.traceback
    assert error.value.others == (f"rank 0: waiting, {line_of(fn, '# HERE TOO')}",)


def test_a_wait_that_spins_is_a_wait(doomed):
    """The handle of isend is dropped: gloo then spins in the barrier."""
    error = stuck(doomed, rank_functions.drop_a_handle)
    assert [row.state for row in error.rows] == [W, W]
    assert "wait() on the handle that isend and irecv return" in str(error)


# The parent's loop, on a clock of its own, with ranks that play a part --------------


class Clock:
    """Passes when somebody waits."""

    def __init__(self):
        self.now = 0.0

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(_watch, "time", clock)
    monkeypatch.setattr(_rank_set, "time", clock)
    return clock


def sight(mark=1, cpu_s=0.0, collective="-", waits=False):
    return Sight(
        where="here",
        stack="",
        mark=(("file", mark),),
        cpu_s=cpu_s,
        collective=collective,
        waits=waits,
    )


def waits(now):
    """Plays a rank that waits in a collective, from the start on."""
    return sight(waits=True)


def computes(now):
    return sight(cpu_s=now)


def sleeps(now):
    return sight()


def says_nothing(now):
    return None


def at(moment_s, then, before=computes):
    """Play one part until a moment, and another from there on."""
    return lambda now: (before if now < moment_s else then)(now)


def ends(now):
    return Outcome()


def fails(now):
    failure = Failure(rank=1, kind="OSError", message="disk full", where="there")
    return Outcome(failure=failure, at_s=now)


class Player:
    """Stands for a rank's process, as the parent's loop sees it."""

    def __init__(self, rank, part, begins_at_s):
        self.rank, self.part, self.begins_at_s = rank, part, begins_at_s
        self.outcome = self.asked_s = None
        self.calls = self
        self.asked_at_s = []
        self.began = False

    def play(self, watch, now):
        if now >= self.begins_at_s and not self.began:
            self.began = True
            watch.moved(self.rank)  # as with all that a rank reports
        does = self.part(now)
        if isinstance(does, Outcome):
            self.outcome = self.outcome or does
        elif does is not None and self.asked_s is not None:
            watch.saw(self.rank, does)
            self.asked_s = None

    def has_ended(self):
        return False

    @property
    def silent_s(self):
        return 0.0 if self.asked_s is None else _rank_set.time.now - self.asked_s

    def ask(self):
        if self.asked_s is None:
            self.asked_s = _rank_set.time.now
            self.asked_at_s.append(self.asked_s)


class Play(RankSet):
    """Ranks that play parts; time passes where the loop waits for them."""

    def __init__(self, clock, *parts, begins_at_s=0.0):
        super().__init__(len(parts), num_threads=1)
        self._clock = clock
        self._ranks = [Player(r, p, begins_at_s * r) for r, p in enumerate(parts)]

    def _move(self, output, watch, on_record, pause_s):
        assert pause_s > 0
        self._clock.sleep(pause_s)
        for rank in self._ranks:
            rank.play(watch, self._clock.now)

    def _look(self, ranks, watch):
        pass

    def show(self):
        """Also the output: there is none."""

    def verdict(self, stuck_after_s=2.0, timeout_s=None):
        """The verdict, and when it came."""
        watch = Watch(self.num_ranks, stuck_after_s)
        with pytest.raises((RanksStuck, RankFailed)) as caught:
            self._pump(self, watch, timeout_s, None)
        return str(caught.value), self._clock.now


@pytest.mark.parametrize("stuck_after_s", [0.5, 2.0, 30.0])
@pytest.mark.parametrize("parts", [(waits, waits), (waits, ends)])
def test_a_deadlock_is_found_soon(clock, parts, stuck_after_s):
    words, when_s = Play(clock, *parts).verdict(stuck_after_s)
    assert f"stuck: no progress for {stuck_after_s:g} s" in words
    assert stuck_after_s <= when_s < stuck_after_s + 2.0


@pytest.mark.parametrize("then", [waits, ends])
def test_it_counts_from_the_last_ranks_last_move(clock, then):
    words, when_s = Play(clock, waits, at(100.0, then)).verdict()
    assert "stuck: no progress for 2 s" in words
    assert 102.0 <= when_s < 104.0  # its end may have released the other


@pytest.mark.parametrize("part", [computes, sleeps, says_nothing])
def test_only_a_time_limit_ends_what_may_be_work(clock, part):
    words, when_s = Play(clock, waits, part).verdict(timeout_s=12.0)
    assert "timeout_s=12 is over" in words
    assert 12.0 <= when_s < 14.0


@pytest.mark.parametrize("other", [waits, computes])
def test_a_failure_is_told_soon(clock, other):
    """The others get a moment to report their own, and no more."""
    words, when_s = Play(clock, other, at(40.0, fails)).verdict()
    assert words == "rank 1 of 2 failed: OSError: disk full"
    assert 40.5 <= when_s < 42.0


def test_a_failure_that_all_have_reported_is_told_at_once(clock):
    ranks = Play(clock, at(40.0, ends), at(40.0, fails))
    ranks._pump(ranks, Watch(2, 2.0), None, None)
    assert ranks._some_failed
    assert clock.now < 41.0


def test_a_rank_that_is_still_starting_is_given_time(clock):
    """It imports: the others wait, and nobody is stuck yet."""

    def works(now):
        return sight(mark=2)

    late = at(7.0, at(8.0, ends, before=works), before=sleeps)
    _, when_s = Play(clock, waits, late, begins_at_s=7.0).verdict()
    assert 10.0 <= when_s < 12.0  # and may have released the other


def test_ranks_are_asked_once_a_second(clock):
    ranks = Play(clock, waits, computes)
    ranks.verdict(stuck_after_s=30.0, timeout_s=20.0)
    for rank in ranks._ranks:
        assert 18 <= len(rank.asked_at_s) <= 20


# The rule itself -------------------------------------------------------------------


def watch_each(watch, clock, until_s, *sights):
    """See the ranks twice a second, each doing what it did before."""
    while clock.now < until_s:
        clock.now += 0.5
        for rank, seen in enumerate(sights):
            watch.saw(rank, seen)


def watch_twice(clock, first, second, other=None, after_s=3.0):
    watch = Watch(2, stuck_after_s=2.0)
    other = other or sight(waits=True, collective="barrier #1")
    watch.saw(0, first)
    watch.saw(1, other)
    watch_each(watch, clock, after_s - 0.5, first, other)
    clock.now = after_s
    watch.saw(0, second)
    watch.saw(1, other)
    return watch.stuck([0, 1])


@pytest.mark.parametrize(
    ("second", "expected"),
    [
        (sight(waits=True), True),
        (sight(waits=True, cpu_s=0.06), True),  # helper threads
        (sight(waits=True, cpu_s=3.0), True),  # spins
        (sight(waits=True, mark=2), False),  # is elsewhere
        (sight(waits=True, collective="barrier #2"), False),
        (sight(), False),  # waits for something else
    ],
)
def test_what_counts_as_progress(clock, second, expected):
    assert watch_twice(clock, sight(waits=True), second) is expected


@pytest.mark.parametrize(
    ("first", "other", "carries"),
    [
        ("all_reduce #1", "all_reduce #1", True),
        ("all_reduce #1", "all_reduce #2", False),
        ("send", "recv", True),
        ("recv", "barrier #1", False),
    ],
)
def test_where_ranks_meet_much_data_may_flow(clock, first, other, carries):
    """Then CPU time is progress: somebody copies."""
    before = sight(waits=True, collective=first)
    after = sight(waits=True, collective=first, cpu_s=1.0)
    at_the_other_end = sight(waits=True, collective=other)
    assert watch_twice(clock, before, after, at_the_other_end) is not carries


@pytest.mark.parametrize(
    ("cpu_s", "busy"), [(0.0, False), (0.005, False), (0.05, True)]
)
def test_who_used_the_cpu_between_two_looks_is_running(clock, cpu_s, busy):
    watch = Watch(1, stuck_after_s=2.0)
    watch.saw(0, sight(cpu_s=7.0))
    clock.now = 0.1
    watch.saw(0, sight(cpu_s=7.0 + cpu_s))
    assert watch.busy == [busy]
    (row,) = rows_of([None], watch)
    assert row.state == ("running" if busy else "idle")


def test_not_before_the_time(clock):
    waiting = sight(waits=True)
    assert not watch_twice(clock, waiting, waiting, after_s=1.9)


def test_output_counts_as_progress(clock):
    watch = Watch(1, stuck_after_s=2.0)
    watch.saw(0, sight(waits=True))
    watch_each(watch, clock, 1.5, sight(waits=True))
    watch.moved(0)
    watch_each(watch, clock, 3.5, sight(waits=True))
    assert not watch.stuck([0])
    watch_each(watch, clock, 4.0, sight(waits=True))
    assert watch.stuck([0])


def test_a_pause_of_all_processes_is_not_rest(clock):
    """Ctrl-Z and fg, or a laptop's lid: nobody moved, as nobody could."""
    watch = Watch(1, stuck_after_s=2.0)
    watch_each(watch, clock, 1.0, sight(waits=True))
    clock.now += 3600.0
    watch.saw(0, sight(waits=True))
    assert not watch.stuck([0])


def test_a_rank_that_does_not_answer_is_not_still(clock):
    """It may hold the interpreter's lock, and compute."""
    watch = Watch(1, stuck_after_s=2.0)
    watch_each(watch, clock, 1.5, sight(waits=True))
    clock.now = 60.0
    assert not watch.stuck([0])


def test_sleeping_is_no_deadlock(clock):
    watch = Watch(1, stuck_after_s=2.0)
    watch_each(watch, clock, 5.0, sight())
    assert not watch.stuck([0])


NCCL = {
    "profiling_name": "nccl:all_reduce",
    "collective_seq_id": 7,
    "time_created_ns": 2**62,
    "process_group": ["0", "default_pg"],
    "retired": False,
}


@pytest.mark.parametrize(
    ("changes", "waits"),
    [
        ({"state": "started"}, True),
        ({"state": "scheduled"}, False),  # behind the GPU's other work
        ({"state": "completed", "retired": True}, False),
    ],
)
def test_nccls_recorder(monkeypatch, changes, waits):
    """A recorder that plays nccl's: the real one has not run here."""
    older = NCCL | {"profiling_name": "nccl:broadcast", "time_created_ns": 2**61}
    entries = {"entries": [older, NCCL | changes]}
    fake = SimpleNamespace(
        _dump_nccl_trace_json=lambda: json.dumps(entries),
        _dump_fr_trace_json=lambda: json.dumps({"entries": []}),
    )
    monkeypatch.setitem(sys.modules, "torch._C._distributed_c10d", fake)
    open_group = SimpleNamespace(is_initialized=lambda: True)
    monkeypatch.setitem(sys.modules, "torch.distributed", open_group)
    assert last_collective() == ("all_reduce #7", waits, "0")


@pytest.mark.parametrize(
    ("line", "waits"),
    [
        ("total = work.wait()", True),
        ("print(loss.item())", True),
        ("torch.cuda.synchronize()", True),
        ("answer = input()", False),
        ("subprocess.run(command)", False),
    ],
)
def test_who_waits_for_what_it_began_before(monkeypatch, line, waits):
    monkeypatch.setitem(linecache.cache, "cell", (1, None, [f"{line}\n"], "cell"))
    assert _watch._awaits([("cell", 1, "train")]) is waits


def test_backward_waits_for_ddps_sums():
    from torch.autograd import graph

    assert hasattr(graph, _watch._BACKWARD)
    assert _watch._awaits([("cell", 1, "train"), (graph.__file__, 1, _watch._BACKWARD)])


@pytest.mark.parametrize("part", [computes, waits])
def test_a_pause_of_the_parent_is_not_the_ranks(clock, part):
    """SIGSTOP and SIGCONT, or a callback for records that takes its time."""
    ranks = Play(clock, part, at(6.0, fails))
    move = ranks._move

    def pause(*arguments):
        if 5.0 < clock.now < 6.0:
            clock.now += 3600.0  # and rank 1 has failed meanwhile
            ranks._ranks[0].part = ends
        else:
            move(*arguments)

    ranks._move = pause
    ranks._pump(ranks, Watch(2, 30.0), 100.0, None)
    assert ranks._ranks[0].outcome.failure is None
    assert ranks._some_failed


def test_faulthandlers_text():
    import torch.distributed.distributed_c10d as c10d

    text = (
        "Fatal Python error: Aborted\n\nThread 0x01 (most recent call first):\n"
        f'  File "{c10d.__file__}", line 5 in all_reduce\n'
        '  File "Cell In[9]", line 7 in shape\n'
        f'  File "{_main.__file__}", line 1 in rank_main\n\n'
        "Current thread 0x02 (most recent call first):\n  <no Python frame>\n"
    )
    found = sight_from_dump(text)
    assert found is not None
    assert found.where == "Cell In[9], line 7"
    assert found.waits
    assert sight_from_dump("") is None


def test_the_places_that_the_rule_knows_by_name():
    """A rank is waiting while it is in `meet`, and its stack starts at `rank_main`."""
    assert meeting.__file__ == _watch._MEETING
    assert meeting.meet.__code__.co_filename == meeting.__file__
    assert meeting.meet.__name__ == "meet"
    assert _watch._arriving([(meeting.__file__, 1, "meet")])
    assert _main.rank_main.__name__ == "rank_main"
