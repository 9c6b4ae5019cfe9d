"""Logits processors and stopping criteria that remember: as if each prompt were generated alone, against the oracle."""

from __future__ import annotations

import functools
import random

import pytest
import torch
from support.cases import PROMPTS, random_case
from support.hosts import ensemble, new_ids, oracle
from support.reference import reference_decode
from transformers import LogitsProcessor, StoppingCriteria

MORE_PROMPTS = [*PROMPTS, "My old green bus is big"]
LENGTHS = {1: 16, 3: 10, 8: 6}  # by batch size, the most new tokens
NUMS_CASES = {1: 6, 3: 4, 8: 2}


def case_of(number, batch):
    """Random case `number` with as many prompts."""
    case = random_case(number)
    case.prompts = random.Random(number).sample(MORE_PROMPTS, batch)
    case.max_new_tokens = min(case.max_new_tokens, LENGTHS[batch])
    return case


def cases_of(names, first):
    kinds = [(name, batch) for name in names for batch in LENGTHS]
    return [
        (name, batch, first + 20 * index + 7 * repeat)
        for index, (name, batch) in enumerate(kinds)
        for repeat in range(NUMS_CASES[batch])
    ]


class Checked:
    """Asserts the convention of the ordinary loop, for the batch it was made for."""

    def __init__(self, prompts):
        self.prompts, self.ids, self.num_calls = prompts, None, 0

    def see(self, ids, num_new=0):
        if self.ids is None:
            assert ids.shape == (len(self.prompts), self.prompts.shape[1] + num_new), "the first call is of the prompts"
        else:
            assert ids.shape == (self.ids.shape[0], self.ids.shape[1] + 1), "ids grow by one, the batch stays"
            assert torch.equal(ids[:, :-1], self.ids), "each text goes on"
        self.ids, self.num_calls = ids.clone(), self.num_calls + 1

    def is_untouched(self):
        return self.ids is None and self.num_calls == 0


# 1. Processors


class Forked:
    """As a library's matcher that `copy.deepcopy` cannot copy."""

    def __init__(self, rows):
        self.rows = list(rows)

    def fork(self):
        return Forked(self.rows)

    def __reduce_ex__(self, protocol):
        raise TypeError("cannot pickle a matcher")


class Remembers(Checked, LogitsProcessor):
    """A rule of the scores and of what it made of earlier calls, for each row its own."""

    def __init__(self, prompts, rule, settings, copied="copied"):
        super().__init__(prompts)
        self.rule, self.settings, self.copied = rule, settings, copied
        self.memory = (Forked if copied == "forked" else list)(rule.start() for _ in settings)

    def __call__(self, input_ids, scores):
        if self.ids is None:
            assert torch.equal(input_ids, self.prompts)
        self.see(input_ids)
        assert len(scores) == len(self.settings)
        if self.copied == "replayed":
            self.live = (token for token in input_ids)
        rows, new = getattr(self.memory, "rows", self.memory), scores.clone()
        for row, setting in enumerate(self.settings):
            token = input_ids[row, -1].item() if self.num_calls > 1 else None
            rows[row], new[row] = self.rule.step(rows[row], token, scores[row], setting)
        scores.fill_(torch.nan)  # they are its own to change
        return new


class BanEveryThird:
    """At every third call the best token is banned."""

    def start(self):
        return 0

    def step(self, calls, token, scores, setting):
        calls += 1
        return calls, ban(scores, [scores.argmax().item()]) if calls % 3 == 0 else scores


class Automaton:
    """Tokens move a state, which says which may come next; a token that may not is an error where it is strict."""

    def __init__(self, is_strict):
        self.is_strict = is_strict

    def start(self):
        return 0

    def step(self, state, token, scores, setting):
        if token is not None:
            assert not self.is_strict or token % 5 != (state + setting) % 5, "asked about what it has forbidden"
            state = (3 * state + token + 1) % 7
        return state, ban(scores, range((state + setting) % 5, len(scores), 5))


class BannedByRow:
    """A row's own ids are banned, others after each token."""

    def start(self):
        return []

    def step(self, seen, token, scores, setting):
        seen = seen if token is None else [*seen, token]
        return seen, ban(scores, range((setting + sum(seen) % 3) % 4, len(scores), 4))


class PastScores:
    """Scores are lowered where they were high in the last two calls."""

    def start(self):
        return []

    def step(self, past, token, scores, setting):
        new = scores - 0.3 * torch.stack(past).mean(0) if past else scores
        return [*past[-1:], scores.clone()], new


def ban(scores, ids):
    scores = scores.clone()
    scores[list(ids)] = -torch.inf
    return scores


