"""The files around the package say the same as the package."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from torch.distributed.run import get_args_parser

import ddp_lab

ROOT = Path(ddp_lab.__file__).parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
README = (ROOT / "README.md").read_text()
GUIDES = [README, *(path.read_text() for path in sorted((ROOT / "docs").glob("*.md")))]

# Every command that README and docs show, and where it is run.
RUN_BY = {
    "git clone REPOSITORY ddp_lab && cd ddp_lab": "whoever reads this",
    "make lab": "test_make_runs_the_commands_that_are_tested",
    "make train": "test_make_runs_the_commands_that_are_tested",
    "make test": "test_make_runs_the_commands_that_are_tested",
    "python3 -m venv .venv": "the Makefile, in CI",
    '.venv/bin/pip install -e ".[dev]"': "the Makefile, in CI",
    ".venv/bin/python -m ddp_lab.train": "test_train.py",
    ".venv/bin/jupyter lab notebooks/00_start_here.ipynb": "test_browser.py",
    "conda env create -f environment.yml": "test_environment_yml (its content)",
    "conda activate ddp_lab": "test_environment_yml (its name)",
    "python -m ddp_lab.train": "test_train.py",
    "torchrun --standalone --nproc-per-node 2 -m ddp_lab.train": "test_train.py",
    "python -m ddp_lab.train --help": "test_train.py",
    "torchrun --standalone --nproc-per-node 2 --max-restarts 3 -m ddp_lab.train "
    "--out runs/NAME": "test_elastic.py",
    "python -m ddp_lab.train --auto-resume --out runs/NAME": "test_resume.py",
    "torchrun --nnodes 2 --nproc-per-node 4 --rdzv-backend c10d "
    "--rdzv-endpoint HOST:29500 --rdzv-id NAME -m ddp_lab.train": "multihost",
    "sbatch cluster/slurm.sbatch": "multihost/test_real_slurm.py",
}


def test_environment_yml():
    """Python, pip, and this package with its extras: nothing that could drift."""
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())
    assert environment["name"] == PYPROJECT["project"]["name"]
    python, pip, section = environment["dependencies"]
    assert python == "python" + PYPROJECT["project"]["requires-python"]
    assert pip == "pip"
    assert section == {"pip": ["-e .[dev]"]}
    assert "dev" in PYPROJECT["project"]["optional-dependencies"]
    assert environment["channels"] == ["conda-forge"]


def test_version_is_the_changelogs():
    newest = re.search(r"(?m)^## (\S+)", (ROOT / "CHANGELOG.md").read_text())
    assert newest[1] == ddp_lab.__version__ == PYPROJECT["project"]["version"]


def test_dependencies_are_ranges():
    project = PYPROJECT["project"]
    for requirement in (
        project["dependencies"] + project["optional-dependencies"]["dev"]
    ):
        assert ">=" in requirement, f"{requirement} names no lowest version"
        assert "==" not in requirement


def test_make_runs_the_commands_that_are_tested():
    def would_run(target):
        command = ["make", "--dry-run", "--always-make", target]
        return subprocess.check_output(command, cwd=ROOT, text=True)

    assert ".venv/bin/python -m ddp_lab.train" in would_run("train")
    assert "scripts/check.sh" in would_run("test")
    assert "benchmarks/kill_storm.py 200" in would_run("soak")
    assert ".venv/bin/jupyter lab notebooks/00_start_here.ipynb" in would_run("lab")
    assert 'pip install --quiet --editable ".[dev]"' in would_run("train")
    checks = (ROOT / "scripts" / "check.sh").read_text()
    for tool in ("ruff check", "ruff format --check", "mypy", "pytest", "--nbval "):
        assert f"-m {tool}" in checks or tool in checks


def test_every_command_of_readme_is_run_somewhere():
    commands = [
        line.split("  #")[0].strip()
        for guide in GUIDES
        for block in re.findall(r"(?s)```bash\n(.*?)```", guide)
        for line in block.splitlines()
        if line.strip()
    ]
    assert len(commands) == len(set(commands)) > 5
    assert set(commands) == set(RUN_BY)


def test_python_of_readme_does_what_it_says(tmp_path):
    """With a main guard around the last line, as a script needs one."""
    [code] = re.findall(r"(?s)```python\n(.*?)```", README)
    *body, last = code.strip().splitlines()
    call, _, result = last.partition("#")
    script = tmp_path / "script.py"
    guard = f'if __name__ == "__main__":\n    print({call.strip()})'
    script.write_text("\n".join([*body, guard]))
    python = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, check=False
    )
    assert python.stdout.strip() == result.strip(), python.stderr


def test_messages_in_readme_are_the_packages():
    table = README.partition("## Troubleshooting")[2].partition("\n## ")[0]
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("| ")]
    messages = [text for row in rows for text in re.findall(r"`(.+?)`", row)]
    source = "".join(f.read_text() for f in (ROOT / "ddp_lab").rglob("*.py"))
    source = re.sub(r'"\s+f?"', "", source)  # pieces of one text
    assert len(messages) == 10
    assert [text for text in messages if text not in source] == []


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", "docs/*.md"])
def test_links_lead_somewhere(name):
    for path in ROOT.glob(name):
        text = path.read_text()
        links = re.findall(r"\]\(([^)]+)\)", text)
        assert name != "README.md" or links
        for link in links:
            if link.startswith(("https://", "../../actions/")):  # GitHub's own page
                continue
            file, _, place = link.partition("#")
            target = path.parent / file if file else path
            assert target.exists(), link
            assert not place or place in places_of(target), link


def places_of(path):
    """What a link into this page may name behind its #, as GitHub makes them."""
    return {
        re.sub(r"[^\w -]", "", heading).strip().lower().replace(" ", "-")
        for heading in re.findall(r"(?m)^#+ (.*)$", path.read_text())
    }


def test_options_in_readme_exist():
    from ddp_lab.config import TrainConfig

    fields = set(TrainConfig.__dataclass_fields__)
    torchruns = {action.dest for action in get_args_parser()._actions}
    for option in re.findall(r"(?<![\w-])--([a-z][a-z-]+)", "".join(GUIDES)):
        assert option.replace("-", "_") in fields | torchruns, option
