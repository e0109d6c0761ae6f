"""A run goes on where it stopped: after a crash or a signal, on other ranks, by hand.

On as many ranks the resumed run equals the uninterrupted one bit for bit. On another
number it is compared in float64, as in test_loop.py: rounding is 1e-16, and 15 steps of
this model let it grow to 1e-12 or so; the tolerance of 1e-9 leaves room for that.
"""

import contextlib
import dataclasses
import itertools
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
import warnings

import psutil
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torchvision import models

import small_commands
from ddp_lab import loop, model
from ddp_lab.config import TrainConfig
from ddp_lab.datasets import load_dataset
from ddp_lab.errors import BadInput, Stopped
from ddp_lab.loop import fit
from ddp_lab.ranks.launch import launch
from ddp_lab.runs import checkpoint, resume
from ddp_lab.runs.record import Run
from ddp_lab.runs.resume import find_newest, open_run
from ddp_lab.runs.stop import StopRequest
from ddp_lab.step import train_step
from ddp_lab.train import main
from ddp_lab.world import join_world
from image_files import write_folder
from small_commands import ENVIRON, LIMIT_S, hold, let_go, num_held

TOLERANCE = 1e-9
pytestmark = pytest.mark.timeout(900)  # six starts of a command in one fixture

# 5 steps an epoch (6 with drop_last off); saved after 3, 5, 6, 9, 10, 12, 15
CONFIG = TrainConfig(
    image_size=16,
    epochs=3,
    global_batch_size=12,
    limit_train=70,
    limit_test=21,
    crop_padding=2,
    flip=True,
    lr=0.001,
    device="cpu",
    checkpoint_every=3,
)
IN_DOUBLE = dataclasses.replace(CONFIG, norm="group", precision="float64")
CASES = {
    "BatchNorm and dropout": {},
    "accumulation": {"micro_batch_size": 2},
    "drop_last off": {"drop_last": False},
    "folder": {"dataset": "folder", "limit_train": None, "num_workers": 1},
    "log_every": {"log_every": 2, "keep_checkpoints": 3},
}
CRASH = 8  # in this step, the third of epoch 2


class Crash(Exception):
    pass


def build_model(config, num_classes):
    """A small model in place of torchvision's; dropout only where it can be equal."""
    group = config.norm == "group"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        return nn.Sequential(
            nn.Conv2d(3, 8, 3, stride=2),
            nn.GroupNorm(4, 8) if group else nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(2),
            nn.Flatten(),
            nn.Dropout(0.0 if group else 0.5),
            nn.Linear(32, num_classes),
        )


def weights(folder):
    return checkpoint.load(Run(folder).checkpoint_file)["model"]


def without_times(folder, *others):
    leave = ("time_s", "images_per_s", *others)
    return [
        {k: v for k, v in line.items() if k not in leave}
        for line in Run(folder).history.lines
    ]


def assert_equal(folder, whole):
    assert without_times(folder) == without_times(whole)
    ours = weights(folder)
    for name, tensor in weights(whole).items():
        assert torch.equal(ours[name], tensor), name


def assert_close(folder, whole):
    """Also where another number of ranks worked."""
    lines = without_times(folder, "local"), without_times(whole, "local")
    assert len(lines[0]) == len(lines[1])
    for line, expected in zip(*lines, strict=True):
        assert line.pop("kind") == expected.pop("kind")
        assert line == pytest.approx(expected, rel=TOLERANCE)
    ours = weights(folder)
    for name, tensor in weights(whole).items():
        torch.testing.assert_close(ours[name], tensor, rtol=TOLERANCE, atol=TOLERANCE)


def fit_until(step, config, data, world, folder, on_step):
    """Train, and have something done before a step."""
    steps = []

    def counted(*args, **options):
        steps.append(1)
        if len(steps) == step:
            on_step()
        return train_step(*args, **options)

    loop.train_step = counted
    request = StopRequest()
    try:
        fit(config, data, world, folder, request=request)
    except (Crash, Stopped) as error:
        return str(error)
    finally:
        loop.train_step = train_step
    return "trained"


def crash():
    raise Crash


