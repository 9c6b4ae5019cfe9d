"""What has followed which tokens: guesses, and that they change no more than the cost."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from support.cases import random_case

from hf_adafuse.members.ngram_drafts import NgramDrafts
from hf_adafuse.trees.nodes import TokenTree
from hf_adafuse.trees.pass_policy import Policy


def reading(*top, vocab_size=99):
    return SimpleNamespace(top=list(top), row=torch.zeros(vocab_size))


def drafts(*prompts, room=math.inf, eos_ids=(9,), can_prefetch=True):
    """Of these prompts, and their trees."""
    trees = [TokenTree(index, list(ids)) for index, ids in enumerate(prompts)]
    made = NgramDrafts(
        SimpleNamespace(trees=trees, can_prefetch=can_prefetch, policy=Policy), eos_ids, lambda node: room
    )
    made.add_texts(prompts)
    return made, trees


def tokens(nodes):
    return [(node.position, node.token) for node in nodes]


def test_what_came_after_the_longest_ending_is_guessed_and_what_came_last():
    made, (tree,) = drafts([1, 2, 3, 4, 7, 2, 3, 5, 1, 2, 3])
    assert tokens(made.after([tree.root])) == [(11, 4), (12, 7), (13, 2), (14, 3)]  # 1 2 3, not 7 2 3
    made, (tree,) = drafts([2, 4, 8, 2, 5, 7, 2])
    assert tokens(made.after([tree.root])) == [(7, 5), (8, 7), (9, 2), (10, 5)]
    assert made.after([tree.root.add_child(6)]) == []


def test_guesses_are_shared_by_prompts_but_not_by_their_trees():
    made, (first, second) = drafts([1, 2, 3], [5, 1])
    assert tokens(made.after([second.root])) == [(2, 2), (3, 3)]
    assert first.root.children == {} and list(second.root.children) == [2]


def test_the_ends_of_a_tree_take_turns():
    made, (tree,) = drafts([1, 2, 3, 4, 1])
    one, other = tree.root.add_child(2), tree.root.add_child(3)
    assert [node.token for node in made.after([tree.root, one, other])] == [3, 4, 4, 1, 1, 2, 2, 3]


@pytest.mark.parametrize(
    ("changes", "expected"), [({"room": 2}, [2, 3]), ({"eos_ids": [4]}, [2, 3]), ({}, [2, 3, 4, 1])]
)
def test_where_guesses_end(changes, expected):
    made, (tree,) = drafts([1, 2, 3, 4, 1], **changes)
    assert [node.token for node in made.after([tree.root])] == expected


def test_what_was_said_and_what_would_be_said_count():
    made, (tree,) = drafts([1, 2, 3])
    node = tree.root.add_child(6)
    node.logprobs = reading(8, 5)
    made.add_next_tokens([node])
    assert [one.token for one in made.after([node])] == [8]
    made.add_end(0, [6, 7, 1])
    assert [one.token for one in made.after([node])] == [7, 1, 2, 3]


@pytest.mark.parametrize("number", range(8))
def test_guesses_change_no_text(number, monkeypatch, look_ahead):
    found = []
    for longest in (0, 4, 9):
        monkeypatch.setattr(Policy, "longest_draft", longest)
        look_ahead(number % 2, is_flat=True)
        case = random_case(61000 + number)
        output = case.fast()
        found.append((output.sequences.tolist(), [[one.text for one in rounds] for rounds in output.rounds]))
    assert found[0] == found[1] == found[2]


def test_who_guesses_wrong_more_often_than_right_does_not_guess():
    made, (tree,) = drafts([1, 2, 3, 1])
    outcomes = [(5, []), (5, [5]), (6, []), (6, [6]), (7, []), (6, [])]  # at first as good as a coin
    for number, (top, expected) in enumerate(outcomes):
        node = tree.root.add_child(20 + number).add_child(1)  # only what came after 1 alone is known
        node.logprobs = reading(top)
        made.add_next_tokens([node])
        fresh = tree.root.add_child(40 + number).add_child(1)
        assert [one.token for one in made.after([fresh])][:1] == expected


def test_a_prompt_of_one_token_has_no_pairs_of_tokens_behind_it():
    made, (tree,) = drafts([1], [1, 2])[0], drafts([1])[1]
    tree.root.logprobs = reading(3)
    made.add_next_tokens([tree.root])  # wrong after one token, which says nothing about two
    node = tree.root.add_child(1).add_child(2)
    made.add_texts([[1, 2, 7]])
    assert [one.token for one in made.after([node])][:1] == [7]


def test_where_nothing_is_read_ahead_nothing_is_kept():
    """Behind a server a node may have been scored and not read."""
    made, (tree,) = drafts([1, 2, 3, 1], can_prefetch=False)
    made.add_next_tokens([tree.root])
    assert made.after([tree.root]) == [] and tree.root.logprobs is None


def test_an_id_that_the_model_cannot_say_is_not_guessed():
    made, (tree,) = drafts([1, 50, 2, 1])
    node = tree.root.add_child(7)
    node.logprobs = reading(3, vocab_size=50)
    made.add_next_tokens([node])
    assert made.after([tree.root]) == []
