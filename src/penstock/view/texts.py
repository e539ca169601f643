"""Texts of the dashboard: reasons in words, and long values cut to a bounded size."""

from typing import Any, cast

MAX_TEXT = 20_000
"""Characters of one string; more is cut, with a note."""
MAX_ITEMS = 500
"""Entries of one list or object."""
MAX_DEPTH = 12

REASONS = {
    "zero_advantage": "its reward is the group's mean: nothing to learn from",
    "groups_equal": "all rewards of the group are the same: nothing to learn from",
    "ungraded": "the rollout has no reward",
    "behaviour_unknown": "the engine did not tell with which probability it sampled: see train.unknown_logprobs",
    "curated": "a curator took it out",
    "picture_in_context": "sampled after a picture, which the trainer cannot see",
    "relayed": "an endpoint gave it as text: its tokens were never seen here",
    "empty": "no token was sampled",
    "greedy": "sampled at temperature 0: there is no choice to learn from",
    "cancelled": "the call was cancelled before it ended",
    "error": "the call ended with an error",
    "context_missing": "what came before it is not recorded",
    "context_flawed": "what came before it has a flaw",
    "context_differs": "its recorded context has another digest than the one that the engine saw",
    "bad_token": "a token id is impossible",
    "bad_logprob": "a log-probability is impossible",
    "bad_version": "a policy version is impossible",
    "misaligned": "tokens, log-probabilities and versions differ in number",
    "constrained": "its tokens were not chosen from all, and the trainer cannot tell from which",
    "grammar_unknown": "its grammar cannot be compiled here, so the tokens that it allowed are not known",
    "not_allowed": "a token is not one that its grammar allows",
    "left_out": "the trainer did not record it with what it trained, such as a reply whose choices cannot be replayed",
    "not_trained": "its group has not been trained",
    "stale": "its tokens were too old",
    "history_edited": "the caller changed earlier messages: they were rendered again, as a new branch",
    "reply_edited": "the caller sent a reply that was not sampled",
    "tools_changed": "the caller changed the tools: all was rendered again",
    "template_rewrites_history": "the chat template writes earlier messages differently: all was rendered again",
}
"""Why tokens were not trained, or groups dropped."""
ENDS = {
    "agent_error": "the agent raised an error, or made no model call",
    "timeout": "it ran longer than rollout.agent_timeout_s, or its group than rollout.group_timeout_s",
    "cancelled": "the run was stopped; its place got a new attempt",
    "lost": "the process died; its place got a new attempt",
    "engine_error": "the engine failed a call",
    "grader_error": "the grader raised, ran too long, or gave no finite reward",
    "refused": "a runner elsewhere would not take it",
    "superseded": "a runner elsewhere gave up on it for another attempt",
    "branch_diverged": "a branch whose program did not repeat the recorded requests",
}
NOTICES = {
    "finish:length": "the reply was cut at its limit of tokens",
    "capped:max_tokens": "asked for more tokens than sampling.max_tokens",
}
MEANINGS = {"ends": ENDS, "notices": NOTICES}
"""By kind of loss; the others have theirs in `REASONS`."""


def cut(value: Any, most: int = MAX_TEXT, depth: int = MAX_DEPTH) -> Any:
    """Returns JSON values with long texts and lists cut. What is left out is said in place."""
    if isinstance(value, str):
        return value if len(value) <= most else f"{value[:most]}… ({len(value) - most:,} more characters)"
    if isinstance(value, dict):
        if depth == 0:
            return "…"
        pairs = list(cast("dict[str, Any]", value).items())
        shown = {cut(str(key), 200): cut(item, most, depth - 1) for key, item in pairs[:MAX_ITEMS]}
        return shown | ({"…": f"{len(pairs) - MAX_ITEMS:,} more"} if len(pairs) > MAX_ITEMS else {})
    if isinstance(value, list | tuple):
        items = cast("list[Any]", value)
        if depth == 0:
            return "…"
        more = [f"… {len(items) - MAX_ITEMS:,} more"] if len(items) > MAX_ITEMS else []
        return [cut(item, most, depth - 1) for item in items[:MAX_ITEMS]] + more
    return value
