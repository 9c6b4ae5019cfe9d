"""How many forward passes and tokens each member runs, exactly."""

from __future__ import annotations

import gc

import pytest
import torch
from support.cases import PROMPTS, Case, counts, random_case
from support.tiny import TOKENIZERS, tiny_model
from support.toys import run, toy, word_tokenizer

from hf_adafuse import AdaFuseConfig
from hf_adafuse.decoding.proposer import Proposer
from hf_adafuse.decoding.span_round import SpanRound
from hf_adafuse.members.member import Member
from hf_adafuse.members.passes import Pass
from hf_adafuse.trees.backend_probe import choose_backend
from hf_adafuse.trees.nodes import Node
from hf_adafuse.trees.pass_policy import Policy
from hf_adafuse.trees.tree_attention_backend import TreeAttentionBackend

pytestmark = pytest.mark.fast


def test_a_round_by_hand():
    """Words are one token each; the prompt is two tokens. One line per pass, with the nodes it runs."""
    tokenizer = word_tokenizer(["So", "It", "is", "was", "red"])
    end = {"red": {"</s>": 0.99}}
    main = toy(tokenizer, {"It": {"is": 0.5, "was": 0.4}, "is": {"red": 0.9}, "was": {"red": 0.99}} | end)
    other = toy(tokenizer, {"It": {"is": 0.05, "was": 0.9}, "is": {"red": 0.9}, "was": {"red": 0.99}} | end)
    choose_backend(main, torch.device("cpu"))
    assert main.forwards <= 8  # of the self-test, once for all models of this config, which is not one of transformers
    main.forwards = 0
    output = run([(main, tokenizer), (other, tokenizer)], AdaFuseConfig(max_words=1, num_branches=1))
    assert [committed.text for committed in output.rounds[0]] == [" was", " red", ""]
    # round  main model                                     assistant
    #        So It                                          So It
    # 1      is      its candidate " is"                    was     its candidate; it scores " is" off It: no pass
    #        (scores " was" off It: no pass)                " was" wins
    # 2      was     not run yet, it only scored it         red     was is run; " red" is in the pool, it agrees
    #        red     its candidate
    # 3      the end is off red: no pass                    the end is off red: no pass
    assert counts(output) == [(1 + 1 + 2, 2 + 3), (1 + 1 + 1, 2 + 2)]
    assert (main.forwards, other.forwards) == (4, 3)


def test_copies_run_each_token_once_and_verify_a_round_in_one_pass(monkeypatch):
    """K copies agree: the first decodes token by token, each other one reads a round's words in one pass."""
    monkeypatch.setattr(Policy, "longest_draft", 0)
    model, tokenizer = tiny_model("llama", "characters", 1), TOKENIZERS["characters"]()
    config = AdaFuseConfig(num_branches=1, margin_threshold=0.0, max_words=2, max_word_tokens=5)
    for copies in (1, 2, 3):
        case = Case([model] * copies, [tokenizer] * copies, config, [PROMPTS[0]], 60)
        output = case.fast()
        assert all(committed.is_whole and len(committed.candidates) == 1 for committed in output.rounds[0][:-1])
        prompt = len(case.main_ids()[0][0])
        proposed = sum(len(committed.candidates[0].text) for committed in output.rounds[0])  # one token a character
        first, *others = counts(output)
        # A word cut at `max_word_tokens` needs no look-ahead: its last token waits for the next pass.
        assert first[1] <= prompt + proposed and first[0] == 1 + first[1] - prompt
        for passes, tokens in others:
            assert passes <= 1 + len(output.rounds[0])
            assert tokens == prompt + proposed


@pytest.mark.parametrize("number", range(8000, 8024))
def test_nothing_is_run_twice_and_scoring_is_one_pass(number, monkeypatch, look_ahead):
    look_ahead(number % 2)
    ran: list[int] = []
    run_tree, score = TreeAttentionBackend.run, SpanRound.score

    def watched_run(self, wanted):
        nodes = run_tree(self, wanted)
        ran.extend(map(id, nodes))
        alive.extend(nodes)  # an id is given anew once its object is gone
        return nodes

    def watched_score(self, text, pool):
        requests, asked = score(self, text, pool), []
        while True:
            try:
                asked.append(next(requests))
            except StopIteration as stop:
                members = [request.member_index for request in asked]
                assert len(members) == len(set(members))
                return stop.value
            yield asked[-1]

    alive: list = []
    monkeypatch.setattr(TreeAttentionBackend, "run", watched_run)
    monkeypatch.setattr(SpanRound, "score", watched_score)
    random_case(number).fast()
    assert len(ran) == len(set(ran)) > 0


def shapes_of_passes(case):
    """The shapes of what the last model of a case reads, pass by pass, and what it counts as read."""
    shapes: list[torch.Size] = []
    handle = case.models[-1].register_forward_pre_hook(
        lambda module, args, kwargs: shapes.append(kwargs["input_ids"].shape), with_kwargs=True
    )
    try:
        output = case.fast()
    finally:
        handle.remove()
    return shapes, counts(output)[-1][1]


