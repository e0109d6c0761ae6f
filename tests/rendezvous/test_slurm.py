import pytest

from ddp_lab.rendezvous.slurm import expand_counts, expand_hosts, slurm_hosts

FIVE = {
    "SLURM_STEP_NODELIST": "n[1-2,05]",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
    "SLURM_PROCID": "3",
    "SLURM_NODEID": "1",
}


@pytest.mark.parametrize(
    ("short", "hosts"),
    [
        ("", []),
        ("localhost", ["localhost"]),
        ("a,b-1.example.org", ["a", "b-1.example.org"]),
        ("n[1-2,05],x", ["n1", "n2", "n05", "x"]),
        ("n[08-11]", ["n08", "n09", "n10", "n11"]),
        ("r[0-1]n[2-3]-ib", ["r0n2-ib", "r0n3-ib", "r1n2-ib", "r1n3-ib"]),
    ],
)
def test_expand_hosts(short, hosts):
    assert expand_hosts(short) == hosts


@pytest.mark.parametrize(
    ("short", "counts"),
    [("", []), ("1", [1]), ("2(x3),1", [2, 2, 2, 1]), ("1,2(x2),4", [1, 2, 2, 4])],
)
def test_expand_counts(short, counts):
    assert expand_counts(short) == counts


def test_slurm_hosts():
    assert slurm_hosts(FIVE) == ["n1", "n1", "n2", "n2", "n05"]


@pytest.mark.parametrize(
    "other",
    [
        {"SLURM_STEP_NODELIST": ""},
        {"SLURM_STEP_TASKS_PER_NODE": "2(x2)"},
        {"SLURM_NODEID": "2"},  # the tasks were dealt out in turn
        {"SLURM_DISTRIBUTION": "cyclic"},
        {"SLURM_PROCID": "5"},
    ],
)
def test_slurm_hosts_guesses_nothing(other):
    assert slurm_hosts(FIVE | other) == []
