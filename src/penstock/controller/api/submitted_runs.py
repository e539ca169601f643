"""The controller's runs as a source for the dashboard."""

from typing import get_args

from penstock.controller.home import Home
from penstock.controller.runs import Run, RunFiles, RunKind, RunQueue
from penstock.errors import ControllerError
from penstock.view.run_files import is_run
from penstock.view.sources import MAX_RUNS, RunPlace, unknown_run


class SubmittedRuns:
    """The newest runs that have started, whoever submitted them: each token sees them in the API too."""

    def __init__(self, queue: RunQueue, home: Home) -> None:
        self._queue, self._home = queue, home

    def places(self) -> list[RunPlace]:
        kinds: tuple[RunKind, ...] = get_args(RunKind)
        found = [run for kind in kinds for run in self._queue.page(kind, limit=MAX_RUNS // 2, offset=0)[0]]
        return [place for run in found if is_run((place := self._place(run)).path)]

    def find(self, run_id: str) -> RunPlace:
        kinds: tuple[RunKind, ...] = get_args(RunKind)
        for kind in kinds:
            try:
                place = self._place(self._queue.get(kind, run_id))
            except ControllerError:
                continue
            if place.id == run_id and is_run(place.path):
                return place
        raise unknown_run(run_id)

    def _place(self, run: Run) -> RunPlace:
        folder = RunFiles(self._home.runs / run.id).results(run)
        return RunPlace(run.id, folder, {"name": run.name, "status": str(run.status)}, is_ours=False)
