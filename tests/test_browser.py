"""The real thing: JupyterLab in a browser, launch, %%ranks, and the Stop button.

Needs Chromium with its driver (Debian: chromium, chromium-driver) and selenium; without
them it is skipped. Leaves artifacts/jupyterlab.png for people to look at.
"""

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import nbformat
import pytest

from kernel import cmd, descendants, wait_gone

BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")
ARTIFACTS = Path(__file__).resolve().parent.parent / "artifacts"
LIMIT_S = 90.0

pytestmark = [
    pytest.mark.browser,
    pytest.mark.timeout(400),
    pytest.mark.skipif(not BROWSER, reason="no Chromium: apt install chromium"),
    pytest.mark.skipif(not DRIVER, reason="no driver: apt install chromium-driver"),
]

CELLS = [
    "%load_ext ddp_lab\nimport os\nfrom ddp_lab.ranks.launch import launch",
    "def hello():\n    print('hello from', os.environ['RANK'])\n"
    "    return int(os.environ['RANK'])\n\nlaunch(hello, num_ranks=2)",
    "%ranks 2",
    "%%ranks\nx = torch.full((2,), float(rank))\ndist.all_reduce(x)\nx",
    "%%ranks\nopen(f'waiting{rank}', 'w').close()\ndist.recv(x, 1 - rank)",
    "%%ranks\n'the ranks are back', rank",
]
DEADLOCK = 4

# What a person would do and see, in the words of JupyterLab's own commands.
PANEL = """
const widgets = window.jupyterapp?.shell?.widgets('main') ?? [];
const panel = [...widgets].find(widget => widget.context);
"""
READY = PANEL + "return panel?.context.sessionContext.session?.kernel?.status == 'idle'"
RUN = "void window.jupyterapp.commands.execute(arguments[0])"
STATE = (
    PANEL
    + """
const cells = panel.content.model.cells, found = [];
for (let i = 0; i < cells.length; i++) {
    const cell = cells.get(i).toJSON();
    const texts = cell.outputs.map(
        o => [o.text ?? o.data?.['text/plain'] ?? o.ename].flat().join(''));
    found.push([cell.execution_count, texts.join('')]);
}
return {cells: found, status: panel.context.sessionContext.session.kernel.status};
"""
)
SHOW = (
    PANEL
    + """
const notebook = panel.content;
notebook.activeCellIndex = arguments[0];
return notebook.scrollToItem(arguments[0], 'start');
"""
)


@pytest.fixture
def lab(tmp_path):
    """JupyterLab's address and process, serving one notebook; no settings of ours."""
    book = nbformat.v4.new_notebook()
    book.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3"}
    book.cells = [nbformat.v4.new_code_cell(text) for text in CELLS]
    folder = tmp_path / "notebooks"
    folder.mkdir()
    nbformat.write(book, folder / "ranks.ipynb")
    settings = tmp_path / "settings" / "@jupyterlab" / "apputils-extension"
    settings.mkdir(parents=True)
    quiet = '{"fetchNews": "false", "checkForUpdates": false}'
    (settings / "notification.jupyterlab-settings").write_text(quiet)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # ipykernel shows less when it believes that it runs under pytest
    env = {k: v for k, v in os.environ.items() if k != "PYTEST_CURRENT_TEST"}
    env |= {
        "JUPYTER_CONFIG_DIR": str(tmp_path / "config"),
        "JUPYTERLAB_SETTINGS_DIR": str(tmp_path / "settings"),
        "JUPYTERLAB_WORKSPACES_DIR": str(tmp_path / "workspaces"),
        "JUPYTER_RUNTIME_DIR": str(tmp_path / "runtime"),
    }
    command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--ip=127.0.0.1",
               f"--port={port}", "--ServerApp.port_retries=0", "--allow-root",
               "--IdentityProvider.token=", f"--ServerApp.root_dir={folder}",
               "--LabApp.expose_app_in_browser=True", "--LabApp.news_url="]  # fmt: skip
    with open(tmp_path / "log", "w") as log:
        server = subprocess.Popen(command, env=env, stdout=log, stderr=log)
    address = f"http://127.0.0.1:{port}"
    try:
        until(lambda: answers(f"{address}/api"), "JupyterLab answers")
        yield address, server.pid, folder
    finally:
        left = descendants(server.pid)
        server.terminate()
        server.wait(20)
        assert wait_gone(left) == []