def go_on(config, folder):
    return dataclasses.replace(config, resume=folder)


# ------------------------------------------------- what the ranks do, in one launch


def on_two_ranks(folder):
    """All that needs two ranks, in one launch; the tests look at what it leaves."""
    from torchvision.transforms import functional  # noqa: F401
    # here, so that loaders, which are forks, need not import it for seconds each

    loop.build_model = build_model
    found = {}
    with join_world(device="cpu") as world:
        for name, changes in CASES.items():
            config = dataclasses.replace(CONFIG, **changes, data_dir=folder / "images")
            data = load_dataset(config)
            case = folder / name
            fit(config, data, world, case / "whole")
            fit_until(CRASH, config, data, world, case / "crashed", crash)
            dist.barrier()  # rank 0 has written all it will
            found[name] = checkpoint.saved_steps(case / "crashed")
            if name == "log_every":
                found["hosts"] = on_two_hosts(config, data, world, case)
            fit(go_on(config, case / "crashed"), data, world, case / "crashed")
        found["stop"] = stop_one(world, folder)
        other_world_size(world, folder)
    return found


def on_two_hosts(config, data, world, case):
    """Two ranks that pretend to be two hosts; the other one's checkpoint is newer."""
    resume.socket.gethostname = lambda: f"host{world.rank}"
    host = dataclasses.replace(world, local_rank=0, local_world_size=1)
    folder = case / f"host{world.rank}"
    if world.rank == 0:
        shutil.copytree(case / "crashed", folder)
        (folder / "checkpoint.pt").unlink()
        (folder / "checkpoint-00000006.pt").unlink()
        Run(folder).history_file.write_text('{"kind": "step", "step": 1}\n')
    else:
        shutil.copytree(case / "crashed", folder)
        Run(folder).config_file.unlink()
    newest = find_newest(folder, host)
    config = dataclasses.replace(config, auto_resume=True, out=folder)
    fit(config, data, host, folder)
    return {
        "newest": [newest.step, newest.history.count("\n"), len(newest.state["model"])],
        "one disk": open_run(config, host, case / "one disk", None, ())[0] is not None,
        **bad_files_on_a_host(host, case),
        **another_run_on_a_host(config, host, case),
    }


def bad_files_on_a_host(host, case):
    """Host 1 has damaged files, then files of a newer version; host 0's are good."""
    found = {}
    folder = case / f"bad{host.rank}"
    shutil.copytree(case / f"host{host.rank}", folder)
    if host.rank == 1:
        cut_short(folder / "checkpoint-00000015.pt")
    found["one damaged"] = find_newest(folder, host).skipped
    if host.rank == 1:
        for path in folder.glob("*.pt"):
            cut_short(path)
    found["all damaged"] = find_newest(folder, host).skipped
    if host.rank == 1:
        make_newer(case / "host1", folder)
    found["newer"] = complaint_of(find_newest, folder, host)
    return found


def another_run_on_a_host(config, host, case):
    """A new run, whose name host 1 has given to another one, or to a file."""
    config = dataclasses.replace(config, auto_resume=False)
    found = {}
    for name in ("taken", "blocked"):
        folder = case / f"{name}{host.rank}" / "run"
        folder.parent.mkdir()
        if host.rank == 1 and name == "taken":
            shutil.copytree(case / "host1", folder)
        elif host.rank == 1:
            folder.write_text("a file")
        before = sorted(folder.parent.rglob("*"))
        found[name] = complaint_of(open_run, config, host, folder, None, ())
        assert sorted(folder.parent.rglob("*")) == before  # nothing is made, or lost
    return found


def complaint_of(fn, *arguments):
    try:
        fn(*arguments)
    except BadInput as error:
        return str(error)
    return None


