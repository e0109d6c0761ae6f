"""Every exercise takes right answers and finds what is wrong with the others."""

import functools
import inspect
from pathlib import Path

import pytest

import ddp_lab
from answers import RIGHT, WRONG
from ddp_lab.errors import BadInput, CheckFailed, RankFailed, RanksStuck
from ddp_lab.exercises.check import EXERCISES, check, check_many, describe
from ddp_lab.exercises.exercise import Something, close, plain, same, tell
from ddp_lab.ranks.workers import Workers

pytestmark = pytest.mark.timeout(300)

SHORT_S = 1.0  # after which a wrong answer that waits is told that nobody comes


@pytest.fixture(scope="module")
def workers():
    with Workers(3) as workers:
        yield workers


@pytest.fixture(scope="module")
def verdicts(workers):
    """What is said about each answer of each exercise, tried on one set of ranks."""
    right = [(name, fn) for name in EXERCISES for fn in RIGHT[name]]
    wrong = [(name, fn) for name in EXERCISES for fn, _ in WRONG[name]]
    said = []
    for some, patience_s in ((right, 60.0), (wrong, SHORT_S)):
        run = functools.partial(workers.run, echo=False)
        said += check_many(some, run=run, patience_s=patience_s)
    fns = [fn for _, fn in right + wrong]
    return dict(zip(fns, said, strict=True))


@pytest.mark.parametrize("name", EXERCISES)
def test_right_answers_are_accepted(verdicts, name):
    assert len(RIGHT[name]) >= 2
    for fn in RIGHT[name]:
        assert verdicts[fn] == f"{name}: right. {EXERCISES[name].tried}"


@pytest.mark.parametrize("name", EXERCISES)
def test_wrong_answers_are_rejected_for_the_right_reason(verdicts, name):
    assert len(WRONG[name]) >= 6
    for fn, rule in WRONG[name]:
        verdict = verdicts[fn]
        where = f"answers.py, line {fn.__code__.co_firstlineno}"
        assert isinstance(verdict, CheckFailed), where
        head, property_, *_ = str(verdict).splitlines()
        assert head.startswith(f"{name} is not right yet"), where
        assert rule in property_, f"{where}: {property_}"


def test_every_answer_is_about_an_exercise():
    assert set(RIGHT) == set(WRONG) == set(EXERCISES)


def test_a_message_says_where_what_and_why(verdicts):
    sum_of_all = WRONG["mean_over_ranks"][0][0]
    assert str(verdicts[sum_of_all]) == (
        "mean_over_ranks is not right yet, on rank 0 of 2.\n"
        "  property: every rank gets the mean over all ranks\n"
        "  given:    tensor([6.0, 12.0, 18.0])\n"
        "  expected: tensor([15.0, 30.0, 45.0])\n"
        "  got:      tensor([30.0, 60.0, 90.0])"
    )


def test_messages_name_no_place_on_this_machine(verdicts):
    package = str(Path(ddp_lab.__file__).parent.parent)
    for verdict in verdicts.values():
        assert package not in str(verdict)
        assert "0x" not in str(verdict)


def test_who_raised_is_told_with_its_line(verdicts):
    fn = next(fn for fn, rule in WRONG["average_gradients"] if "returns" in rule)
    verdict = verdicts[fn]
    assert "expected: no error" in str(verdict)
    assert "answers.py, line" in verdict.report
    assert "dist.all_reduce(parameter.grad)" in verdict.report
    assert "ddp_lab" not in verdict.report


def test_a_deadlock_is_told(verdicts):
    fn = next(fn for fn, rule in WRONG["should_stop"] if "returns" in rule)
    assert str(verdicts[fn]).splitlines()[-1] == (
        "  got:      it waits for a message that never comes, or not in that form"
    )


def run_in_turn(fn, trials, patience_s):
    raise AssertionError("no ranks are needed")


def test_exercises_without_ranks_start_none():
    answers = [
        (name, RIGHT[name][0])
        for name, exercise in EXERCISES.items()
        if exercise.where in ("here", "once")
    ]
    assert len(answers) >= 4
    assert all("right" in said for said in check_many(answers, run=run_in_turn))


