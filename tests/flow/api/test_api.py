"""`penstock.train`, `evaluate` and `load_run` with objects, files and options."""

import asyncio
import importlib
import signal
import subprocess
import sys
import threading
from pathlib import Path

import orjson
import pytest
from api_agent import Ask, AskConfig, Share, ask, share_of_a

import penstock
from penstock.api import QuietView, WorkThread
from penstock.errors import ConfigError, DatasetError
from penstock.records import Task

pytestmark = pytest.mark.slow

TASKS = [{"prompt": f"Say {number}", "label": str(number)} for number in range(4)]
SMALL = {"model": "tiny", "sampling": {"max_tokens": 8}, "rollout": {"group_size": 2, "groups_per_step": 2}, "progress": False}


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_functions_train_resume_and_load():
    first = penstock.train(ask, share_of_a, TASKS, eval_tasks=TASKS[:1], folder="runs/mine", train={"steps": 1}, **SMALL)
    again = penstock.train(ask, share_of_a, TASKS, eval_tasks=TASKS[:1], folder="runs/mine", train={"steps": 2}, **SMALL)
    assert (first.status, first.steps, again.steps, again.resumed) == ("finished", 1, 2, True)
    run = penstock.load_run("runs/mine")
    assert (run.kind, len(run.metrics()), len(run.rollouts("train"))) == ("train", 2, 8)
    assert {"before-0", "after-2"} <= run.evaluations().keys()
    steps = run.steps("train")
    assert [token.token_id for token in run.tokens("train")] == [token for step in steps for token in step.completion_ids]


def test_records_become_dataframes():
    pandas = pytest.importorskip("pandas")
    found = penstock.evaluate(ask, share_of_a, TASKS, **SMALL)
    run = penstock.load_run(found.folder)
    frame = run.rollouts().to_pandas()
    assert isinstance(frame, pandas.DataFrame)
    assert frame["reward"].mean() == pytest.approx(found.outcome.reward.value)
    assert len(run.tokens().to_pandas()) == run.steps().to_pandas()["tokens"].sum()
    assert run.groups().to_pandas()["label"].tolist() == ["0", "1", "2", "3"]


@pytest.mark.parametrize(
    ("agent", "options"),
    [
        (Ask, {"workflow": {"question": "why"}}),
        (Ask(AskConfig(name="ask", question="why")), {}),
        ("api_agent:ask", {}),
    ],
    ids=["class", "instance", "string"],
)
@pytest.mark.parametrize("grader", [Share, "api_agent:share_of_a"], ids=["class", "string"])
def test_agents_and_graders_of_every_form(agent, grader, options):
    found = penstock.evaluate(agent, grader, [Task(id="a", prompt=({"role": "user", "content": "Hi"},))], **SMALL, **options)
    assert found.outcome.ends == {"completed": 1}


@pytest.mark.project(config='run.name = "short"\nmodel.name = "tiny"\ndataset.train = "tasks.jsonl"\ntrain.steps = 9')
def test_config_file_with_keywords(project):
    summary = penstock.train(config="train.toml", train={"steps": 1}, **SMALL)
    assert (summary.name, summary.steps) == ("short", 1)
    found = penstock.evaluate("agent.py", tasks="tasks.jsonl", folder="here", **SMALL)
    assert found.folder == "here"


def test_works_inside_a_running_event_loop():
    async def cell():
        found = penstock.evaluate(ask, share_of_a, TASKS[:1], **SMALL)
        return len(penstock.load_run(found.folder).steps())

    assert asyncio.run(cell()) == 1


def test_changed_code_is_rejected():
    penstock.train(ask, share_of_a, TASKS, train={"steps": 1}, **SMALL)
    with pytest.raises(ConfigError, match="changed"):
        penstock.train(ask, lambda ctx: 1.0, TASKS, train={"steps": 2}, **SMALL)


@pytest.mark.parametrize(
    ("word", "options"),
    [
        ("process", {"rollout": {"executor": "process"}}),
        ("ray", {"scale": "ray"}),
        ("steps", {"train": {"stepss": 3}}),
        ("trian", {"trian": {"steps": 3}}),
        ("agent", {"agent": share_of_a}),
        ("grader", {"grader": None}),
        ("grader", {"grader": 3}),
        ("unknown", {"grader": "rulez"}),
    ],
)
def test_bad_options_raise_config_errors(word, options):
    given = {"agent": ask, "grader": share_of_a, "tasks": TASKS, "progress": False} | options
    with pytest.raises(ConfigError, match=word):
        penstock.train(**given)
    assert not Path("runs/run").exists()