def case_whose_prompts_end_apart():
    for number in range(1, 200):
        case = random_case(number)
        case.prompts, case.max_new_tokens = PROMPTS[:4], 16
        lengths = [len(rounds) for rounds in case.fast().rounds]
        if len(case.models) > 1 and max(lengths) > min(lengths):
            return case
    raise AssertionError("no case's prompts end apart")


def test_prompts_that_share_a_row_are_not_filled_up():
    """After the prompts, which are padded, a pass holds what is needed of all of them and nothing else."""
    case = case_whose_prompts_end_apart()
    (first, *others), num_tokens = shapes_of_passes(case)
    assert first[0] == 4 and {rows for rows, _ in others} == {1}
    ids = case.tokenizers[-1](case.prompts).input_ids
    assert sum(map(len, ids)) + sum(width for _, width in others) == num_tokens


def test_finished_rows_cost_nothing_more(monkeypatch):
    """The rows that enter the models are those not finished: the batch shrinks as texts end."""
    monkeypatch.setattr(Policy, "most_shared_columns", 0)
    sizes = [rows for rows, _ in shapes_of_passes(case_whose_prompts_end_apart())[0]]
    assert sizes[0] == sizes[1] == 4 and sizes[-1] < 4 and sizes == sorted(sizes, reverse=True)


def test_prompts_that_grow_long_get_rows_of_their_own(monkeypatch):
    """What they share is laid out anew between two passes; the passes go on with a row for each prompt."""
    case = case_whose_prompts_end_apart()
    lengths = [len(ids) for ids in case.tokenizers[-1](case.prompts).input_ids]
    monkeypatch.setattr(Policy, "most_shared_columns", sum(lengths) + 12)
    sizes = [rows for rows, _ in shapes_of_passes(case)[0]]
    assert sizes[:2] == [4, 1] and max(sizes[2:]) > 1


@pytest.mark.parametrize(("is_flat", "other_counts"), [(False, (1 + 1 + 1, 2 + 2)), (True, (1 + 1, 2 + 2))])
def test_what_hangs_below_a_commit_stays(is_flat, other_counts, look_ahead):
    """A candidate that lost to its own beginning is the next proposal, computed already."""
    look_ahead(0, is_flat)
    tokenizer = word_tokenizer(["So", "It", "a", "b", "c", "x"])
    main = toy(tokenizer, {"It": {"a": 0.98}, "a": {"b": 0.75}, "b": {"c": 0.98}, "c": {"</s>": 0.99}})
    other = toy(tokenizer, {"It": {"a": 0.8, "x": 0.15}, "a": {"b": 0.6}, "b": {"c": 0.98}, "c": {"</s>": 0.99}})
    output = run([(main, tokenizer), (other, tokenizer)], AdaFuseConfig(num_branches=1, max_words=2), max_new_tokens=3)
    # Fused scores. Round 1: " a b" ((.020 + .288) / 2 + (.223 + .511) / 2) / 2 = .261, " a" (.020 + .223) / 2 = .122;
    # round 2: " b c" ((.288 + .020) / 2 + (.511 + .020) / 2) / 2 = .210, " b" (.288 + .511) / 2 = .400.
    assert [committed.text for committed in output.rounds[0]] == [" a", " b c"]
    # round  main model                          assistant
    #        So It                               So It
    # 1      a, then b: proposes " a b"          a    for the score of " a b"; proposes " a", unsure
    # 2      c  (b is there): " b c"             b    for the score of " b c"; proposes " b", which is there
    # Where a pass of two tokens costs like one of one, the assistant's b comes along with a: no pass in round 2.
    assert counts(output) == [(1 + 2 + 1, 2 + 3), other_counts]