def stop_one(world, folder):
    """Rank 1 alone is asked to stop; between two log points and two checkpoints."""
    config = dataclasses.replace(CONFIG, log_every=4, checkpoint_every=None)
    data = load_dataset(config)
    fit(config, data, world, folder / "stop" / "whole")
    request = StopRequest()

    def ask(*args, **options):
        ask.steps += 1
        if ask.steps == CRASH and world.rank == 1:
            request.flag.fill_(signal.SIGUSR1)
        return train_step(*args, **options)

    ask.steps = 0
    loop.train_step = ask
    try:
        fit(config, data, world, folder / "stop" / "crashed", request=request)
        said = "trained"
    except Stopped as error:
        said = str(error)
    finally:
        loop.train_step = train_step
    saved = checkpoint.saved_steps(folder / "stop" / "crashed")
    config = go_on(config, folder / "stop" / "crashed")
    fit(config, data, world, config.resume)
    return said, saved


def other_world_size(world, folder):
    """Crash on two; go on, on two, with what crashed on one."""
    data = load_dataset(IN_DOUBLE)
    fit_until(CRASH, IN_DOUBLE, data, world, folder / "two", crash)
    dist.barrier()
    fit(go_on(IN_DOUBLE, folder / "one"), data, world, folder / "one")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("resume")
    write_folder(folder / "images", num_train=35)
    return folder


@pytest.fixture(scope="module")
def alone(folder):
    """One rank in this process: a whole run, and one that crashed."""
    loop.build_model, original = build_model, loop.build_model
    data = load_dataset(IN_DOUBLE)
    with join_world(device="cpu") as world:
        fit(IN_DOUBLE, data, world, folder / "whole")
        fit_until(CRASH, IN_DOUBLE, data, world, folder / "one", crash)
        shutil.copytree(folder / "one", folder / "crashed")
        yield data, world
    loop.build_model = original


@pytest.fixture(scope="module")
def on_two(folder, alone):
    found = launch(on_two_ranks, folder, num_ranks=2, num_threads=1)
    stopped, of_rank_1 = (own["stop"][0] for own in found)
    assert stopped == f"{of_rank_1}; go on with --resume {folder}/stop/crashed"
    return found


# -------------------------------------------------------------------- after a crash


@pytest.mark.parametrize("name", CASES)
def test_resumed_run_is_the_uninterrupted_one(folder, on_two, name):
    """In mid-epoch, from a checkpoint two steps before the crash."""
    kept = {"log_every": [6, 5, 3], "drop_last off": [6, 3]}
    assert on_two[0][name] == kept.get(name, [6, 5])
    assert_equal(folder / name / "crashed", folder / name / "whole")
    steps = [line["step"] for line in Run(folder / name / "whole").history.steps]
    expected = {
        "log_every": [2, 3, 4, 5, 6, 7, 9, 10, 12, 14, 15],
        "drop_last off": list(range(1, 19)),
    }
    assert steps == expected.get(name, list(range(1, 16)))


def test_another_number_of_ranks(folder, on_two, alone):
    data, world = alone
    assert_close(folder / "one", folder / "whole")
    fit(go_on(IN_DOUBLE, folder / "two"), data, world, folder / "two")
    assert_close(folder / "two", folder / "whole")
    sizes = [len(line["local"]) for line in Run(folder / "two").history.steps]
    assert sizes == [2] * 6 + [1] * 9


def test_the_newest_of_several_hosts(folder, on_two):
    """It goes on from the other host's checkpoint, and with that one's history."""
    step, num_lines, num_tensors = on_two[0]["hosts"]["newest"]
    assert step == 6
    assert num_lines == 7  # up to the crash: steps 2, 3, 4, 5, evaluation, 6, 7
    assert num_tensors == len(weights(folder / "log_every" / "whole"))
    assert_equal(folder / "log_every" / "host0", folder / "log_every" / "whole")


def test_each_host_has_the_whole_run(folder, on_two):
    """On its own disk; BatchNorm's statistics in mid-epoch are rank 0's there too."""
    hosts = [folder / "log_every" / f"host{k}" for k in (0, 1)]
    assert_equal(*hosts)
    assert [sorted(p.name for p in host.iterdir()) for host in hosts] == [
        [f"checkpoint-{step:08d}.pt" for step in (10, 12, 15)]
        + [
            "checkpoint.pt",
            "classes.json",
            "config.json",
            "environment.json",
            "history.jsonl",
        ]
    ] * 2
    in_mid_epoch = [checkpoint.load(h / "checkpoint-00000012.pt") for h in hosts]
    for name, tensor in in_mid_epoch[0]["model"].items():
        assert torch.equal(tensor, in_mid_epoch[1]["model"][name]), name