@pytest.fixture
def page(tmp_path):
    """A browser window without a screen."""
    webdriver = pytest.importorskip("selenium.webdriver", reason="no selenium")
    options = webdriver.ChromeOptions()
    options.binary_location = BROWSER
    for argument in ("--headless=new", "--disable-gpu", "--window-size=1200,1250",
                     "--no-first-run", "--disable-background-networking",
                     "--disable-dev-shm-usage", "--no-proxy-server",
                     f"--user-data-dir={tmp_path / 'profile'}"):  # fmt: skip
        options.add_argument(argument)
    if hasattr(os, "geteuid") and os.geteuid() == 0:
        options.add_argument("--no-sandbox")  # in a container, Chromium's needs more
    service = webdriver.ChromeService(DRIVER)
    browser = webdriver.Chrome(options, service)
    try:
        yield browser
        # also of a test that failed
        ARTIFACTS.mkdir(exist_ok=True)
        assert browser.save_screenshot(str(ARTIFACTS / "jupyterlab.png"))
    finally:
        browser.quit()


def answers(address: str) -> bool:
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with contextlib.suppress(urllib.error.URLError, ConnectionError):
        with direct.open(address):
            return True
    return False


def until(condition, what: str) -> None:
    end = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < end, f"not within {LIMIT_S:g} s: {what}"
        time.sleep(0.1)


def ranks_under(pid: int):
    """The ranks of all kernels of a Jupyter server."""
    return [p for p in descendants(pid) if "spawn_main" in cmd(p)]


def test_launch_ranks_and_stop(lab, page):
    address, server, folder = lab
    page.get(f"{address}/lab/tree/ranks.ipynb?reset")
    until(lambda: page.execute_script(READY), "the notebook has its kernel")
    page.find_element("css selector", ".jp-Notebook .jp-Cell").click()  # focus
    page.execute_script(RUN, "notebook:run-all-cells")
    waiting = [folder / f"waiting{rank}" for rank in range(2)]
    until(lambda: all(p.exists() for p in waiting), "the ranks are in the deadlock")
    state = page.execute_script(STATE)
    assert state["status"] == "busy"
    texts = [text for _, text in state["cells"]]
    assert texts[1] == "hello from 0\n[rank 1] hello from 1\n[0, 1]"
    assert texts[2].startswith("2 ranks are ready on ")
    assert texts[3] == "rank 0: tensor([1., 1.])\nrank 1: tensor([1., 1.])"

    ranks = ranks_under(server)
    assert len(ranks) == 2
    page.find_element(
        "css selector", '[data-command="notebook:interrupt-kernel"]'
    ).click()
    assert wait_gone(ranks) == []
    until(lambda: page.execute_script(STATE)["status"] == "idle", "the cell has ended")
    text = page.execute_script(STATE)["cells"][DEADLOCK][1]
    assert "Interrupted: 2 running rank(s) of 2 stopped in" in text
    assert "waiting  recv" in text
    assert text.endswith("KeyboardInterrupt")
    assert ranks_under(server) == []

    page.execute_script(SHOW, len(CELLS) - 1)
    page.execute_script(RUN, "notebook:run-cell")
    until(
        lambda: "are back" in page.execute_script(STATE)["cells"][-1][1],
        "the next cell runs on new ranks",
    )
    text = page.execute_script(STATE)["cells"][-1][1]
    assert text.startswith("%ranks: 2 new ranks, because the last call was interrupted")
    assert "rank 1: ('the ranks are back', 1)" in text
    page.execute_script(SHOW, 0)
    time.sleep(0.5)  # for the picture only
