from cheats import LABEL

from penstock import Grader


class Nothing(Grader):
    """Has the label, and gives nobody a reward."""

    async def grade(self, ctx):
        assert ctx.label == LABEL
        return 0.0