def test_hosts_that_share_a_disk(folder, on_two):
    """Only rank 0 writes."""
    assert [found["hosts"]["one disk"] for found in on_two] == [True, False]
    names = {p.name for p in (folder / "log_every" / "one disk").iterdir()}
    assert names == {"classes.json", "config.json", "environment.json", "history.jsonl"}


def test_bad_files_on_another_host(folder, on_two):
    """They are told of, or refused, on all ranks alike."""
    own, other = (found["hosts"] for found in on_two)
    [damaged] = own["one damaged"]
    damaged_file = f"{folder}/log_every/bad1/checkpoint-00000015.pt"
    assert damaged.startswith(f"on host1: checkpoint {damaged_file} is damaged")
    assert damaged.endswith("; trying the one before")
    [damaged] = own["all damaged"]
    assert damaged.startswith("on host1: checkpoint ")
    assert damaged.endswith("; another machine's is taken")
    assert "bad1/checkpoint-00000015.pt has format 2, this version" in own["newer"]
    for key in ("one damaged", "all damaged", "newer"):
        assert own[key] == other[key]


def test_a_host_that_cannot_write(folder, on_two):
    """All ranks refuse, and no host has half a run."""
    own, other = (found["hosts"] for found in on_two)
    assert own["taken"] == other["taken"]
    assert own["taken"].startswith(
        f"on host1: out {folder}/log_every/taken1/run holds a run already"
    )
    assert own["blocked"] == other["blocked"]
    blocked = f"on host1: out {folder}/log_every/blocked1/run: File exists; choose"
    assert own["blocked"].startswith(blocked)


def test_keep_checkpoints(folder, on_two):
    case = folder / "log_every" / "crashed"
    assert checkpoint.saved_steps(case) == [15, 12, 10]
    assert checkpoint.saved_steps(folder / "accumulation" / "whole") == [15, 12]
    assert {p.name for p in case.iterdir()} == {
        "checkpoint-00000010.pt",
        "checkpoint-00000012.pt",
        "checkpoint-00000015.pt",
        "checkpoint.pt",
        "classes.json",
        "config.json",
        "environment.json",
        "history.jsonl",
    }
    assert (case / "checkpoint.pt").samefile(case / "checkpoint-00000015.pt")


def test_one_rank_asks_and_all_stop(folder, on_two):
    """At the next log point, and save there."""
    said, saved = on_two[0]["stop"]
    assert said.startswith("stopped by SIGUSR1 after step 9, in epoch 2")
    assert saved == [9, 5]
    assert_equal(folder / "stop" / "crashed", folder / "stop" / "whole")


# ----------------------------------------------- files that are not as they should be


@pytest.fixture
def crashed(folder, alone, tmp_path):
    """A run that crashed in step 8 and was saved after 5 and 6."""
    shutil.copytree(folder / "crashed", tmp_path / "run")
    return tmp_path / "run"


def cut_short(path):
    path.write_bytes(path.read_bytes()[:-200])


