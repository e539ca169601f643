"""The files of a rollout in a workspace, as they are written: code from the examples, and what surrounds it."""

from importlib import metadata
from pathlib import Path

from penstock.workspace.layout import DATASETS, EVALS, ROLLOUTS, TRAININGS

EXAMPLES = Path(__file__).parent.parent / "templates"
"""The project's examples, wherever penstock is installed."""

EXPERIMENT = """\
[experiment]
rollout = "{name}"            # folder under rollouts/
entrypoint = "main.py"
model_path = "smollm2-135m"   # or hf:ORG/NAME, a folder, a checkpoint{endpoints}
dataset = "{name}"            # data/{name}.jsonl, or one that was uploaded
"""
EVALUATION = """\
# Measures the rollout: penstock eval run configs/eval/{name}.toml

{experiment}
[evaluation]
limit = 32                    # rows, from the first on
n = 1                         # attempts at each
batch_size = 32               # rollouts at once
pass_threshold = 1.0

[secrets]
required = []                 # names of secrets that the agent needs in its environment

[advanced.sampling]           # any key of penstock's own config may stand under [advanced]
max_tokens = 40
"""
TRAINING = """\
# Trains the policy: penstock train configs/training/{name}.toml

{experiment}
[training]
lr = 2e-5
total_epochs = 1
n_samples_per_prompt = 8      # attempts at each row: they are compared with each other
rollout_batch_size = 4        # rows in each step
max_response_length = 40      # tokens of one reply

[sampling]
rollout_temperature = 1.0

[checkpoints]
checkpoint_save_freq = 4      # steps; each is 1.6 GB

[advanced.train]
steps = 8                     # in place of whole epochs: this is where it has learnt the tool
"""
PROJECT = """\
[project]
name = "{name}"
version = "0.1.0"
requires-python = ">=3.11"
dependencies = ["penstock[{extras}]>={version}"]
"""
README = """\
# {name}

{about}. It runs as it is, with a small model that this machine runs by itself:

```
penstock eval run {evals}/{name}.toml
penstock train {trainings}/{name}.toml
```

| file | what it holds |
|---|---|
| `main.py` | the agent (one AgentWorkflow) and how it is graded (one Grader) |
| `../../{evals}/{name}.toml` | how it is measured |
| `../../{trainings}/{name}.toml` | how it is trained |
| `../../{datasets}/{name}.jsonl` | the tasks: `user_prompt`, `ground_truth`; also `system_prompt` and `metadata` |

Change `main.py` and the tasks into yours. `--dry-run` checks everything and tries one rollout; `penstock eval submit` and
`penstock train submit` hand the same files to a controller.
"""
IGNORED = "runs/\n.penstock/\n__pycache__/\n.venv/\n"


def example(path: str) -> str:
    """An example's file."""
    return (EXAMPLES / path).read_text(encoding="utf-8")


def rollout_files(name: str, *, about: str, code: dict[str, str], extras: str = "local") -> dict[str, str]:
    """What a rollout consists of, by path from the workspace; `code` are the examples that its Python files are copies of."""
    folder = f"{ROLLOUTS}/{name}"
    told = {"evals": EVALS, "trainings": TRAININGS, "datasets": DATASETS, "name": name}
    evaluated = EXPERIMENT.format(name=name, endpoints=", openai/NAME")
    trained = EXPERIMENT.format(name=name, endpoints="")
    return {
        **{f"{folder}/{file}": example(original) for file, original in code.items()},
        f"{folder}/pyproject.toml": PROJECT.format(name=name, extras=extras, version=metadata.version("penstock")),
        f"{folder}/README.md": README.format(about=about, **told),
        f"{EVALS}/{name}.toml": EVALUATION.format(name=name, experiment=evaluated),
        f"{TRAININGS}/{name}.toml": TRAINING.format(name=name, experiment=trained),
        f"{DATASETS}/{name}.jsonl": example("multiply/tasks.jsonl"),
    }
