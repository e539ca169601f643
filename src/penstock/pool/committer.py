"""What waits becomes one transaction, and what is alike in it few statements; one that fails does not take its neighbours along."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import groupby

from penstock.pool.database import Database
from penstock.pool.jobs import Job

Explain = Callable[[Exception], Exception]

TOGETHER = 64
"""How many writes one commit and one statement may carry. Their SQL differs by number, and SQLite remembers a limited number of
statements; and the pages of many more would not fit into its cache, from where they go to the file twice."""


class Committer:
    """Carries out batches on a connection, in one thread. `explain` turns what the database raises into what callers see."""

    def __init__(self, database: Database, explain: Explain) -> None:
        self._database = database
        self._explain = explain

    def commit(self, batch: Sequence[Job]) -> bool:
        """Write the batch, each job with its result or error; False where no transaction could be begun."""
        try:
            self._database.begin()
        except self._database.ERRORS as cause:
            self._fail(batch, cause)
            return False
        try:
            for alike in _runs(batch):
                if not self._carry_out_together(alike, alone=len(alike) == len(batch)):
                    for job in alike:
                        self._carry_out(job)
            self._database.execute("COMMIT")
        except Exception as cause:
            with suppress(*self._database.ERRORS):  # where the connection broke just now, there is nothing left to undo
                if self._database.in_transaction:
                    self._database.execute("ROLLBACK")
            self._retry(batch, cause)
        return True

    def close(self) -> None:
        """Let go of the connection."""
        self._database.close()

    def _carry_out_together(self, jobs: list[Job], *, alone: bool) -> bool:
        """Writes of one kind; False, and nothing changed, where one of them needs care. `alone` they are the whole transaction."""
        bulk = jobs[0].bulk
        if bulk is None:
            return False
        if not alone:
            self._database.execute("SAVEPOINT many")
        try:
            done = bulk.together(self._database, [job.value for job in jobs])
        except self._database.ERRORS:
            if not self._database.in_transaction:
                raise
            done = False
        if alone and not done:
            self._database.execute("ROLLBACK")
            self._database.begin()
        if not alone and not done:
            self._database.execute("ROLLBACK TO many")
        if not alone:
            self._database.execute("RELEASE many")
        for job in jobs if done else ():
            job.result = bulk.result
        return done

    def _carry_out(self, job: Job) -> None:
        """One write, alone in a savepoint: if it fails, its neighbours do not."""
        self._database.execute("SAVEPOINT one")
        try:
            job.result, job.error = job.carry_out(self._database), None
        except Exception as cause:
            if not self._database.in_transaction:  # SQLite gave up the whole transaction, the neighbours' writes included
                raise
            self._database.execute("ROLLBACK TO one")
            job.error = self._explain(cause)
        self._database.execute("RELEASE one")

    def _retry(self, batch: Sequence[Job], cause: Exception) -> None:
        """The transaction came to nothing: what can be written alone is."""
        if len(batch) == 1:
            self._fail(batch, cause)
            return
        for place, job in enumerate(batch):
            job.error = None
            if not self.commit([job]):  # nor will the others be able to, and each would wait as long
                self._fail(batch[place + 1 :], cause)
                return

    def _fail(self, batch: Sequence[Job], cause: Exception) -> None:
        for job in batch:
            job.error = self._explain(cause)


def _runs(batch: Sequence[Job]) -> Iterator[list[Job]]:
    """The batch cut into runs that can be written together; a write that cannot be stays after those that came before it."""
    for plain, jobs in groupby(batch, key=lambda job: job.bulk is None):
        if plain:
            yield from ([job] for job in jobs)
        else:
            ordered = sorted(jobs, key=lambda job: bool(job.bulk and job.bulk.last))
            yield from (list(alike) for _, alike in groupby(ordered, key=lambda job: job.bulk and job.bulk.name))
