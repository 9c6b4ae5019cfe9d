"""How many rows over the vocabulary are alive between two passes: one for each node that a tree holds, and one more
where logits processors made other scores of it. Whatever else a pass computes dies with it.
"""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
from support.cases import PROMPTS
from support.kinds import force
from support.tiny import TOKENIZERS, tiny_model

from hf_adafuse import enable_adafuse
from hf_adafuse.decoding.decoder import Decoder
from hf_adafuse.trees.nodes import TokenTree

SIZE = 20000  # tokens: a row has more elements than any cache or mask of these calls
NAMES = ["byte_level", "characters"]


def widened(architecture, name, dtype):
    """A tiny model with a vocabulary of `SIZE`; the tokens that its tokenizer does not know are never likely."""
    model, known = copy.deepcopy(tiny_model(architecture, name, 1)), len(TOKENIZERS[name]())
    model.resize_token_embeddings(SIZE, mean_resizing=False)
    with torch.no_grad():
        model.get_output_embeddings().weight[known:] = 0
    return model.to(dtype)


def vocabulary_wide(known):
    """By place in memory, the bytes of all tensors of at least a row of the vocabulary, without the known ones."""
    storages = {}
    for thing in gc.get_objects():
        if type(thing) is torch.Tensor and thing.numel() >= SIZE and thing.is_floating_point():
            storages[thing.untyped_storage().data_ptr()] = thing.untyped_storage().nbytes()
    return {place: size for place, size in storages.items() if place not in known}


def held(members):
    """The nodes with logits in all trees: of each prompt the last token of its text, and what hangs below it."""
    nodes = [tree.top for member in members for tree in member.backend.trees]
    for node in nodes:  # grows as it goes
        nodes += node.children.values()
    return sum(node.logits is not None for node in nodes)


@pytest.fixture
def watched(monkeypatch):
    """Before every sixth pass: the bytes over the vocabulary for each of its tokens, the nodes held, and the number of
    tokens that have been committed."""
    steps, seen, known = Decoder.steps, [], {}

    def watching(self):
        start = [len(prompt.ids) for prompt in self.prompts]
        for number, _ in enumerate(steps(self)):
            if number % 6 == 5:
                num_new = sum(len(prompt.ids) for prompt in self.prompts) - sum(start)
                seen.append((sum(vocabulary_wide(known).values()) / SIZE, held(self.members), num_new))
            yield

    monkeypatch.setattr(Decoder, "steps", watching)
    gc.collect()
    known.update(vocabulary_wide({}))
    return seen, known


def generate(known, dtype=torch.float32, config=True, architecture="llama", prompts=PROMPTS[:3], **kwargs):
    models = [widened(architecture, name, dtype) for name in NAMES]
    tokenizers = [TOKENIZERS[name]() for name in NAMES]
    weights = [parameter for model in models for parameter in model.parameters()]
    known.update({one.untyped_storage().data_ptr(): one.numel() for one in weights})
    inputs = copy.deepcopy(tokenizers[0])(prompts, return_tensors="pt", padding=True)
    main = enable_adafuse(models[0])
    return main.generate(
        **inputs,
        tokenizer=tokenizers[0],
        assistant_models=models[1:],
        assistant_tokenizers=tokenizers[1:],
        adafuse_config=config,
        **dict(max_new_tokens=16, do_sample=False) | kwargs,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("per_node", "options"),
    [
        (4, {}),
        (2, dict(dtype=torch.bfloat16)),
        (4, dict(config=dict(exploration="beam", max_word_tokens=6))),
        (4, dict(config=dict(method="majority"))),
        (4, dict(config=dict(method="gac"))),
        (4, dict(config=dict(method="safe"))),
        (4, dict(config=dict(method="specfuse"))),
        (4, dict(do_sample=True)),
        (4, dict(max_batch_size=2)),
        (4 + 4, dict(no_repeat_ngram_size=3)),
        (2 + 4, dict(bad_words_ids=[[70]], dtype=torch.bfloat16)),
    ],
    ids=str,
)
def test_a_row_lives_as_long_as_its_node(watched, per_node, options):
    seen, known = watched
    generate(known, **options)
    assert_bounded(seen, per_node)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["branch-rows", "recurrent (several tokens)", "recurrent"])
def test_with_every_backend(watched, backend, monkeypatch):
    force(monkeypatch, backend)
    seen, known = watched
    generate(known)
    assert_bounded(seen, 4)


@pytest.mark.slow
def test_what_the_caller_asks_for_is_a_row_a_token(watched):
    seen, known = watched
    generate(known, output_logits=True, output_scores=True, return_dict_in_generate=True)
    assert_bounded(seen, 4, per_token=4 + 4)


def assert_bounded(seen, per_node, per_token=0):
    assert len(seen) >= 4 and max(num_held for _, num_held, _ in seen) > 1
    kept = 4 * 2  # each of two members keeps the row after the last prompt without its content
    assert all(size <= per_node * num_held + per_token * num_new + kept for size, num_held, num_new in seen), seen


@pytest.mark.slow
@pytest.mark.parametrize("method", ["majority", "select"])
def test_whole_answers_hold_a_few_rows_however_long_they_are(watched, method):
    """Not one for each token: three prompts and two members, each with its root, the end of an answer and the last
    tokens that were read."""
    seen, known = watched
    generate(known, config=dict(method=method), max_new_tokens=80)
    assert len(seen) >= 16
    assert all(size <= 4 * 3 * 2 * 4 for size, _, _ in seen), seen


def test_a_prompt_that_leaves_holds_nothing():
    """In a batch that runs on, its tree stays; the logits of its last tokens, committed or not, do not."""
    tree = TokenTree(0, [1, 2])
    tree.commit(tree.root.add_path([3, 4]))
    nodes = [*tree.pending, tree.root.add_child(5)]
    for node in nodes:  # read before the next commit
        node.is_computed, node.logits = True, torch.zeros(SIZE)
    assert len(nodes) == 3
    alive = [weakref.ref(node.logits) for node in nodes]
    del node, nodes
    tree.close()
    assert [one() for one in alive] == [None] * 3