RULES = {
    "counter": lambda is_strict: BanEveryThird(),
    "automaton": Automaton,
    "by_row": lambda is_strict: BannedByRow(),
    "past_scores": lambda is_strict: PastScores(),
}


def pure(member, prompt, rule, setting):
    """A rule as a function of the ids: the calls of the ordinary loop, one after the other."""

    @functools.cache
    def memory_and_scores(ids):
        if len(ids) == len(prompt):
            return rule.step(rule.start(), None, member.logits(ids), setting)
        memory, _ = memory_and_scores(ids[:-1])
        return rule.step(memory, ids[-1], member.logits(ids), setting)

    return lambda ids, scores: memory_and_scores(tuple(ids[0].tolist()))[1][None]


def settings_of(case, member):
    """One number for each row."""
    return [3 * member + 5 * row + len(prompt) for row, prompt in enumerate(case.prompts)]


def padded_prompts(case, member):
    """The ids of the prompts as a member's processors see them."""
    rows, ids, _ = case.main_ids()
    own = [case.member_prompts(row)[member] for row in rows]
    width = max(map(len, own))
    return ids if member == 0 else torch.tensor([[0] * (width - len(row)) + row for row in own])


def expected_rows(case, name, acting):
    rows = []
    for row, ids in enumerate(case.main_ids()[0]):
        prompts, members = case.member_prompts(ids), case.ref_members()
        for k in acting:
            rule = RULES[name](is_strict=False)
            members[k].process = pure(members[k], prompts[k], rule, settings_of(case, k)[row])
        rows.append(reference_decode(members, prompts, case.config, case.max_new_tokens)[0])
    return rows


def processors(case, name, acting, copied="copied"):
    """The arguments: strict for the main model, into whose text nothing comes that it forbids."""
    made = {
        k: Remembers(padded_prompts(case, k), RULES[name](is_strict=k == 0), settings_of(case, k), copied)
        for k in acting
    }
    others = [[made[k]] if k in made else [] for k in range(1, len(case.models))]
    return {"logits_processor": [made[0]] if 0 in made else [], "assistant_logits_processor": others}


