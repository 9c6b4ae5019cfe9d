"""Rounds whose outcome is derived by hand, of toy models whose next token depends on the last one alone."""

from __future__ import annotations

import math

import pytest
from support.toys import run, texts, toy, word_tokenizer

from hf_adafuse import AdaFuseConfig


def test_the_assistant_overrules():
    tok_a, tok_b = word_tokenizer(["So", "It", "is", "was"]), word_tokenizer(["So", "was", "It", "is"])
    main = toy(tok_a, {"It": {"is": 0.5, "was": 0.4}, "is": {"</s>": 0.97}, "was": {"</s>": 0.97}})
    other = toy(tok_b, {"It": {"is": 0.05, "was": 0.9}, "is": {"</s>": 0.97}, "was": {"</s>": 0.97}})
    # B = 1, M = 1. The main model proposes " is", the assistant " was". Fused NLL, one token each:
    #   " is":  -(ln .5 + ln .05) / 2 = (0.693 + 2.996) / 2 = 1.844
    #   " was": -(ln .4 + ln .9 ) / 2 = (0.916 + 0.105) / 2 = 0.511
    output = run([(main, tok_a), (other, tok_b)], AdaFuseConfig(max_words=1, num_branches=1))
    assert texts(output) == [" was", ""] and output.rounds[0][-1].ends
    chosen, loser = output.rounds[0][0].candidates[1], output.rounds[0][0].candidates[0]
    assert output.rounds[0][0].winner == 1 and chosen.proposers == [1] and loser.proposers == [0]
    assert chosen.score == pytest.approx(-(math.log(0.4) + math.log(0.9)) / 2, abs=1e-5)
    assert loser.score == pytest.approx(-(math.log(0.5) + math.log(0.05)) / 2, abs=1e-5)
    assert output.sequences[0].tolist() == tok_a(["So It was"]).input_ids[0] + [tok_a.eos_token_id]


def test_the_branch_beats_the_greedy_word():
    tokenizer = word_tokenizer(["So", "It", "Rio", "San", "José"])
    # The word of the first branch is " San", whose NLL is -ln .5; the second, " Rio", is less likely under this model
    # but the second member prefers it: fused
    # " San" = (0.693 + 2.996) / 2 = 1.844, " Rio" = (0.916 + 0.821) / 2 = 0.869.
    # Both members' greedy words are others or " San", so only branching (B = 2) can find " Rio".
    main = toy(tokenizer, {"It": {"San": 0.5, "Rio": 0.4}, "Rio": {"</s>": 0.9}, "San": {"</s>": 0.9}})
    other = toy(tokenizer, {"It": {"José": 0.46, "Rio": 0.44, "San": 0.05}, "Rio": {"</s>": 0.9}, "San": {"</s>": 0.9},
                            "José": {"</s>": 0.9}})  # fmt: skip
    members = [(main, tokenizer), (other, tokenizer)]
    assert texts(run(members, AdaFuseConfig(max_words=1, num_branches=1)))[0] == " San"
    branched = run(members, AdaFuseConfig(max_words=1, num_branches=2))
    assert texts(branched)[0] == " Rio"
    assert [c.text for c in branched.rounds[0][0].candidates] == [" San", " Rio", " José"]


def test_one_word_rounds_pick_the_wrong_name():
    """The paper's "Kelly Reno" (section 4.3): one-word rounds pick "Terrence", adaptive ones "Kelly Reno"."""
    tokenizer = word_tokenizer(["So", "It", "Kelly", "Reno", "Terrence", "Hill"])
    # First words: the main model is sure of " Kelly" (margin .86 - .04 > .7) and of " Reno" after it; the other member
    # has p(Kelly) = .06, p(Terrence) = .52 (and .07 for " Hill"): uncertain, so it proposes " Terrence" alone.
    #   one word:  " Kelly" = -(ln .86 + ln .06) / 2 = (0.151 + 2.813) / 2 = 1.482
    #              " Terrence" = -(ln .10 + ln .52) / 2 = (2.303 + 0.654) / 2 = 1.478   -> the wrong name, by a hair
    #   adaptive:  " Kelly Reno" = -((ln .86 + ln .99) / 2 + (ln .06 + ln .99) / 2) / 2 = (0.080 + 1.412) / 2 = 0.746
    main = toy(tokenizer, {"It": {"Kelly": 0.86, "Terrence": 0.10}, "Kelly": {"Reno": 0.99}, "Terrence": {"Hill": 0.9},
                           "Reno": {"</s>": 0.99}, "Hill": {"</s>": 0.99}})  # fmt: skip
    unsure = {"Kelly": 0.06, "Hill": 0.07, "Terrence": 0.52}
    other = toy(tokenizer, {"It": unsure, "Kelly": {"Reno": 0.99}, "Terrence": {"Hill": 0.9},
                            "Reno": {"</s>": 0.99}, "Hill": {"</s>": 0.99}})  # fmt: skip
    members = [(main, tokenizer), (other, tokenizer)]
    one_word = run(members, AdaFuseConfig(max_words=1, num_branches=1))
    assert texts(one_word)[0] == " Terrence"
    adaptive = run(members, AdaFuseConfig(max_words=2, num_branches=1))
    assert texts(adaptive)[0] == " Kelly Reno"
    assert adaptive.rounds[0][0].words == [" Kelly", " Reno"]
    assert adaptive.rounds[0][0].margins == [pytest.approx([0.76, 0.99], abs=0.01), pytest.approx([0.45], abs=0.01)]


def test_a_tie_goes_to_the_earlier_member_then_to_the_better_branch():
    tokenizer = word_tokenizer(["So", "It", "b", "a"])
    row = {"b": 0.4, "a": 0.4, "</s>": 0.1}
    same = {"It": row, "a": {"</s>": 0.9}, "b": {"</s>": 0.9}}
    # Equal scores: the first member's first branch wins, which of equal tokens is the one with the lower id: " b".
    for other in ({"It": {"a": 0.4, "b": 0.4}}, same):
        output = run(
            [(toy(tokenizer, same), tokenizer), (toy(tokenizer, other), tokenizer)], AdaFuseConfig(max_words=1)
        )
        assert texts(output)[0] == " b"


def test_the_end_of_the_text_is_a_word():
    tokenizer = word_tokenizer(["So", "It", "so"])
    # After " so" the main model would go on (p(end) = .4 < p(so) = .5), the other ends (.9):
    #   end: -(ln .4 + ln .9) / 2 = 0.511    " so": -(ln .5 + ln .05) / 2 = 1.844
    main = toy(tokenizer, {"It": {"so": 0.9}, "so": {"so": 0.5, "</s>": 0.4}})
    other = toy(tokenizer, {"It": {"so": 0.9}, "so": {"so": 0.05, "</s>": 0.9}})
    output = run([(main, tokenizer), (other, tokenizer)], AdaFuseConfig(max_words=1, num_branches=1))
    assert texts(output) == [" so", ""]
    assert output.rounds[0][1].ends and output.sequences[0, -1] == tokenizer.eos_token_id
    assert output.rounds[0][1].candidates[1].score == pytest.approx(-(math.log(0.4) + math.log(0.9)) / 2, abs=1e-5)