def overwrite(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2 :] = bytes(len(content) - len(content) // 2)
    path.write_bytes(content)


DAMAGE = {
    "cut short": cut_short,
    "half zeros": overwrite,
    "empty": lambda path: path.write_bytes(b""),
    "text": lambda path: path.write_text("hello"),
    "another project's": lambda path: torch.save({"state_dict": {}}, path),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_newest_is_skipped(folder, alone, crashed, damage):
    data, world = alone
    DAMAGE[damage](crashed / "checkpoint-00000006.pt")
    with pytest.warns(UserWarning, match="-00000006.pt .*; trying the one before"):
        fit(go_on(IN_DOUBLE, crashed), data, world, crashed)
    [resumed] = Run(crashed).environment["resumed"]
    assert resumed["step"] == 5
    assert_equal(crashed, folder / "whole")


def test_all_damaged(crashed, capsys):
    for path in list(crashed.glob("*.pt")):
        cut_short(path)
    before = contents(crashed)
    assert main(["--resume", str(crashed)]) == 2
    complaint = capsys.readouterr().err
    assert complaint.startswith(f"ddp_lab.train: checkpoint {crashed}/checkpoint")
    assert "is damaged or none of ours: start the run anew" in complaint
    assert complaint.count("\n") == 1
    assert contents(crashed) == before


def test_a_run_that_lost_its_checkpoints_is_not_started_again(crashed, alone):
    """It has done an epoch: its history is not there to be thrown away."""
    data, world = alone
    for path in list(crashed.glob("*.pt")):
        path.unlink()
    before = contents(crashed)
    anew = dataclasses.replace(IN_DOUBLE, auto_resume=True, out=crashed)
    with pytest.raises(BadInput, match="done epochs and has no checkpoint any more"):
        fit(anew, data, world, crashed)
    assert contents(crashed) == before


def test_killed_between_saving_and_tidying_up(folder, alone, tmp_path):
    """After the last save: there is no other one that would do it."""
    data, world = alone
    run = tmp_path / "run"
    shutil.copytree(folder / "whole", run)
    names = set(contents(run))
    shutil.copy(run / "checkpoint-00000012.pt", run / "checkpoint-00000010.pt")
    (run / "checkpoint-00000015.pt.tmp").write_bytes(b"half")
    fit(go_on(IN_DOUBLE, run), data, world, run)
    assert set(contents(run)) == names
    assert_equal(run, folder / "whole")


def make_newer(folder, other=None):
    """Give a folder's newest checkpoint a format of the future, there or elsewhere."""
    state = torch.load(Run(folder).checkpoint_file, weights_only=True)
    newest = (other or folder) / f"checkpoint-{state['progress']['step']:08d}.pt"
    torch.save({**state, "format": checkpoint.FORMAT + 1}, newest)


def test_a_newer_version_s_is_not_passed_over(crashed, capsys):
    make_newer(crashed)
    before = contents(crashed)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert main(["--resume", str(crashed)]) == 2
    complaint = capsys.readouterr().err
    assert "-00000006.pt has format 2, this version reads up to 1: update" in complaint
    assert complaint.count("\n") == 1
    assert contents(crashed) == before


def contents(folder):
    return {p.name: p.read_bytes() for p in folder.iterdir()}


# -------------------------------------------------------------------- other settings

OTHER = {
    "--model resnet34": "model 'resnet34' .it has 'resnet18'.",
    "--global-batch-size 24 --lr 0.5": "global_batch_size 24 .*another lr 0.5 ",
    "--limit-train 60": "limit_train 60 .it has 70.",
    "--no-flip --seed 3": "flip False .*another seed 3",
    "--epochs 4": "epochs 4 .it has 3.",  # one cycle was laid out for three
    "--precision float32": "precision 'float32'",
    "--clip-grad-norm 1": "clip_grad_norm 1.0 .it has None.",
}


@pytest.mark.parametrize("arguments", OTHER)
def test_other_settings_are_named(crashed, arguments, capsys):
    before = contents(crashed)
    assert main(["--resume", str(crashed), *arguments.split()]) == 2
    complaint = capsys.readouterr().err
    message = f"cannot go on with another {OTHER[arguments]}.*; drop these options, "
    assert re.search(message, complaint), complaint
    assert complaint.endswith("or insist with --resume-anyway\n")
    assert complaint.count("\n") == 1
    assert contents(crashed) == before


def test_other_images_are_refused(crashed, alone):
    data, world = alone
    labels = data.train.labels.clone()
    labels[0] = (labels[0] + 1) % 10
    train_set = dataclasses.replace(data.train, labels=labels)
    other = dataclasses.replace(data, train=train_set)
    before = contents(crashed)
    with pytest.raises(BadInput, match="another training set, of 70 images, sha256"):
        fit(go_on(IN_DOUBLE, crashed), other, world, crashed)
    assert contents(crashed) == before


SCHEDULES = {
    "onecycle": {},
    "cosine": {"schedule": "cosine", "warmup_epochs": 1.5},
    "constant": {"schedule": "constant"},
    "constant after warm-up": {"schedule": "constant", "warmup_epochs": 0.5},
}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_resume_anyway(crashed, alone, schedule):
    """Half the batch, twice the steps: from the same place, at the new rate."""
    data, world = alone
    old = Run(crashed).history.lines
    fresh = dataclasses.replace(
        IN_DOUBLE, global_batch_size=6, lr=0.002, momentum=0.5, **SCHEDULES[schedule]
    )
    config = dataclasses.replace(fresh, resume=crashed, resume_anyway=True)
    fit(config, data, world, crashed)
    history = Run(crashed).history
    # 6 old steps are an epoch of five and one step, which is two of the new ones
    assert [line["step"] for line in history.steps] == list(range(1, 6 + 9 + 11 + 1))
    assert [line["epoch"] for line in history.evals] == [1, 2, 3]
    assert history.lines[:7] == old[:7]
    fit(fresh, data, world, crashed.parent / "fresh")
    rates = [line["lr"] for line in Run(crashed.parent / "fresh").history.steps]
    assert [line["lr"] for line in history.steps[6:]] == rates[11 + 2 :]
    [group] = checkpoint.load(crashed / "checkpoint.pt")["optimizer"]["param_groups"]
    assert group["momentum"] == 0.5
    # these are the run's settings now: it goes on without insisting again
    assert Run(crashed).config == fresh
    fit(dataclasses.replace(fresh, resume=crashed), data, world, crashed)


def test_another_model_cannot_be_insisted_on(crashed, alone, monkeypatch):
    data, world = alone
    monkeypatch.setattr(loop, "build_model", lambda config, _: build_model(config, 11))
    config = dataclasses.replace(
        go_on(IN_DOUBLE, crashed), model="resnet34", resume_anyway=True
    )
    before = contents(crashed)
    with pytest.raises(BadInput, match=r"not fit model resnet34: .*6\.weight") as said:
        fit(config, data, world, crashed)
    assert "\n" not in str(said.value)
    assert contents(crashed) == before


def test_plain_torch_loads_the_model(alone, tmp_path, monkeypatch):
    _, world = alone
    monkeypatch.setattr(loop, "build_model", model.build_model)
    config = TrainConfig(limit_train=8, limit_test=4, global_batch_size=8, epochs=1)
    fit(config, load_dataset(config), world, tmp_path / "run")
    state = torch.load(tmp_path / "run" / "checkpoint.pt", weights_only=True)
    resnet = models.resnet18(num_classes=10)
    resnet.load_state_dict(state["model"])  # strict: no key more, none less
    assert resnet.eval()(torch.zeros(2, 3, 32, 32)).isfinite().all()


# ------------------------------------------------------------- on the command line


class Command:
    """The command line, on two ranks, in a folder where it writes to ``run``."""

    def __init__(self, folder, *arguments, **options):
        self.folder = folder
        self.run = Run(folder / "run")
        self.process = psutil.Popen(
            [*TRAIN, *arguments],
            cwd=folder,
            env={**os.environ, **ENVIRON},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            **options,
        )

    def wait_for(self, condition):
        small_commands.wait_for(condition, self.process)

    def wait_until_held(self, place):
        """Wait until both ranks wait there."""
        self.wait_for(lambda: num_held(self.folder, place) == 2)

    def ranks(self):
        found = []
        for child in self.process.children():
            with contextlib.suppress(psutil.Error):  # gone in this moment
                if "spawn_main" in " ".join(child.cmdline()):
                    found.append(child)
        return found

    def end(self):
        """Its status, stdout and stderr as lines; no process of it is left."""
        family = []
        with contextlib.suppress(psutil.NoSuchProcess):  # it has ended already
            family = self.process.children(recursive=True)
        said, complaints = self.process.communicate(timeout=LIMIT_S)
        assert not psutil.wait_procs(family, timeout=10)[1]
        return self.process.returncode, said.splitlines(), complaints.splitlines()


TRAIN = [
    *(sys.executable, "-m", "ddp_lab.train", "--device", "cpu"),
    *("--num-ranks", "2", "--num-threads", "1"),
]
SETTINGS = [
    *("--image-size", "16", "--epochs", "3", "--lr", "0.002", "--device", "cpu"),
    *("--global-batch-size", "8", "--limit-train", "48", "--limit-test", "8"),
    *("--num-ranks", "2", "--num-threads", "1"),
]  # 6 steps an epoch


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """Three runs stopped in three ways, a full disk, then the end; all one run."""
    folder = tmp_path_factory.mktemp("stopped")
    small_commands.train_uninterrupted(SETTINGS, folder / "whole")
    found = {}
    try:
        command = Command(folder, *SETTINGS, "--out", "run")
        command.wait_for(command.ranks)  # they import torch for a while now
        command.process.send_signal(signal.SIGTERM)
        found["before the first step"] = command.end()

        hold(folder, "step 4")
        command = Command(folder, "--resume", "run")
        command.wait_until_held("step 4")
        command.ranks()[1].send_signal(signal.SIGUSR1)
        let_go(folder)  # the other one, which has not been told
        found["one rank"] = command.end()

        hold(folder, "step 9")
        command = Command(folder, "--resume", "run")
        command.wait_until_held("step 9")
        while command.process.poll() is None:  # some come while it stops, or saves
            with contextlib.suppress(psutil.NoSuchProcess):
                for process in [*command.ranks(), command.process]:
                    process.send_signal(signal.SIGTERM)
            time.sleep(0.005)
        found["many times"] = command.end()

        found["before the full disk"] = contents(command.run.folder)
        command = Command(folder, "--resume", "run", preexec_fn=small_files_only)
        found["full disk"] = command.end()
        found["after the full disk"] = contents(command.run.folder)

        command = Command(folder, "--auto-resume", "--out", "run", *SETTINGS)
        found["end"] = command.end()
    finally:
        if command.process.is_running():
            for process in [command.process, *command.ranks()]:
                process.kill()
    return folder, found


def small_files_only():
    """A checkpoint cannot be written, all else can: as on a full disk, for a test."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (200 * 1024, 200 * 1024))


@pytest.mark.parametrize(
    ("how", "name", "step"),
    [
        ("before the first step", "SIGTERM", 1),
        ("one rank", "SIGUSR1", 4),
        ("many times", "SIGTERM", 9),
    ],
)
def test_a_signal_stops_and_saves(stopped, how, name, step):
    _, found = stopped
    status, _, complaints = found[how]
    assert status == 75, complaints
    assert complaints == [
        f"ddp_lab.train: stopped by {name} after step {step}, in epoch "
        f"{(step + 5) // 6}; go on with --resume run"
    ]


def test_each_went_on_where_the_other_stopped(stopped):
    _, found = stopped
    names = ["before the first step", "one rank", "many times", "end"]
    for before, after in itertools.pairwise(names):
        [step] = re.findall(r"after step (\d+), in", found[before][2][-1])
        assert found[after][1][1].startswith(f"going on after step {step}, in epoch ")


def test_a_full_disk_keeps_the_old_checkpoint(stopped):
    _, found = stopped
    status, _, complaints = found["full disk"]
    assert status == 2
    assert len(complaints) == 1
    assert re.fullmatch(
        r"ddp_lab\.train: cannot write the checkpoint run/checkpoint-\d+\.pt: "
        r"File too large; the one after step \d+ is still there; make room and go on "
        "with --resume run",
        complaints[0],
    ), complaints
    before, after = found["before the full disk"], found["after the full disk"]
    assert set(before) == set(after)
    for name, content in before.items():
        assert after[name] == content or name.endswith((".png", ".json", ".jsonl"))


def test_all_of_it_is_the_uninterrupted_run(stopped):
    folder, found = stopped
    assert found["end"][0] == 0
    assert found["end"][2] == []
    assert_equal(folder / "run", folder / "whole")
    assert len(Run(folder / "run").history.steps) == 18
    assert len(Run(folder / "run").environment["resumed"]) == 4
    assert not list((folder / "run").glob("*.tmp"))