@pytest.mark.parametrize(("name", "batch", "number"), cases_of(RULES, 1))
def test_processors_that_remember_equal_the_oracle(name, batch, number, look_ahead):
    look_ahead(number % 3, is_flat=number % 2 == 1)
    case = case_of(number, batch)
    acting = [*range(len(case.models))] if number % 3 else [number % len(case.models)]
    given = processors(case, name, acting, ("copied", "forked", "replayed")[number // 4 % 3])
    assert new_ids(case, case.fast(**given)) == expected_rows(case, name, acting)
    for one in [*given["logits_processor"], *sum(given["assistant_logits_processor"], [])]:
        assert one.is_untouched()


def test_every_rule_changes_the_text():
    case = ensemble("llama/byte_level/0", "qwen3/sentencepiece/1")
    texts = [oracle(case), *(expected_rows(case, name, [0, 1]) for name in RULES)]
    assert all(texts.count(text) == 1 for text in texts)


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("name", RULES)
def test_processors_can_be_used_again_and_rows_alone_are_those_of_the_batch(name, batch):
    case = case_of(9, batch)
    given = processors(case, name, [0, 1])
    rows = new_ids(case, case.fast(**given))
    assert new_ids(case, case.fast(**given)) == rows
    settings = [settings_of(case, k) for k in (0, 1)]
    for row, prompt in enumerate(case.prompts):
        alone = type(case)(case.models, case.tokenizers, case.config, [prompt], case.max_new_tokens)
        made = [Remembers(padded_prompts(alone, k), RULES[name](is_strict=k == 0), [settings[k][row]]) for k in (0, 1)]
        assert new_ids(alone, alone.fast(logits_processor=made[:1], assistant_logits_processor=[made[1:]])) == [
            rows[row]
        ]


class OwnIds:
    """A row lets only ids of its own come, and is asked about no others."""

    def start(self):
        return None

    def step(self, _, token, scores, setting):
        assert token is None or token % 8 == setting
        return None, ban(scores, [token for token in range(len(scores)) if token % 8 != setting])


def test_the_rows_beside_a_text_are_not_held_to_what_acts_on_it_alone():
    case = ensemble("llama/byte_level/0", "qwen3/sentencepiece/1")
    size, rows = len(case.tokenizers[0]), range(len(case.prompts))
    processor = Remembers(case.main_ids()[1], OwnIds(), [2 + row for row in rows])
    given = {"prefix_allowed_tokens_fn": lambda row, ids: [*range(2 + row, size, 8)], "logits_processor": [processor]}

    def process(row, k, prompt):
        others = [token for token in range(size) if token % 8 != 2 + row]
        return (lambda ids, scores: ban(scores[0], others)[None]) if k == 0 else None

    assert new_ids(case, case.fast(**given)) == oracle(case, process)


# 2. Criteria


class Counter(Checked, StoppingCriteria):
    """Stops after so many calls."""

    def __call__(self, input_ids, scores, **kwargs):
        self.see(input_ids, num_new=1)
        return torch.full((len(input_ids),), self.num_calls >= 4)

    @staticmethod
    def stops(new, row):
        return len(new) >= 4


class DoneTracker(Checked, StoppingCriteria):
    """As lm-eval's: remembers which rows are done, and says whether all are."""

    def __init__(self, prompts):
        super().__init__(prompts)
        self.done_tracker = [False] * len(prompts)

    def __call__(self, input_ids, scores, **kwargs):
        self.see(input_ids, num_new=1)
        for row, is_done in enumerate(self.done_tracker):
            if not is_done:
                self.done_tracker[row] = input_ids[row, -1].item() % 5 == 1
        return False not in self.done_tracker

    @staticmethod
    def stops(new, row):
        return new[-1] % 5 == 1


class StopIdsByRow(Checked, StoppingCriteria):
    """Each row has its own ids to stop at."""

    def __call__(self, input_ids, scores, **kwargs):
        self.see(input_ids, num_new=1)
        return torch.tensor([ids[-1] % 6 == row % 6 for row, ids in enumerate(input_ids.tolist(), start=1)])

    @staticmethod
    def stops(new, row):
        return new[-1] % 6 == (row + 1) % 6


class SecondTime(Checked, StoppingCriteria):
    """A Python bool: whether this is the second even token."""

    num_even = 0

    def __call__(self, input_ids, scores, **kwargs):
        self.see(input_ids, num_new=1)
        self.num_even += bool((input_ids[:, -1] % 2 == 0).all())
        return self.num_even == 2

    @staticmethod
    def stops(new, row):
        return new[-1] % 2 == 0 and sum(token % 2 == 0 for token in new) == 2


CRITERIA = {cls.__name__: cls for cls in (Counter, DoneTracker, StopIdsByRow, SecondTime)}


def cut(rows, stops):
    """The rows up to the first token at which they stop."""
    ends = [
        next((end for end in range(1, len(new)) if stops(new[:end], row)), len(new)) for row, new in enumerate(rows)
    ]
    return [new[:end] for new, end in zip(rows, ends, strict=True)]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "batch", "number"), cases_of(CRITERIA, 2))
def test_criteria_that_remember_stop_each_row_as_alone(name, batch, number):
    case = case_of(number, batch)
    expected = cut([ids for ids, _ in case.slow()], CRITERIA[name].stops)
    criterion = CRITERIA[name](case.main_ids()[1])
    assert new_ids(case, case.fast(stopping_criteria=[criterion])) == expected
    if batch == 1:  # it is the caller's own that is asked, as by the ordinary loop
        assert criterion.num_calls == len(expected[0])
    else:
        assert criterion.is_untouched()
        assert new_ids(case, case.fast(stopping_criteria=[criterion])) == expected


def test_every_criterion_cuts_some_rows_and_not_all():
    case = case_of(3, 8)
    rows = [ids for ids, _ in case.slow()]
    for name, cls in CRITERIA.items():
        ends = {len(new) for new in cut(rows, cls.stops)}
        assert ends == {4} if name == "Counter" else len(ends) > 2, name


@pytest.mark.parametrize("batch", [2, 3])
def test_functions_with_settings_for_each_row(batch):
    """A function of the ids may have been made for the batch, too."""
    case = ensemble("llama/byte_level/0", "qwen3/sentencepiece/1", prompts=MORE_PROMPTS[:batch])
    rest, size = torch.arange(batch)[:, None], len(case.tokenizers[0])
    banned = torch.arange(size)[None] % 5 == rest

    def process(ids, scores):
        return scores.masked_fill(banned, -torch.inf)

    def stop(ids, scores):
        return ids[:, -1] % 6 == rest[:, 0]

    def by_row(row, k, prompt):
        return (lambda ids, scores: ban(scores[0], range(row, size, 5))[None]) if k == 0 else None

    free = oracle(case, by_row)
    expected = cut(free, lambda new, row: new[-1] % 6 == row)
    assert expected != free
    assert new_ids(case, case.fast(logits_processor=[process], stopping_criteria=[stop])) == expected
