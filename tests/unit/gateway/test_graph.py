import pytest

from penstock.chat.templates import chain_digest, message_digest
from penstock.gateway.graph import HISTORY_EDITED, REPLY_EDITED, TOOLS_CHANGED, TokenGraph, prompts
from penstock.gateway.request import LastRequest
from penstock.records import Node, Rollout, Sampling, Step, make_rollout

ROLLOUT = make_rollout("train-0", "t", 0)
ASK = {"role": "user", "content": "ask"}
MORE = {"role": "user", "content": "more"}
TOOL = {"type": "function", "function": {"name": "f"}}


def said(text):
    return {"role": "assistant", "content": text}


class Scene:
    """Builds a rollout call by call, as the recorder would; tokens are counted up so that none occurs twice."""

    def __init__(self):
        self.graph = TokenGraph(Rollout(ref=ROLLOUT))
        self.next_token = 0

    def call(self, messages, reply, *, tools=(), finish="stop"):
        place = self.match(messages, tools)
        new = tuple(messages[place.known :])
        same = [n for n in self.graph.nodes.values() if n.messages_digest == place.chain and n.parent == place.step]
        node = same[0] if same else self._node(place, new, tools)
        step = Step(
            rollout_id=ROLLOUT.id,
            index=self.graph.next_step,
            node=node.id,
            transcript="main",
            completion_ids=self._tokens(2),
            logprobs=(-1.0, -1.0),
            versions=(0, 0),
            sampling=Sampling(),
            finish=finish,
            message=said(reply),
            messages_digest=chain_digest(place.chain, message_digest(said(reply))),
        )
        self.graph.add(step, None if same else node)
        return step

    def match(self, messages, tools=()):
        return self.graph.match(messages, LastRequest().chains(messages, tuple(tools)))

    def attempt(self):
        return Rollout(ref=ROLLOUT, nodes=tuple(self.graph.nodes.values()), steps=tuple(self.graph.steps.values()))

    def _node(self, place, new, tools):
        tokens = self._tokens(3)
        return Node(
            rollout_id=ROLLOUT.id,
            id=self.graph.next_node,
            parent=place.step,
            token_ids=tokens,
            messages_digest=place.chain,
            messages=new,
            tools=tuple(tools) if place.step is None else (),
            reason=place.reason,
        )

    def _tokens(self, count):
        start, self.next_token = self.next_token, self.next_token + count
        return tuple(range(start, start + count))


@pytest.fixture
def scene():
    return Scene()


def test_a_first_call_opens_a_root(scene):
    place = scene.match([ASK])
    assert (place.step, place.known, place.reason) == (None, 0, None)


def test_second_turn_continues_from_reply(scene):
    scene.call([ASK], "one")
    place = scene.match([ASK, said("one"), MORE])
    assert (place.step, place.known) == (0, 2)
    assert scene.graph.context(place.step) == (0, 1, 2, 3, 4)


def test_prompts_are_read_off_the_path(scene):
    scene.call([ASK], "one")
    scene.call([ASK, said("one"), MORE], "two")
    scene.call([ASK, said("one"), MORE, said("two"), MORE], "three")
    assert prompts(scene.attempt()) == {0: (0, 1, 2), 1: tuple(range(8)), 2: tuple(range(13))}


def test_two_replies_to_one_prompt_share_its_node(scene):
    scene.call([ASK], "one")
    scene.call([ASK], "two")
    assert len(scene.graph.nodes) == 1
    assert scene.match([ASK, said("one"), MORE]).step == 0
    assert scene.match([ASK, said("two"), MORE]).step == 1


def test_of_two_equal_replies_the_last_whole_one_continues(scene):
    scene.call([ASK], "same")
    scene.call([ASK], "same")
    scene.call([ASK], "same", finish="cancelled")
    assert scene.match([ASK, said("same"), MORE]).step == 1


def test_broken_reply_continues_where_there_is_no_other(scene):
    scene.call([ASK], "half", finish="cancelled")
    assert scene.match([ASK, said("half"), MORE]).step == 0


def test_a_branch_leaves_the_path_where_it_differs(scene):
    scene.call([ASK], "one")
    scene.call([ASK, said("one"), MORE], "two")
    place = scene.match([ASK, said("one"), ASK])
    assert (place.step, place.known) == (0, 2)


def test_edited_reply_later_on_is_rendered_after_known_part(scene):
    scene.call([ASK], "one")
    scene.call([ASK, said("one"), MORE], "two")
    place = scene.match([ASK, said("one"), MORE, said("TWO"), MORE])
    assert (place.step, place.known, place.reason) == (0, 2, REPLY_EDITED)


def test_a_fresh_conversation_breaks_nothing(scene):
    scene.call([ASK], "one")
    assert scene.match([MORE]).reason is None
    assert scene.match([MORE, said("a worked example"), ASK]).reason is None


@pytest.mark.parametrize(
    ("messages", "tools", "reason"),
    [
        ([MORE, said("one"), MORE], (), HISTORY_EDITED),
        ([ASK, said("ONE"), MORE], (), REPLY_EDITED),
        ([ASK, said("one"), MORE], (TOOL,), TOOLS_CHANGED),
    ],
)
def test_a_root_that_breaks_a_path_says_why(scene, messages, tools, reason):
    scene.call([ASK], "one")
    place = scene.match(messages, tools)
    assert (place.step, place.reason) == (None, reason)


def test_calls_with_and_without_tools_in_turns_change_tools_only(scene):
    scene.call([ASK], "one", tools=(TOOL,))
    scene.call([ASK, said("one"), MORE], "two")
    third = [ASK, said("one"), MORE, said("two"), ASK]
    assert scene.match(third, (TOOL,)).reason == TOOLS_CHANGED
    scene.call(third, "three", tools=(TOOL,))
    assert scene.match([*third, said("three"), MORE]).reason == TOOLS_CHANGED
    assert scene.match([MORE, *third[1:], said("three"), MORE]).reason == HISTORY_EDITED


def test_tools_that_are_dropped_on_the_way_are_named(scene):
    scene.call([ASK], "one", tools=(TOOL,))
    scene.call([ASK, said("one"), MORE], "two", tools=(TOOL,))
    assert scene.match([ASK, said("one"), MORE, said("two"), MORE]).reason == TOOLS_CHANGED


def test_node_is_shared_only_by_same_tokens_in_same_place(scene):
    scene.call([ASK], "one")
    node = scene.graph.nodes[0]
    assert scene.graph.find(None, node.messages_digest, [0, 1, 2]) == node
    assert scene.graph.find(None, node.messages_digest, [0, 1, 3]) is None
    assert scene.graph.find(0, node.messages_digest, [0, 1, 2]) is None
    assert scene.graph.find(None, "elsewhere", [0, 1, 2]) is None


def test_a_graph_read_from_the_pool_is_the_same_graph(scene):
    scene.call([ASK], "one")
    scene.call([ASK, said("one"), MORE], "two")
    scene.call([MORE], "sub-agent")
    again = TokenGraph(scene.attempt())
    assert (again.next_node, again.next_step) == (3, 3)
    for messages in ([ASK, said("one"), ASK], [MORE, said("sub-agent"), ASK], [ASK, said("x"), MORE]):
        chains = LastRequest().chains(messages, ())
        assert again.match(messages, chains) == scene.graph.match(messages, chains)
