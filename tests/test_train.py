"""The command line: what people type, and what they type wrong."""

import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
from typing import get_type_hints

import psutil
import pytest
import torch
from torch.distributed.run import get_args_parser

from ddp_lab.config import RECIPES, TrainConfig
from ddp_lab.ranks.workers import Workers
from ddp_lab.runs import checkpoint
from ddp_lab.runs.record import Run
from ddp_lab.train import (
    _choose_num_ranks,
    _new_folder,
    _own_arguments,
    drop_local_rank,
    main,
    parse_arguments,
    train,
)
from image_files import write_fashion_mnist, write_folder
from small_commands import ENVIRON, LIMIT_S, SMALL_MODEL, hold, num_held, run, wait_for

TRAIN = [sys.executable, "-m", "ddp_lab.train"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
LAUNCH = [sys.executable, "-m", "torch.distributed.launch", "--standalone"]
NOTE = "ddp_lab.train: --local-rank is ignored: LOCAL_RANK of the environment counts"
TINY = [
    *("--epochs", "1", "--global-batch-size", "4", "--device", "cpu"),
    *("--image-size", "16", "--limit-train", "8", "--limit-test", "4"),
]
SMALL = [
    "--limit-train",
    "160",
    "--limit-test",
    "50",
    "--epochs",
    "2",
    "--device",
    "cpu",
    "--num-threads",
    "1",
]


@pytest.fixture(scope="module")
def spawned(tmp_path_factory):
    folder = tmp_path_factory.mktemp("spawned")
    return folder, run([*TRAIN, *SMALL], folder, OMP_NUM_THREADS="1")


def test_default_run_on_a_part(spawned):
    folder, (status, said, complaints) = spawned
    assert (status, complaints) == (0, [])
    assert said[0] == (
        "resnet18 on digits: 2 ranks on cpu (gloo), 32 images a rank = global batch "
        "64, 2 steps an epoch"
    )
    assert [line.split()[1] for line in said[1:3]] == ["1/2", "2/2"]
    last = re.fullmatch(
        r"test accuracy [\d.]+% \(\d+ of 50\) after 2 epochs, [\d.]+ s, \d+ images/s; "
        r"loss curve: (runs/digits-resnet18-\d{8}-\d{6}/loss\.png)",
        said[-1],
    )
    assert last, said[-1]
    picture = folder / last[1]
    assert picture.read_bytes().startswith(b"\x89PNG")
    names = {p.name for p in picture.parent.iterdir()}
    assert names == {
        "classes.json",
        "config.json",
        "environment.json",
        "history.jsonl",
        "loss.png",
        "checkpoint.pt",
        "checkpoint-00000002.pt",
        "checkpoint-00000004.pt",
    }
    written = Run.open(picture.parent)
    assert written.config == dataclasses.replace(
        TrainConfig(),
        limit_train=160,
        limit_test=50,
        epochs=2,
        device="cpu",
        num_threads=1,
    )
    assert written.environment["backend"] == "gloo"
    assert written.history.evals[-1]["num_samples"] == 50


def test_torchrun_joins_and_trains_the_same(spawned, tmp_path):
    """Two launchers, one training: the same bits in the end."""
    command = [*TORCHRUN, "--nproc-per-node", "2", "-m", "ddp_lab.train", *SMALL]
    status, said, complaints = run(
        [*command, "--out", "joined", "--local-rank=0"], tmp_path, OMP_NUM_THREADS="1"
    )
    assert status == 0, complaints
    assert complaints.count(NOTE) == 1
    assert said[0].startswith("resnet18 on digits: 2 ranks on cpu (gloo)")
    assert said[-1].endswith("loss curve: joined/loss.png")
    assert len(said) == 4  # rank 0 alone speaks
    [other] = (spawned[0] / "runs").iterdir()
    states = [
        checkpoint.load(folder / "checkpoint.pt")["model"]
        for folder in (other, tmp_path / "joined")
    ]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({"WORLD_SIZE": "2"}, "RANK is missing"),
        ({"RANK": "0"}, "WORLD_SIZE is 'missing'"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "must be below WORLD_SIZE=2"),
        (
            {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_PTY_PORT": "4"},
            "an interactive srun shell",
        ),
    ],
)
def test_a_wrong_environment_is_one_line(environ, words, tmp_path, monkeypatch, capsys):
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert main(["--out", str(tmp_path / "run")]) == 2
    [complaint] = capsys.readouterr().err.splitlines()
    assert complaint.startswith("ddp_lab.train: ")
    assert words in complaint
    assert list(tmp_path.iterdir()) == []