@pytest.mark.slow
def test_what_is_prefetched_keeps_the_cache_small(monkeypatch, look_ahead):
    """With a prompt alone more may be prefetched the longer it is, but what has been run below its prefix counts."""
    look_ahead(2, is_flat=True)
    begin, propose, prefetched, rooms = Member.begin_pass, Proposer.propose, [], []

    def watched_propose(self, root, useful=()):
        if root is not self.member.root(0):  # ahead of the round
            rooms.append(self.member.room_in_tree(0))
        return propose(self, root, useful)

    def watched_pass(self, needs, likely):
        tree = self.backend.trees[0]
        num_before, num_due = len(tree.unsettled()), len({id(node) for node in needs[0][0] if node.logprobs is None})
        passed = begin(self, needs, likely)

        def finish(result):
            nodes = passed.finish(result)
            num_held = len(tree.unsettled())
            if num_held > num_before + num_due:
                prefetched.append((num_held, tree.root.position))
            return nodes

        return Pass(passed.work, finish)

    monkeypatch.setattr(Member, "begin_pass", watched_pass)
    monkeypatch.setattr(Proposer, "propose", watched_propose)
    largest = []
    for prompt in (PROMPTS[0], "Once upon a time there was a cat. " * 9):
        prefetched.clear()
        for number in (13, 16, 25):
            case = random_case(number)
            case.prompts, case.max_new_tokens = [prompt], 30
            case.fast()
        assert len(prefetched) > 20
        assert all(num_held <= max(14, position // 12) for num_held, position in prefetched)
        largest.append(max(num_held for num_held, _ in prefetched))
    assert 10 < largest[0] <= 14 < largest[1]
    assert len(rooms) > 20 and min(rooms) > 0  # nor is a round proposed ahead where the tree is full


def test_proposing_ahead_saves_the_others_passes(look_ahead, monkeypatch):
    """Two copies agree: what the first proposes ahead, the other reads together with the round's candidate."""
    monkeypatch.setattr(Policy, "longest_draft", 0)
    model, tokenizer = tiny_model("llama", "characters", 1), TOKENIZERS["characters"]()
    config = AdaFuseConfig(num_branches=1, margin_threshold=0.0, max_words=1, max_word_tokens=5)
    passes = []
    for num_rounds in (0, 1, 3):
        look_ahead(num_rounds, is_flat=True)
        case = Case([model] * 2, [tokenizer] * 2, config, [PROMPTS[0] * 12], 60)  # long: much may be prefetched
        output = case.fast()
        (first, _), (other, _) = counts(output)
        passes.append((other, first, output.sequences.tolist(), len(output.rounds[0])))
    assert passes[0][2] == passes[1][2] == passes[2][2]
    read = passes[0][0] - 1  # the rounds that the other reads in a pass of their own; 1 is the prompt
    assert 10 < read <= passes[0][3]
    assert [other for other, *_ in passes[1:]] == [1 + -(-read // 2), 1 + -(-read // 4)]


@pytest.mark.parametrize(("method", "num_read"), [("adafuse", 12), ("unite", 11)])
def test_a_text_that_repeats_itself_is_read_ahead(method, num_read, look_ahead, monkeypatch):
    """Twelve words that have come before in the prompt: four guessed and the one known in a pass, not one by one."""
    look_ahead(0, is_flat=True)
    tokenizer = word_tokenizer(["So", "It", "is", "was", "red"])
    cycle = ["So", "It", "is", "was", "red"]
    rows = {word: {after: 0.99} for word, after in zip(cycle, [*cycle[1:], cycle[0]], strict=True)}
    config = {"method": method} if method != "adafuse" else AdaFuseConfig(max_words=1, num_branches=1)
    found = {}
    for longest in (0, 4):
        monkeypatch.setattr(Policy, "longest_draft", longest)
        model = toy(tokenizer, rows)
        output = run([(model, tokenizer)], config, prompt="So It is was red So It", max_new_tokens=12)
        found[longest] = output.sequences.tolist(), counts(output)[0]
    assert found[0][0] == found[4][0]
    # 7 tokens of prompt. Of the last word AdaFuse must know that it ends.
    assert found[0][1] == (1 + num_read, 7 + num_read)
    assert found[4][1] == (1 + 3, 7 + 3 * 5)


def test_dead_nodes_are_freed_at_once(look_ahead):
    """A node holds the logits of a whole vocabulary: what is dropped must not wait for the garbage collector."""
    look_ahead(1, is_flat=True)
    case = random_case(50001)
    case.prompts, case.max_new_tokens = PROMPTS[:2], 40
    case.fast()
    gc.collect()
    others = {id(thing): thing for thing in gc.get_objects() if type(thing) is Node}  # of a server's running batch, say
    gc.disable()
    try:
        output = case.fast()
        nodes = [thing for thing in gc.get_objects() if type(thing) is Node and id(thing) not in others]
        alive = sum(node.logits is not None for node in nodes)
    finally:
        gc.enable()
    assert sum(len(rounds) for rounds in output.rounds) >= 8
    assert alive == 0


@pytest.mark.parametrize("number", range(9000, 9008))
@pytest.mark.parametrize("most_shared", [3072, 60, 0])
def test_each_column_holds_one_token_and_is_given_back(number, most_shared, monkeypatch, look_ahead):
    """What the cache holds after a pass is what the trees hold: nothing twice, nothing that has died."""
    look_ahead(number % 2)
    monkeypatch.setattr(Policy, "most_shared_columns", most_shared)
    run_tree, seen, trees = TreeAttentionBackend.run, [], set()

    def watched_run(self, wanted):
        nodes = run_tree(self, wanted)
        columns = [(self.slots.row_of[index], column) for index in self.active for column in self.slots.held(index)]
        assert len(columns) == len(set(columns)) == self.slots.num_used
        for index in self.active:
            tree = self.trees[index]
            assert len(self.slots.prefix[index]) == len(tree.ids) - len(tree.pending)
            below = tree.unsettled()
            assert set(below) == {other for node in below for _, other in self.slots.above(node)}
        seen.append(self.slots.num_rows)
        trees.add(self)
        return nodes

    monkeypatch.setattr(TreeAttentionBackend, "run", watched_run)
    case = random_case(number)
    case.prompts = PROMPTS[:3]
    case.fast()
    finished = [tree for tree in trees if not tree.active]
    assert finished and not any(tree.cache.layers for tree in finished)
    assert max(seen) > 1 if most_shared == 0 else seen  # each prompt has a row; at 60, depending on the tokenizer
