"""`hf-adafuse chat` and `generate --chat`: what is written is what the members make of the conversation."""

from __future__ import annotations

import io
import json
import sys

import pytest
from support.saved_members import SHORT, byte_level_tokenizer, metaspace_tokenizer, save_member
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_adafuse import AdaFuseConfig, AdaFuseEnsemble
from hf_adafuse.cli import main
from hf_adafuse.cli.streaming import TextWriter
from hf_adafuse.trees.pass_policy import Policy

MARKED = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {{ messages[-1]['content'] }}{% endif %}"
)
SAID = ["Once upon a time", "The cat sat on the tree"]
MORE = [*SAID, "She", "the end"]  # some answers of random members are the same


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """Two members, of which the second has no chat template."""
    root = tmp_path_factory.mktemp("chat")
    tokenizer = byte_level_tokenizer()
    tokenizer.chat_template = MARKED
    return [save_member(root / "a", tokenizer, 1), save_member(root / "b", metaspace_tokenizer(), 3)]


def flags(pair, *more):
    return ["--model", pair[0], "--assistant", pair[1], *SHORT, *more]


def ensemble(pair):
    members = [(AutoModelForCausalLM.from_pretrained(name), AutoTokenizer.from_pretrained(name)) for name in pair]
    return AdaFuseEnsemble(members, AdaFuseConfig(max_word_tokens=6))


def conversation(pair, lines, system=None):
    """The answers to some messages, and the messages, without anything of the command."""
    both, messages, answers = ensemble(pair), [], []
    if system is not None:
        messages.append({"role": "system", "content": system})
    for line in lines:
        messages.append({"role": "user", "content": line})
        answers.append(both.texts(messages, chat=True, max_new_tokens=20)[0])
        messages.append({"role": "assistant", "content": answers[-1].strip()})
    return answers, messages


def talk(pair, lines, monkeypatch, *more):
    monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
    return main(["chat", *flags(pair, *more)])


def test_each_answer_follows_from_the_whole_conversation(pair, monkeypatch, capsys):
    answers, _ = conversation(pair, MORE)
    assert len(set(answers)) > 1
    assert talk(pair, MORE, monkeypatch) == 0
    assert capsys.readouterr().out == "".join(f"{answer}\n" for answer in answers)
    answers, _ = conversation(pair, SAID[:1], system="Be a cat.")
    assert talk(pair, SAID[:1], monkeypatch, "--system", "Be a cat.") == 0
    assert capsys.readouterr().out == f"{answers[0]}\n"


def test_a_turn_reads_what_is_new(pair, monkeypatch, capsys):
    monkeypatch.setattr(Policy, "least_shared_tokens", 20)
    read, asked = [], []
    real = AdaFuseEnsemble.generate

    def generate(self, prompts, **kwargs):
        asked.append([*prompts[0]] if isinstance(prompts[0], list) else [*prompts])
        output = real(self, prompts, **kwargs)
        read.append([member["tokens_run"] for member in output.stats["members"]])
        return output

    monkeypatch.setattr(AdaFuseEnsemble, "generate", generate)
    long = "Once upon a time there was a little cat. " * 3
    answers, messages = conversation(pair, SAID, system=long)
    assert asked == [messages[:2], messages[:4]]
    whole = read[1]
    read.clear(), asked.clear()
    assert talk(pair, SAID, monkeypatch, "--system", long) == 0
    assert capsys.readouterr().out == "".join(f"{answer}\n" for answer in answers)
    assert asked == [messages[:2], messages[:4]]
    for k, name in enumerate(pair):
        num_tokens = len(AutoTokenizer.from_pretrained(name)(long).input_ids)
        assert num_tokens > 20
        assert read[1][k] <= whole[k] - num_tokens


def test_a_stop_text_is_no_part_of_the_conversation(pair, monkeypatch, capsys):
    from hf_adafuse.cli import chat

    (whole,), _ = conversation(pair, SAID[:1])
    stop = whole.strip()[3:6]
    said = []
    take = chat.Conversation.take
    monkeypatch.setattr(chat.Conversation, "take", lambda self, line: said.append(self) or take(self, line))
    assert talk(pair, SAID[:1], monkeypatch, "--stop", stop) == 0
    assert said[0].messages[1]["content"] == whole.strip()[:3].strip()
    assert stop in capsys.readouterr().out


def test_commands(pair, monkeypatch, capsys):
    (first, second), _ = conversation(pair, SAID)
    alone = conversation(pair, SAID[1:])[0][0]
    lines = ["/trace", "", SAID[0], "/trace", "/what", "/clear", SAID[1], "/quit", SAID[0]]
    assert talk(pair, lines, monkeypatch) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"There is no answer yet.\n{first}\nMembers  0: the main model (a)  1: ")
    assert "/what is no command.\ncommands within the conversation:\n  /trace" in out
    assert out.endswith(f"stays in the conversation.\n{alone}\n")


def test_an_answer_that_is_stopped_stays_as_far_as_it_came(pair, monkeypatch, capsys):
    from hf_adafuse.cli import chat

    real, taken = TextWriter.put, []

    def put(self, value):
        real(self, value)
        if self.text and not taken:
            taken.append(self.text)
            raise KeyboardInterrupt

    seen = []
    answer = chat.Conversation._answer
    monkeypatch.setattr(
        chat.Conversation, "_answer", lambda self, line: (answer(self, line), seen.append(self.messages))
    )
    monkeypatch.setattr(TextWriter, "put", put)
    assert talk(pair, SAID, monkeypatch) == 0
    messages = seen[-1]
    assert messages[1] == {"role": "assistant", "content": taken[0].strip()}
    rest = ensemble(pair).texts(messages[:3], chat=True, max_new_tokens=20)[0]
    assert capsys.readouterr().out == f"{taken[0]}\n{rest}\n"


def test_generate_with_a_chat(pair, capsys):
    (answer,), _ = conversation(pair, SAID[:1], system="Be a cat.")
    assert main(["generate", *flags(pair, "--chat", "--system", "Be a cat.", SAID[0])]) == 0
    assert capsys.readouterr().out == f"{answer}\n"
    assert main(["generate", "--json", *flags(pair, "--chat", "--system", "Be a cat.", SAID[0])]) == 0
    record = json.loads(capsys.readouterr().out)
    assert (record["prompt"], record["text"], record["finish_reason"]) == (SAID[0], answer, "length")
    assert "thoughts" not in record


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["generate", "--system", "Be brief.", "hi"], "`--system` must be left out without `--chat`"),
        (["generate", "--thinking", "off", "hi"], "`--thinking` must be left out without `--chat`"),
        (["generate", "--chat", "--max-thinking-tokens", "-1", "hi"], "`max_thinking_tokens` must be a whole number"),
        (["generate", "--chat", "hi"], "`tokenizers[0]` must have a chat template"),
        (["chat"], "`--model` must be given for a chat"),
    ],
)
def test_what_cannot_be_is_refused(given, message, capsys):
    assert main(given) == 2
    assert message in capsys.readouterr().err