def test_tasks_that_are_no_json_are_rejected():
    with pytest.raises(DatasetError, match="JSON"):
        penstock.evaluate(ask, share_of_a, [{"prompt": object()}], progress=False)


def test_submodules_can_be_imported_after_a_call():
    assert importlib.import_module("penstock.train.loop").train_steps
    assert callable(penstock.train)


SCRIPT = """
import sys, penstock
sys.path.insert(0, {folder!r})
from api_agent import ask, share_of_a

tasks = [{{"prompt": "Say " + str(number)}} for number in range(4)]
summary = penstock.train(ask, share_of_a, tasks, model="tiny", train={{"steps": {steps}}}, sampling={{"max_tokens": 8}},
                         rollout={{"group_size": 2, "groups_per_step": 1}})
print(summary.status, summary.steps)
"""


def test_interrupted_script_stops_and_resumes(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(folder=str(Path(__file__).parent), steps=500))
    process = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    timer = threading.Timer(100, process.kill)
    timer.start()
    lines = iter(process.stderr.readline, "")
    assert any(line.startswith("step 2/500") or "step   2/500" in line for line in lines)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate()
    timer.cancel()
    assert process.returncode == 0, err
    assert out.startswith("stopped")
    done = int(out.split()[1])
    script.write_text(SCRIPT.format(folder=str(Path(__file__).parent), steps=done + 1))
    again = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=100)
    assert again.stdout == f"finished {done + 1}\n", again.stderr


CELLS = [
    """
import penstock
from penstock.api import QuietView, WorkThread

class Ask(penstock.AgentWorkflow):
    async def run(self, ctx):
        await ctx.openai().chat.completions.create(model="policy", messages=ctx.prompt)

def length(ctx):
    return len(ctx.sample.text) / 100

tasks = [{"prompt": f"Say {number}"} for number in range(4)]
options = dict(model="tiny", sampling={"max_tokens": 8}, rollout={"group_size": 2, "groups_per_step": 2})
""",
    'penstock.train(Ask, length, tasks, train={"steps": 2}, **options)',
    'penstock.load_run("runs/run").metrics().to_pandas().shape[0]',
    "print(penstock.evaluate(Ask, length, tasks, **options).status)",
]


def test_train_and_evaluate_in_a_jupyter_kernel(tmp_path):
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in CELLS])
    kernel = {
        "argv": [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"],
        "display_name": "here",
        "language": "python",
    }
    (tmp_path / "kernels" / "here").mkdir(parents=True)
    (tmp_path / "kernels" / "here" / "kernel.json").write_bytes(orjson.dumps(kernel))
    client = nbclient.NotebookClient(notebook, timeout=120, kernel_name="here", resources={"metadata": {"path": str(tmp_path)}})
    client.create_kernel_manager()
    client.km.kernel_spec_manager.kernel_dirs.append(str(tmp_path / "kernels"))
    client.execute()
    trained, rows, evaluated = (cell.outputs for cell in notebook.cells[1:])
    page = next(output.data["text/html"] for output in trained if output.output_type == "display_data")
    assert "2/2" in page
    assert "finished" in str(trained)
    assert rows[-1].data["text/plain"] == "2"
    assert "finished" in str(evaluated)


class Interrupted(QuietView):
    """Interrupts the thread that waits, as a notebook's kernel does."""

    def __init__(self, times: int) -> None:
        self.left, self.announced = times, 0

    def refresh(self):
        self.left -= 1
        if self.left >= 0:
            raise KeyboardInterrupt

    def announce_stop(self):
        self.announced += 1


async def until_stopped(stop: asyncio.Event) -> str:
    await stop.wait()
    return "stopped"


async def forever(stop: asyncio.Event) -> str:
    await asyncio.Event().wait()
    return "never"


def test_first_interrupt_stops_and_second_cancels():
    view = Interrupted(1)
    assert WorkThread(until_stopped).wait(view) == "stopped"
    assert view.announced == 1
    with pytest.raises(KeyboardInterrupt):
        WorkThread(forever).wait(Interrupted(2))