def test_torchruns_forerunner(tmp_path):
    """It adds --local-rank=N to the arguments of each rank."""
    command = [*LAUNCH, "--nproc-per-node", "2", "-m", "ddp_lab.train", *TINY]
    status, said, complaints = run([*command, "--out", "a"], tmp_path, **ENVIRON)
    assert status == 0, complaints
    assert complaints.count(NOTE) == 1
    assert said[0].startswith("resnet18 on digits: 2 ranks on cpu (gloo)")
    assert len(Run.open(tmp_path / "a").history.steps) == 2


def test_torchrun_tells_of_bad_input(tmp_path):
    command = [*TORCHRUN, "--nproc-per-node", "2", "-m", "ddp_lab.train"]
    status, _, complaints = run([*command, "--num-ranks", "3"], tmp_path)
    assert status != 0
    told = [line for line in complaints if "the launcher started 2 ranks" in line]
    assert told, complaints
    assert not list(tmp_path.iterdir())


BROKEN = """
import runpy
from ddp_lab import loop
def fit_on_rank(*args, **kwargs):
    raise KeyError("label_column")
loop.fit_on_rank = fit_on_rank
runpy.run_module("ddp_lab.train", run_name="__main__")
"""


def test_torchruns_summary_has_an_unexpected_errors_traceback(tmp_path):
    (tmp_path / "broken.py").write_text(BROKEN)
    command = [*TORCHRUN, "--nproc-per-node", "2", "broken.py", "--device", "cpu"]
    status, _, complaints = run(command, tmp_path, OMP_NUM_THREADS="1")
    assert status != 0
    summary = "\n".join(complaints).partition("Root Cause")[2]
    assert "KeyError: 'label_column'" in summary
    assert "in fit_on_rank" in summary


def options():
    found = []
    for field, kind in get_type_hints(TrainConfig).items():
        name = "--" + field.replace("_", "-")
        if kind is bool:
            found += [[name], ["--no-" + name[2:]]]
        else:
            found += [[name, "1"], [name + "=1"]]
    return found


@pytest.mark.parametrize("option", options(), ids=" ".join)
def test_torchrun_leaves_our_options_alone(option):
    """torchrun takes a script's option for its own if it is a beginning of several."""
    arguments = ["--standalone", "-m", "ddp_lab.train", *option]
    parsed = get_args_parser().parse_args(arguments)
    assert parsed.training_script_args == option


@pytest.fixture(scope="module")
def workers():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", SMALL_MODEL)
        with Workers(2, num_threads=1) as workers:
            yield workers


@pytest.fixture
def command(workers, tmp_path, monkeypatch, capfd):
    """The command line without its start, on ranks that stay and have small models."""
    monkeypatch.chdir(tmp_path)

    workers.run(os.chdir, tmp_path)

    def launch(*call, num_ranks, num_threads, **options):
        assert num_ranks == 2
        return workers.run(*call, **options)

    monkeypatch.setattr(sys.modules["ddp_lab.train"], "launch", launch)

    def run_here(*arguments):
        status = main(arguments)
        said, complaints = capfd.readouterr()
        return status, said.splitlines(), complaints.splitlines()

    return run_here


