"""The records of the flow, in the order in which they come to be.

    Task ──▶ RolloutRef ──▶ Node, Step (token graph) ──▶ Grade, Mark ──▶ Rollout ──▶ Group ──▶ Sequence ──▶ PolicyVersion

Each is made in one file: Task in `sdk/dataset`, RolloutRef in `rollout/scheduler`, Node and Step in `gateway/recorder`, Grade in
`rollout/runner`, Mark by a curator, Group in `pool`, Sequence in `train/sequences`, PolicyVersion in `train/policy`. All are
frozen; `codec` alone writes them out and reads them back.
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, Literal

NO_LIMIT = 2**31 - 1
"""`Sampling.max_tokens` of a reply that nobody limits: it may fill the model's context."""
BEHAVIOUR_UNKNOWN = "behaviour_unknown"
"""Why a step is masked whose `behaviour_known` is False; see `train.unknown_logprobs`."""
Message = dict[str, Any]
"""One chat message in the OpenAI form: role, content, tool_calls, tool_call_id."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One dataset row: what an agent is asked, and what only its grader may see."""

    id: str
    prompt: tuple[Message, ...]
    label: str | None = None
    metadata: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BranchPoint:
    """Where a branch leaves a recorded rollout: calls before this step get the recorded replies, later ones are sampled."""

    rollout_id: str
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutRef:
    """Names one attempt at a task. A lost rollout is replaced by one with the same place and the next attempt number."""

    id: str
    group_id: str
    task_id: str
    place: int
    """Its place in the group, 0-based: the same for every attempt at it."""
    attempt: int = 1
    channel: str = "train"
    branch: BranchPoint | None = None
    """The recorded rollout that it repeats at first; None for one that is sampled from its first call on."""

    @property
    def successor(self) -> "RolloutRef":
        """The next attempt at the same place."""
        again = self.attempt + 1
        return make_rollout(self.group_id, self.task_id, self.place, attempt=again, channel=self.channel, branch=self.branch)


def make_rollout(
    group_id: str, task_id: str, place: int, *, attempt: int = 1, channel: str = "train", branch: BranchPoint | None = None
) -> RolloutRef:
    """Make a rollout with the id `group.place.attempt`."""
    name = f"{group_id}.{place}.{attempt}"
    return RolloutRef(id=name, group_id=group_id, task_id=task_id, place=place, attempt=attempt, channel=channel, branch=branch)


class End(StrEnum):
    """How a rollout ended: exactly one of these, once."""

    COMPLETED = "completed"
    AGENT_ERROR = "agent_error"
    TIMEOUT = "timeout"
    CANCELLED = "cancelled"
    LOST = "lost"
    ENGINE_ERROR = "engine_error"
    GRADER_ERROR = "grader_error"
    REFUSED = "refused"
    SUPERSEDED = "superseded"
    BRANCH_DIVERGED = "branch_diverged"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplyFormat:
    """JSON that a caller asks for as the whole reply."""

    schema: dict[str, Any] | None = None
    """JSON schema; None for any object."""
    name: str = "reply"
    description: str = ""
    strict: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplyGrammar:
    """What a reply may consist of: at each token, those that the grammar does not allow have probability 0."""

    lark: str
    """The grammar's source, in the Lark form of llguidance. It begins where the reply's tokens begin."""
    schema: str = ""
    """The JSON schema that says the same, for servers that take no grammar; empty if none does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How the engine is to sample one reply."""

    max_tokens: int = 256
    temperature: float = 1.0
    """0 is greedy; its tokens are recorded but never trained."""
    top_p: float = 1.0
    top_k: int = 0
    """0 keeps every token."""
    min_p: float = 0.0
    stop_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    """Strings; the tokens that complete one are kept in the record and cut from the text."""
    seed: int | None = None
    grammar: ReplyGrammar | None = None
    """None: every token is allowed."""
    banned_ids: tuple[int, ...] = ()
    """Tokens with probability 0: those with a `logit_bias` of -100."""
    only_ids: tuple[int, ...] = ()
    """If there are any, all others have probability 0: those with a `logit_bias` of 100."""
    top_logprobs: int = 0
    """How many of the most likely tokens are reported with each sampled one."""

    @property
    def truncated(self) -> bool:
        """Whether some tokens could not be sampled at all."""
        return self.top_p < 1.0 or self.top_k > 0 or self.min_p > 0.0

    @property
    def biased(self) -> bool:
        """Whether its caller leaves out tokens by their ids."""
        return bool(self.banned_ids or self.only_ids)


MAX_TOP_LOGPROBS = 20

TokenLogprobs = tuple[tuple[int, float], ...]
"""Token ids with their log-probabilities under the untempered, untruncated distribution, the most likely first."""