def mean_over_ranks(tensor):
    """Not written yet."""
    raise NotImplementedError("your code here")


def test_a_stub_is_told_and_starts_nothing(capsys, monkeypatch):
    monkeypatch.setattr("ddp_lab.exercises.check.launch", run_in_turn)
    check(mean_over_ranks, "mean_over_ranks")
    assert capsys.readouterr().out == (
        "mean_over_ranks: not written yet; check('mean_over_ranks') tells the task\n"
    )


def test_half_a_stub_is_a_stub():
    def shard_indices(num_samples, rank, world_size):
        if num_samples % world_size == 0:
            return list(range(rank, num_samples, world_size))
        raise NotImplementedError

    assert check_many([("shard_indices", shard_indices)], run=run_in_turn) == [None]


def test_check_raises_and_prints(capsys):
    check(RIGHT["shard_indices"][0], "shard_indices")
    assert capsys.readouterr().out == (
        "shard_indices: right. 12, 8, 7, 101 and 1 samples on 1, 2 and 3 ranks, as "
        "DistributedSampler deals them.\n"
    )
    with pytest.raises(CheckFailed, match="on rank 0 of 2"):
        check(WRONG["shard_indices"][1][0], "shard_indices")


def test_what_the_learner_prints_is_in_the_report():
    def global_batch_size(micro_batch_size, accumulation_steps, world_size):
        print("world size", world_size)
        return 0

    (verdict,) = check_many([("global_batch_size", global_batch_size)], run=run_in_turn)
    assert verdict.report.splitlines()[:2] == [
        "it printed on rank 0:",
        "  world size 1",
    ]
    shown = verdict._render_traceback_()
    assert shown[0].startswith("CheckFailed: global_batch_size is not right yet")
    assert shown[-1].startswith("  world size")


def test_launch_is_what_check_uses(capsys):
    check(RIGHT["should_stop"][0], "should_stop")
    assert capsys.readouterr().out.startswith("should_stop: right.")


def test_ranks_that_break_down_are_a_wrong_answer():
    def crash(*args):
        raise RankFailed("rank 1 of 3 failed: SIGSEGV: it crashed in native code")

    def hang(*args):
        raise RanksStuck("ranks 0, 1 of 3 are stuck: no progress for 20 s\na table")

    answer = [("should_stop", RIGHT["should_stop"][0])]
    (crashed,) = check_many(answer, run=crash)
    assert "got:      rank 1 of 3 failed: SIGSEGV" in str(crashed)
    (stuck,) = check_many(answer, run=hang)
    assert "got:      ranks that do not come to an end" in str(stuck)
    assert stuck.report.endswith("a table")


@pytest.mark.parametrize("name", EXERCISES)
def test_the_task_is_told(capsys, name):
    check(name)
    said = capsys.readouterr().out
    assert said.startswith(EXERCISES[name].signature + "\n\n")
    assert EXERCISES[name].signature.startswith(name + "(")
    assert max(map(len, said.splitlines())) <= 80
    parameters = list(inspect.signature(RIGHT[name][0]).parameters)
    assert EXERCISES[name].signature == f"{name}({', '.join(parameters)})"


def test_unknown_names_are_refused():
    with pytest.raises(BadInput, match="choose mean_over_ranks, who_am_i"):
        describe("median_over_ranks")
    with pytest.raises(BadInput, match="the function itself"):
        check(3.0, "mean_over_ranks")


def test_values_travel_and_are_told():
    torch = pytest.importorskip("torch")
    tensor = torch.tensor([1.0, 2.5], requires_grad=True)
    assert tell(plain(tensor)) == "tensor([1.0, 2.5])"
    assert tell(plain((True, 0.1 + 0.2, None))) == "(True, 0.3, None)"
    assert plain({1: range(2)}) == {"1": [0, 1]}
    assert plain(iter([])) == Something("list_iterator")
    assert tell(plain(lambda: 1)) == "an object of type function"
    assert same([1, (2,)], [1, (2,)])
    assert not same(1.0, 1)
    assert close(torch.tensor(0.1), 0.1)
    assert not close(None, 0.1)
    assert not close(True, 1.0)