def test_resume_goes_on(command, tmp_path):
    """From the command line, with one more epoch: a constant schedule allows that."""
    constant = ["--schedule", "constant", "--lr", "0.01", "--out", "a"]
    little = ["--limit-train", "20", "--limit-test", "8", "--global-batch-size", "10"]
    assert command(*SMALL, *constant, *little)[0] == 0
    config = Run(tmp_path / "a").config_file.read_bytes()
    status, said, complaints = command("--resume", "a", "--epochs", "3")
    assert (status, complaints) == (0, [])
    assert said[1] == "going on after step 4, in epoch 3"
    assert [line.split()[1] for line in said[2:-1]] == ["3/3"]
    history = Run.open(tmp_path / "a").history
    assert [line["step"] for line in history.steps] == [1, 2, 3, 4, 5, 6]
    assert Run(tmp_path / "a").config_file.read_bytes() == config

    # once more, with nothing left to do
    status, said, _ = command("--resume", "a", "--epochs", "3")
    assert status == 0
    assert "after 3 epochs" in said[-1]
    assert len(Run.open(tmp_path / "a").history.steps) == 6

    # and from the checkpoint before, if the newest is damaged
    with (tmp_path / "a" / "checkpoint-00000006.pt").open("r+b") as file:
        file.truncate(1000)
    status, said, complaints = command("--resume", "a", "--epochs", "3")
    assert (status, complaints) == (0, [])
    assert said[1].startswith("checkpoint a/checkpoint-00000006.pt is damaged or none")
    assert said[1].endswith("; trying the one before")
    assert said[2] == "going on after step 4, in epoch 3"
    assert len(Run.open(tmp_path / "a").history.steps) == 6


LEAVING = """
import atexit, os, runpy, sys, threading, time
class Witness:
    def __del__(self):
        os.write(1, b"taken apart")
witness = Witness()
def work():
    while threading.main_thread().is_alive() and not leaving:
        time.sleep(0.01)
    os.write(1, b"thread ")
leaving = []
threading._register_atexit(leaving.append, 1)  # called when threads are waited for
threading.Thread(target=work).start()
atexit.register(os.write, 1, b"hook ")
sys.stdout.write("printed ")
sys.argv[1:] = ["--dataset", "nothing"]
runpy.run_module("ddp_lab.train", run_name="__main__")
"""


def test_a_rank_leaves_before_python_takes_itself_apart():
    """Threads of gloo that are still at work would abort it then; see leave_process."""
    ended = subprocess.run(
        [sys.executable, "-c", LEAVING], capture_output=True, text=True
    )
    assert ended.returncode == 2
    assert "'nothing'" in ended.stderr
    assert sorted(ended.stdout.split()) == ["hook", "printed", "thread"]