Finish = Literal["stop", "length", "cancelled", "error"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Token counts of a call, as reported by an endpoint that returns text only; 0 if it reported none."""

    prompt_tokens: int
    completion_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedPicture:
    """A picture in a prompt, and the tokens that stand for it there."""

    digest: str
    """SHA-256 of its bytes, in hexadecimal; they lie under this name in the folder `pictures` next to the pool."""
    media_type: str
    first: int
    """Where its tokens begin, in those of the node or of the whole prompt."""
    size: int
    """How many tokens stand for it."""
    token: int
    """The token that the chat template writes in its place, before a server puts in the others."""

    def moved(self, by: int) -> "PlacedPicture":
        return replace(self, first=self.first + by)


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """What a caller's messages add to a path of the token graph: glue after the last reply, messages, generation prompt.

    A path alternates nodes and steps: node, step (the reply), node (the next messages), step, …
    """

    rollout_id: str
    id: int
    parent: int | None
    """Index of the step that it continues; None for a root, rendered from scratch."""
    token_ids: tuple[int, ...]
    messages_digest: str
    """Digest of all messages on the path up to here: what a later call is matched by."""
    messages: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...] = ()
    """Tool schemas, on a root only: they are the same along a path."""
    reason: str | None = None
    """Why the rollout's earlier tokens could not continue here: a new root, or a branch with a reply that was not sampled;
    None where nothing broke."""
    pictures: tuple[PlacedPicture, ...] = ()
    """What the engine saw in place of some of `token_ids`, in their order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One model call, as the engine saw it. Tokens are recorded, never re-derived from text."""

    rollout_id: str
    index: int
    node: int
    """The node whose path is this call's prompt."""
    transcript: str
    completion_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    """Of `completion_ids`, under the distribution that they were sampled from; same length."""
    full_logprobs: tuple[float, ...] | None = None
    """The same under the untempered, untruncated distribution; None where the two are the same, or the engine does not report it.

    Tokens that the grammar or the caller does not allow are left out of both."""
    behaviour_known: bool = True
    """False: the engine reported plain log-probabilities only. `logprobs` then holds these, not those that it sampled with."""
    versions: tuple[int, ...]
    """Per token: the policy version that the engine served, not the one the caller hoped for."""
    sampling: Sampling
    finish: Finish
    message: Message
    """The assistant message as the agent saw it."""
    messages_digest: str
    """Digest of all messages on the path, this reply included."""
    seconds: float = 0.0
    answer: str = ""
    """Names the answer that it was a choice of: the digest of the request, a dash, and how often that had been sampled before."""
    created: float = 0.0
    """When the answer began, in seconds since 1970: a label, never compared."""
    choice: int = 0
    """Which choice of the answer it is, 0-based."""
    context_digest: str = ""
    """Digest of the token ids that the engine saw and sampled, from the first of the prompt to the last of the reply."""
    usage: Usage | None = None
    """Token counts of a reply that came as text: it has no token ids and is never trained. None where tokens are recorded."""
    policy: str = ""
    """The policy that was asked, of those in `[policies.*]`; empty in a run without them."""
    kept: tuple[bytes, ...] = ()
    """Per token: those that top-k, top-p and min-p left to choose from, as `engines.token_sets` packs them.

    Empty where nothing was truncated, and for a greedy reply, or if the engine does not report it."""
    most_likely: tuple[TokenLogprobs, ...] = ()
    """Per token: the `sampling.top_logprobs` most likely ones in its place. Empty if none were asked for, or the engine
    does not report them."""
    replayed: bool = False
    """Whether it repeats a step of the rollout that this one is a branch of. It is never trained."""

    @property
    def limited(self) -> bool:
        """Whether its tokens were chosen from a known part of the vocabulary."""
        return self.sampling.grammar is not None or self.sampling.biased or bool(self.kept)

    @property
    def sampled(self) -> int:
        """How many tokens the reply has."""
        return len(self.completion_ids) if self.usage is None else self.usage.completion_tokens


MAX_REWARD = 1e9
"""The largest reward, and with a minus the smallest. Gradients grow with it, and their squares must fit into 32-bit floats."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Grade:
    """A reward and where it came from."""

    rollout_id: str
    reward: float
    source: str
    transcript: str | None = None
    """None: the reward is for the whole rollout."""
    step: int | None = None
    components: dict[str, float] = field(default_factory=dict[str, float])
    """Named parts of the reward, which includes their sum; only in a grade of the whole rollout."""


ADHOC_CHANNEL = "adhoc"
"""The channel of rollouts that no scheduler opened, such as those of `penstock run`."""
VOID = "void: not graded by the run"
"""The note of a mark on a rollout that something else than the run's runner has graded or ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """A curator's judgement of a rollout or of one of its steps; the last one counts."""

    rollout_id: str
    step: int | None = None
    """None: the mark is for the whole rollout."""
    trainable: bool = True
    quality: float = 1.0
    """Weight in the loss, 0 or more; 1 leaves it as it is."""
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """One attempt at a task, with everything recorded of it."""

    ref: RolloutRef
    end: End | None = None
    """None while it runs."""
    message: str = ""
    nodes: tuple[Node, ...] = ()
    steps: tuple[Step, ...] = ()
    grades: tuple[Grade, ...] = ()
    marks: tuple[Mark, ...] = ()
    """At most one for the rollout and one for each step."""

    @property
    def void(self) -> bool:
        """Whether it was graded or ended by something else than the run's grader, and must not count."""
        return any(mark.step is None and mark.note == VOID for mark in self.marks)

    @property
    def curated_out(self) -> bool:
        """Whether a curator took the whole rollout out of training."""
        return any(mark.step is None and not mark.trainable for mark in self.marks)

    @property
    def reward(self) -> float | None:
        """The rollout's own grade, else the mean over its transcripts, else the sum over its steps.

        None unless completed, if void, and for a reward beyond MAX_REWARD.
        """
        reward = self.grades_total if self.end is End.COMPLETED and not self.void else None
        return None if reward is None or abs(reward) > MAX_REWARD else reward

    @property
    def components(self) -> dict[str, float]:
        """The named parts of the rollout's own grade; empty without a reward."""
        whole = [g for g in self.grades if g.transcript is None and g.step is None]
        return whole[-1].components if whole and self.reward is not None else {}

    @property
    def grades_total(self) -> float | None:
        """What its grades come to, however it ended; None without grades."""
        return total_reward(self.grades)


def total_reward(grades: Seq[Grade]) -> float | None:
    whole = [g.reward for g in grades if g.transcript is None and g.step is None]
    parts = [g.reward for g in grades if g.transcript is not None and g.step is None]
    if whole:
        return whole[-1]
    if parts:
        return sum(parts) / len(parts)
    return sum(g.reward for g in grades) if grades else None


def component_means(attempts: Seq[Rollout]) -> dict[str, float]:
    """The mean of each named part of the reward over graded attempts; one that lacks a part counts as 0 there."""
    graded = [attempt.components for attempt in attempts if attempt.reward is not None]
    names = dict.fromkeys(name for parts in graded for name in parts)
    return {name: sum(parts.get(name, 0.0) for parts in graded) / len(graded) for name in names}


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """All attempts at one task that count: per place the last one."""

    id: str
    seq: int
    """Its number in the channel: groups are made, claimed and trained in this order."""
    task: Task
    channel: str
    rollouts: tuple[Rollout, ...]
    branches: tuple[Rollout, ...] = ()
    """Continuations from steps of its attempts (`Rollout.branch`), where the advantage asks for them; they are never trained."""

    @property
    def graded(self) -> tuple[Rollout, ...]:
        """The attempts that a baseline may count: completed, with a reward, and not taken out by a curator."""
        return tuple(a for a in self.rollouts if a.reward is not None and not a.curated_out)

    @property
    def rewards(self) -> list[float]:
        """The rewards of `graded`, in the same order."""
        return [a.reward for a in self.graded if a.reward is not None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """Groups that a trainer holds until it acknowledges them or the lease expires."""

    id: str
    groups: tuple[Group, ...]
    stale: int = 0
    """How many complete groups were dropped on the way because their tokens were too old."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sequence:
    """One training sequence: a path of the token graph with the credit of its sampled tokens."""

    rollout_id: str
    group_id: str
    token_ids: tuple[int, ...]
    trained: tuple[bool, ...]
    """Per token: whether it was sampled and carries credit here. A reply on several paths is trained on one of them."""
    logprobs: tuple[float, ...]
    """Per token: the engine's, under the distribution sampled from; 0 where not trained or `recomputed`."""
    temperatures: tuple[float, ...]
    """Per token: that it was sampled at; 1 where not trained."""
    advantages: tuple[float, ...]
    """Per token; 0 where not trained."""
    weight: float
    """The weight of each trained token in the loss: rollouts weigh the same, however many sequences they made."""
    versions: tuple[int, ...] = field(default=())
    """Per token: the policy version that sampled it; -1 where not trained."""
    steps: tuple[int, ...] = field(default=())
    """Per token: the step that sampled it; -1 where not trained."""
    recomputed: tuple[bool, ...] = ()
    """Per token: whether its log-probability is unknown, so that the learner uses its own; empty if all are known."""
    allowed: tuple[bytes, ...] = ()
    """Per token: the tokens that it was chosen from, as `engines.token_sets` packs them; empty if these are all.

    Empty as a whole if no token's choice was limited."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyVersion:
    """Numbered weights, saved with the leases that made them."""

    number: int
    step: int
    """How many steps of training led to it."""
    leases: tuple[str, ...] = ()
    """Leases trained since the checkpoint before; acknowledged once this one is on disk."""
    past: tuple[int, ...] = ()
    """The versions after each of the last steps, this one included; empty in older checkpoints."""