@pytest.mark.parametrize(
    ("num_gpus", "micro", "num_ranks"),
    [(0, None, 2), (2, None, 2), (3, None, 2), (5, None, 4), (7, 16, 4), (64, 2, 32)],
)
def test_as_many_gpus_as_share_the_batch(
    monkeypatch, capsys, num_gpus, micro, num_ranks
):
    """Digits on three GPUs: 64 images do not divide by 3."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    assert _choose_num_ranks(TrainConfig(micro_batch_size=micro)) == num_ranks
    said = capsys.readouterr().err
    if num_ranks < num_gpus:
        words = f"ddp_lab.train: {num_ranks} of {num_gpus} ranks: global_batch_size"
        assert said.startswith(words)
        assert "the nearest that does is" in said
    else:
        assert said == ""


def test_a_failing_picture_fails_nothing(command, monkeypatch, tmp_path):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("ddp_lab.figures.plot_loss", full)
    status, said, complaints = command(*TINY, "--out", "a")
    assert status == 0
    assert said[-1].startswith("test accuracy")
    assert complaints == [
        "ddp_lab.train: no a/loss.png: OSError: [Errno 28] No space left on device"
    ]


def test_a_notebooks_kernel_has_arguments_of_its_own(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["ipykernel_launcher.py", "-f", "kernel-1.json"])
    monkeypatch.delitem(sys.modules, "ipykernel", raising=False)
    assert _own_arguments() == ["-f", "kernel-1.json"]
    monkeypatch.setitem(sys.modules, "ipykernel", sys)
    assert _own_arguments() == []


def test_home_behind_an_equals_sign(monkeypatch, tmp_path):
    """A shell expands ~ at the beginning of a word only."""
    monkeypatch.setenv("HOME", str(tmp_path))
    config = parse_arguments(["--out=~/a", "--data-dir=~/b"])
    assert (config.out, config.data_dir) == (tmp_path / "a", tmp_path / "b")


def test_a_cluster_stops_all_processes_at_once(tmp_path):
    """Also those that load images for a rank, and are needed to end its step."""
    write_folder(tmp_path / "images", num_train=24)
    hold(tmp_path, "step 3")
    arguments = [
        *("--dataset", "folder", "--data-dir", "images", "--num-workers", "1"),
        *("--device", "cpu", "--image-size", "16", "--global-batch-size", "4"),
        *("--epochs", "9", "--out", "a"),
    ]
    process = psutil.Popen(
        [*TRAIN, *arguments],
        cwd=tmp_path,
        env={**os.environ, **ENVIRON},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    wait_for(lambda: num_held(tmp_path, "step 3") == 2, process)
    family = [process, *process.children(recursive=True)]
    assert len([p for p in family if "spawn_main" in " ".join(p.cmdline())]) >= 4
    for member in family:
        if "resource_tracker" not in " ".join(member.cmdline()):
            member.send_signal(signal.SIGTERM)
    _, complaints = process.communicate(timeout=LIMIT_S)
    assert (process.returncode, complaints.splitlines()[-1].split(";")[0]) == (
        75,
        "ddp_lab.train: stopped by SIGTERM after step 3, in epoch 1",
    )
    assert checkpoint.saved_steps(tmp_path / "a") == [3]


def test_interrupt_leaves_nothing_behind(tmp_path):
    """Meanwhile: nothing of ours listens beyond this machine."""
    hold(tmp_path, "step 3")
    process = psutil.Popen(
        [*TRAIN, *TINY, "--epochs", "2", "--out", "a"],
        cwd=tmp_path,
        env={**os.environ, **ENVIRON},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline().startswith("resnet18 on digits")
    assert "test loss" in process.stdout.readline()
    wait_for(lambda: num_held(tmp_path, "step 3") == 2, process)
    family = [process, *process.children(recursive=True)]
    ranks = [p for p in family if "spawn_main" in " ".join(p.cmdline())]
    assert len(ranks) >= 2
    listening = {
        connection.laddr.ip
        for member in family
        for connection in member.net_connections()
        if connection.status == psutil.CONN_LISTEN
    }
    assert listening
    assert listening <= {"127.0.0.1", "::1"}

    process.send_signal(signal.SIGINT)
    _, complaints = process.communicate(timeout=60)
    assert process.returncode == 130
    assert complaints.splitlines()[-1].startswith("ddp_lab.train: interrupted")
    assert "Traceback" not in complaints
    _, alive = psutil.wait_procs(family, timeout=5)
    assert not alive
    assert (tmp_path / "a" / "loss.png").exists()
    assert checkpoint.load(tmp_path / "a" / "checkpoint.pt")["progress"]["epoch"] == 1


@pytest.mark.parametrize("dataset", ["fashion-mnist", "folder"])
def test_other_datasets_train(command, tmp_path, dataset):
    if dataset == "folder":
        write_folder(tmp_path / "data")
    else:
        write_fashion_mnist(tmp_path / "data")
    also = {"folder": ["--num-workers", "1"], "fashion-mnist": ["--norm", "sync"]}
    status, said, complaints = command(*TINY, "--dataset", dataset, *also[dataset])
    assert (status, complaints) == (0, [])
    assert said[0].startswith(f"resnet18 on {dataset}: 2 ranks")


def test_broken_image_is_one_line(command, tmp_path):
    """Found by a rank in the middle of training, told as if found at once."""
    for k in (3, 4, 5):
        bad = write_folder(tmp_path / "data") if k == 3 else tmp_path / "data"
        (bad / "train" / "cat" / f"{k}.png").write_bytes(b"\x89PNG")
    whole = [*TINY[:6], "--image-size", "16"]
    status, _, complaints = command(*whole, "--dataset", "folder", "--num-workers", "1")
    assert status == 2
    assert len(complaints) == 1
    assert re.search(
        r"cat/[345]\.png cannot be read .*replace or delete", complaints[0]
    )


def test_diverging_run_ends_with_status_1(command):
    status, _, complaints = command(*SMALL, "--lr", "1e18")
    assert status == 1
    assert len(complaints) == 1
    expected = r"ddp_lab\.train: the loss became (nan|inf) at step \d, in epoch 1: try"
    assert re.match(expected, complaints[0])


# ------------------------------------------------------------------ without ranks


def test_a_notebook_looks_on(monkeypatch, tmp_path):
    given = {}

    def launch(fn, *args, **options):
        given.update(options)
        return [{"accuracy": 1.0}]

    module = sys.modules["ddp_lab.train"]  # ddp_lab.train is the function
    monkeypatch.setattr(module, "launch", launch)
    config = dataclasses.replace(RECIPES["default"], device="cpu", out=tmp_path / "a")
    result = train(config, "none", on_record=print)
    assert given["on_record"] is print
    assert result == {"accuracy": 1.0, "folder": tmp_path / "a"}


def test_recipe_and_flags():
    config = parse_arguments(["--recipe", "article", "--epochs", "2", "--no-flip"])
    assert config == dataclasses.replace(RECIPES["article"], epochs=2, flip=False)
    assert parse_arguments([]) == RECIPES["default"]
    assert parse_arguments(["--recipe=fast"]) == RECIPES["fast"]


@pytest.mark.parametrize("flag", ["--local-rank", "--local_rank"])
@pytest.mark.parametrize("joint", ["=", " "])
def test_local_rank_is_dropped_with_a_note(flag, joint, monkeypatch, capfd):
    given = f"--lr 1 {flag}{joint}0 --epochs 2".split()
    assert drop_local_rank(given) == (["--lr", "1", "--epochs", "2"], True)
    assert drop_local_rank([*given[3:], "--out", "7"])[0][-2:] == ["--out", "7"]
    expected = dataclasses.replace(RECIPES["default"], lr=1.0, epochs=2)
    for rank, note in {None: NOTE + "\n", "0": NOTE + "\n", "1": ""}.items():
        if rank is not None:
            monkeypatch.setenv("RANK", rank)
            monkeypatch.setenv("WORLD_SIZE", "2")
        assert parse_arguments(given) == expected
        assert capfd.readouterr() == ("", note)


def test_no_note_without_local_rank(capfd):
    assert drop_local_rank(["--epochs", "0"]) == (["--epochs", "0"], False)
    bare = ["--local-rank", "--epochs", "2"]  # no launcher's
    assert drop_local_rank(bare) == (bare, False)
    parse_arguments(["--epochs", "2"])
    assert capfd.readouterr() == ("", "")


def test_every_option_has_help_and_default(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    said = capsys.readouterr().out
    words = " ".join(re.sub(r"[│╭╮╰╯─]", " ", said).split())  # without the box
    for field in dataclasses.fields(TrainConfig):
        name = "--" + field.name.replace("_", "-")
        _, found, rest = words.partition(f" {name}")
        assert found, name
        about, has_default, _ = rest.partition("(default: ")
        assert has_default, f"{name} shows no default"
        assert " --" not in about.replace(", --no-", ""), f"{name} shows no default"
        assert len(re.findall(r"\b[a-z]{2,}", about)) >= 3, f"{name} has no help text"


@pytest.fixture
def finished(tmp_path_factory):
    """A run with a checkpoint, made without training."""
    run = Run.create(
        tmp_path_factory.mktemp("finished") / "run", TrainConfig(), {"device": "cpu"}
    )
    checkpoint.save(
        run.folder,
        {
            "model": {},
            "optimizer": {},
            "schedule": {},
            "progress": {"epoch": 8, "step": 176, "time_s": 1.0, "train_s": 1.0},
            "config": TrainConfig().to_json(),
            "data": "",
        },
    )
    return run


BAD_INPUT = {
    "--dataset mnist": "invalid choice 'mnist'.*'digits', 'fashion-mnist', 'cifar10'",
    "--recipe slow": "choose one of default, article, fast",
    "--model resnet19": "did you mean .*choose one of alexnet, ",
    "--dataset cifar10": "looked in data/cifar-10-batches-py.*--download.*copy",
    "--dataset folder": "data/train is missing",
    "--epochs 0": "epochs 0 must be 1 or more",
    "--epochs many": "--epochs.*'many'",
    "--epoch 3": "--epoch.*--epochs",
    "--lr nan": "lr nan must be a positive number",
    "--lr -1": "lr -1.0 must be a positive number",
    "--num-ranks 0": "num_ranks 0 must be 1 or more",
    "--global-batch-size 63": "nearest that does is 62 or 64",
    "--global-batch-size 4096": "choose 1437 or less",
    "--limit-train 1 --global-batch-size 2": "1 training images are too few",
    "--micro-batch-size 1": "--micro-batch-size",
    "--device cuda": "no GPU to PyTorch; choose device cpu",
    "--resume nowhere": "no run in nowhere",
    "--local-rank": "--local-rank",
    "--local-rank=x": "--local-rank=x",
    "--out .": "holds a run already",
    "--out config.json": "config.json is a file",
    "--out config.json/deeper": "config.json is a file",
}


@pytest.mark.parametrize("arguments", BAD_INPUT)
def test_bad_input_is_one_line_and_creates_nothing(
    arguments, tmp_path, monkeypatch, capfd
):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    assert main(arguments.split()) == 2
    said, complaint = capfd.readouterr()
    assert said == ""
    assert complaint.startswith("ddp_lab.train: ")
    assert complaint.count("\n") == 1
    assert re.search(BAD_INPUT[arguments], complaint), complaint
    assert [p.name for p in tmp_path.iterdir()] == ["config.json"]


def test_more_ranks_than_gpus(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.chdir(tmp_path)
    assert main(["--device", "cuda", "--num-ranks", "2"]) == 2
    assert "2 ranks on this machine, but only 1 GPU" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "resnet34"], "another model 'resnet34' \\(it has 'resnet18'\\)"),
        (
            ["--dataset", "cifar10", "--global-batch-size", "32"],
            "another dataset 'cifar10' .*another global_batch_size 32",
        ),
        (["--epochs", "9"], "another epochs 9 \\(it has 8\\)"),
        (["--out", "elsewhere"], "a resumed run stays in its folder"),
    ],
)
def test_resume_of_another_run(finished, arguments, message, capsys):
    before = {p.name: p.read_bytes() for p in finished.folder.iterdir()}
    assert main(["--resume", str(finished.folder), *arguments]) == 2
    assert re.search(message, capsys.readouterr().err)
    assert {p.name: p.read_bytes() for p in finished.folder.iterdir()} == before


def damage_missing(path):
    for other in path.parent.glob("checkpoint*"):
        other.unlink()


def damage_torn(path):
    path.write_bytes(path.read_bytes()[:-200])


def damage_foreign(path):
    torch.save({"state_dict": {}}, path)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (damage_missing, "no checkpoint in"),
        (damage_torn, "is damaged or none of ours"),
        (damage_foreign, "was not written by ddp_lab"),
    ],
)
def test_resume_from_what_is_no_checkpoint(finished, damage, message, capsys):
    damage(finished.checkpoint_file)
    assert main(["--resume", str(finished.folder)]) == 2
    complaint = capsys.readouterr().err
    assert re.search(message, complaint)
    assert complaint.count("\n") == 1
    assert json.loads(finished.config_file.read_text())["epochs"] == 8


def test_second_run_in_the_same_second_gets_its_own_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("time.strftime", lambda _: "20260101-000000")
    folders = []
    for _ in range(3):
        folders.append(_new_folder(TrainConfig()))
        folders[-1].mkdir(parents=True)
    assert [f.name for f in folders] == [
        "digits-resnet18-20260101-000000",
        "digits-resnet18-20260101-000000-2",
        "digits-resnet18-20260101-000000-3",
    ]
