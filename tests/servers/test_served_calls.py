"""What a user does with members behind servers: every way to name them, what they can and cannot do, how they work at
the same time.
"""

from __future__ import annotations

import copy
import json
import re
import threading
import time

import pytest
import torch
from support.cases import PROMPTS, Case
from support.reference import RefMember
from support.stand_in import StandIn, serving
from support.tiny import TOKENIZERS, eos_ids, tiny_model
from transformers import AutoTokenizer, GenerationConfig, LlamaConfig

from hf_adafuse import AdaFuseConfig, AdaFuseEnsemble, ServedModel, enable_adafuse, export_adafuse
from hf_adafuse.cli import main as command
from hf_adafuse.servers.kinds import is_served_name
from hf_adafuse.servers.queries import ServerError

NAMES = ["byte_level", "sentencepiece"]


@pytest.fixture(scope="module")
def pair():
    models = [tiny_model("llama", name, seed) for seed, name in enumerate(NAMES)]
    return list(zip(models, [TOKENIZERS[name]() for name in NAMES], strict=True))


def case_of(pair, config=None, prompts=PROMPTS[:3], new=8):
    return Case([model for model, _ in pair], [tok for _, tok in pair], config or AdaFuseConfig(), prompts, new)


@pytest.fixture
def servers(pair):
    """Both members behind stand-ins: the members as seen from here, and the stand-ins."""
    stand_ins = [StandIn(model, tokenizer) for model, tokenizer in pair]
    with serving(stand_ins[0]) as first, serving(stand_ins[1]) as second:
        yield [served(url, *one) for url, one in zip((first, second), pair, strict=True)], stand_ins


def served(url, model, tokenizer, **options):
    eos = model.generation_config.eos_token_id
    return ServedModel(url, tokenizer=tokenizer, eos_token_id=eos, **options), tokenizer


@pytest.mark.slow
@pytest.mark.parametrize(
    "config",
    [
        AdaFuseConfig.robust(),
        AdaFuseConfig(model_weights="prompt"),
        AdaFuseConfig(method="words", certainty_gate=0.5),
        AdaFuseConfig(certainty_gate=0.3),
        AdaFuseConfig(online_rate=1.0, switch_margin=0.1),
        AdaFuseConfig(method="majority"),
        AdaFuseConfig(method="select"),
        AdaFuseConfig(method="spans", method_options={"unit": "paragraph", "num_words": 3}),
        AdaFuseConfig(method="sweetspan"),
        AdaFuseConfig(method="cool-fusion"),
        AdaFuseConfig(method="specfuse"),
    ],
    ids=lambda config: f"{config.method}-{config.model_weights}-{config.certainty_gate}",
)
@pytest.mark.parametrize("which", [(0,), (1,), (0, 1)])
def test_rules_and_methods_give_the_local_text(pair, servers, config, which):
    mixed = [servers[0][k] if k in which else one for k, one in enumerate(pair)]
    expected, output = case_of(pair, config).fast(), case_of(mixed, config).fast()
    assert output.sequences.tolist() == expected.sequences.tolist()


@pytest.mark.slow
def test_an_ensemble_with_no_member_here(pair, servers):
    here, away = (AdaFuseEnsemble(members, {"num_branches": 3}) for members in (pair, servers[0]))
    assert away.texts(PROMPTS[:2], max_new_tokens=9) == here.texts(PROMPTS[:2], max_new_tokens=9)
    ids = pair[0][1](PROMPTS[0], return_tensors="pt").input_ids
    assert away.generate(ids, max_new_tokens=9).tolist() == here.generate(ids, max_new_tokens=9).tolist()
    assert away.texts(PROMPTS[0], max_new_tokens=5) == here.texts([PROMPTS[0]], max_new_tokens=5)


@pytest.mark.slow
def test_two_ensembles_of_one_main_model_know_their_own_members(pair, servers):
    """Each has its own; the model itself stays as it was."""
    (main, tokenizer), other = pair[0], (tiny_model("llama", NAMES[1], 5), pair[1][1])
    kind, before = type(main), set(vars(main))
    expected = [
        AdaFuseEnsemble([(main, tokenizer), one]).texts(PROMPTS[:2], max_new_tokens=9) for one in (pair[1], other)
    ]
    both = [AdaFuseEnsemble([(main, tokenizer), one]) for one in (pair[1], other)]
    assert [one.texts(PROMPTS[:2], max_new_tokens=9) for one in both] == expected and expected[0] != expected[1]
    assert type(main) is kind and set(vars(main)) == before
    assert both[0].model.get_input_embeddings() is main.get_input_embeddings()


@pytest.mark.slow
def test_prompts_are_read_at_the_same_time(pair):
    """Of one member several, and of several members all: one after another they would take six times as long."""

    class Waiting(StandIn):
        """Answers no prompt before so many have come, to both servers."""

        def answer(self, path, body, headers):
            if path == "/v1/completions" and is_watched.is_set():
                with lock:
                    inside.append(self)
                    if len(inside) >= 6 and len({id(one) for one in inside}) == 2:
                        all_have_come.set()
                assert all_have_come.wait(100)
            return super().answer(path, body, headers)

    lock, inside, is_watched, all_have_come = threading.Lock(), [], threading.Event(), threading.Event()
    stand_ins = [Waiting(model, tokenizer) for model, tokenizer in pair]
    with serving(stand_ins[0]) as first, serving(stand_ins[1]) as second:
        members = [served(url, *one) for url, one in zip((first, second), pair, strict=True)]
        prompts = [*PROMPTS[:3], "a big cat", "the tree", "to sit"]
        config = AdaFuseConfig(model_weights="prompt")
        case, expected = case_of(members, config, prompts, 1), case_of(pair, config, prompts, 1).fast()
        AdaFuseEnsemble(members)  # the self-test is behind us
        is_watched.set()
        assert case.fast().sequences.tolist() == expected.sequences.tolist()
    assert all_have_come.is_set()


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_a_server_that_does_not_say_how_it_tokenizes(pair, kind):
    class Mute(StandIn):
        def answer(self, path, body, headers):
            return (404, {}) if path == "/tokenize" else super().answer(path, body, headers)

    with serving(Mute(*pair[1], kind=kind)) as url:
        members = [pair[0], served(url, *pair[1], kind=kind)]
        with pytest.warns(UserWarning, match="does not say how it tokenizes"):
            AdaFuseEnsemble(members)


def test_what_the_generation_config_asks_of_a_served_main_model(pair, tmp_path):
    """As of the same model here, which would honour it."""
    pair[0][1].save_pretrained(tmp_path)
    GenerationConfig(repetition_penalty=1.8, eos_token_id=eos_ids(pair[0][1])).save_pretrained(tmp_path)
    with serving(StandIn(*pair[0], name=str(tmp_path))) as url:
        member = ServedModel(url, tokenizer=pair[0][1])
        assert member.generation_config.eos_token_id == eos_ids(pair[0][1])
        ensemble = AdaFuseEnsemble([(member, pair[0][1]), pair[1]])
        with pytest.raises(ValueError, match="`repetition_penalty`"):
            ensemble.texts(PROMPTS[0], max_new_tokens=3)
        assert ensemble.texts(PROMPTS[0], max_new_tokens=3, repetition_penalty=1.0)
        as_assistant = AdaFuseEnsemble([pair[1], (member, pair[0][1])])
        assert as_assistant.texts(PROMPTS[0], max_new_tokens=3)


def test_texts_end_as_the_generation_config_beside_the_tokenizer_says(pair, tmp_path):
    """Where the server's own name of the model says nothing here."""
    model, tokenizer = pair[0]
    ends = [*eos_ids(tokenizer), tokenizer("a")["input_ids"][-1]]
    tokenizer.save_pretrained(tmp_path)
    with serving(StandIn(model, tokenizer, name="of/another/machine")) as url:
        with pytest.warns(UserWarning, match="No generation config of .* is at hand: its texts end with '.+' only"):
            unknown = ServedModel(url, tokenizer=tokenizer)
        assert unknown.generation_config.eos_token_id == tokenizer.eos_token_id
        assert ServedModel(url, tokenizer=tokenizer, eos_token_id=ends).generation_config.eos_token_id == ends
        loaded = AutoTokenizer.from_pretrained(tmp_path)
        LlamaConfig(eos_token_id=ends[::-1]).save_pretrained(tmp_path)  # as a model is made of it
        assert ServedModel(url, tokenizer=loaded).generation_config.eos_token_id == ends[::-1]
        GenerationConfig(eos_token_id=ends).save_pretrained(tmp_path)
        for given in (loaded, str(tmp_path)):
            assert ServedModel(url, tokenizer=given).generation_config.eos_token_id == ends


def test_an_adapter_of_vllm_has_the_context_of_its_base(pair):
    class WithAdapter(StandIn):
        def models(self, body, headers):
            base = super().models(body, headers)["data"][0]
            return {"data": [base, {"id": "adapter", "root": "there", "parent": self.name, "max_model_len": None}]}

    with serving(WithAdapter(*pair[1], max_length=90)) as url:
        member = ServedModel(url, model="adapter", tokenizer=pair[1][1], eos_token_id=eos_ids(pair[1][1]))
        assert member.config.max_position_embeddings == 89


@pytest.mark.parametrize("is_new", [False, True])
def test_sglang_by_the_name_that_it_was_given(pair, is_new):
    stand_in = StandIn(*pair[1], "sglang", name="/srv/model")
    stand_in.served_name, stand_in.is_new = "mine", is_new
    options = dict(tokenizer=pair[1][1], eos_token_id=eos_ids(pair[1][1]))
    with serving(stand_in) as url:
        for name in (None, "mine", "/srv/model"):
            member = ServedModel(url, "sglang", name, **options)
            assert member.api.model == (name or "mine") and member.room(0) == stand_in.max_length
        with pytest.raises(ServerError, match="serves 'mine', not 'other'"):
            ServedModel(url, "sglang", "other", **options)


def test_stop_strings_and_returned_parts_work(pair, servers):
    outputs = []
    for members in (pair, servers[0]):
        ensemble = AdaFuseEnsemble(members)
        outputs.append(
            ensemble.generate(PROMPTS[0], max_new_tokens=20, stop_strings=["e"], return_dict_in_generate=True)
        )
    assert outputs[0].sequences.tolist() == outputs[1].sequences.tolist()
    stats = outputs[1].stats["members"]
    assert all(member["forward_passes"] > 0 and member["tokens_run"] > 0 for member in stats)


def test_a_name_of_an_assistant(pair, servers, tmp_path):
    url = servers[0][1][0].api.connection.url
    pair[1][1].save_pretrained(tmp_path)
    GenerationConfig(eos_token_id=eos_ids(pair[1][1])).save_pretrained(tmp_path)
    main = enable_adafuse(copy.copy(tiny_model("llama", NAMES[0], 0)))
    ids = pair[0][1](PROMPTS[0], return_tensors="pt").input_ids
    arguments = dict(tokenizer=pair[0][1], adafuse_config=True, max_new_tokens=8)
    found = [
        main.generate(ids, assistant_models=[one], assistant_tokenizers=[pair[1][1]], **arguments).tolist()
        for one in (pair[1][0], servers[0][1][0])
    ]
    assert found[0] == found[1]
    servers[1][1].name = str(tmp_path)  # where its tokenizer is found
    by_name = main.generate(ids, assistant_models=[f"vllm:{url}"], **arguments)
    assert by_name.tolist() == found[0] and by_name.shape[1] > ids.shape[1]


@pytest.mark.parametrize(
    ("name", "is_one"),
    [("vllm:http://localhost:8000", True), ("sglang:https://host#a/b", True), ("llamacpp:http://localhost:1#x", True),
     ("org/model", False), ("vllm:localhost", False), ("./vllm:http", False), ("tgi:http://localhost:1", False)],
)  # fmt: skip
def test_names_of_servers(name, is_one):
    assert is_served_name(name) is is_one
    if not is_one:
        with pytest.raises(ValueError, match="`name` must be like vllm:http"):
            ServedModel.from_name(name)


def test_the_command_line_takes_servers(pair, servers, tmp_path, capsys):
    for number, (_, tokenizer) in enumerate(pair):
        tokenizer.save_pretrained(tmp_path / str(number))
        GenerationConfig(eos_token_id=eos_ids(tokenizer)).save_pretrained(tmp_path / str(number))
        servers[1][number].name = str(tmp_path / str(number))
    urls = [f"vllm:{member.api.connection.url}" for member, _ in servers[0]]
    arguments = ["generate", PROMPTS[0], "--model", urls[0], "--assistant", urls[1]]
    assert command([*arguments, "--max-new-tokens", "6", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed and "s3cret" not in str(printed)
    for stand_in in servers[1]:
        stand_in.name = "a.gguf"  # no name of a tokenizer
    assert command([*arguments, "--max-new-tokens", "6", "--json"]) == 2
    assert "--served-tokenizer" in capsys.readouterr().err
    same = ["--model", urls[0], "--assistant", urls[0], "--served-tokenizer", str(tmp_path / "0")]
    assert command(["generate", PROMPTS[0], *same, "--max-new-tokens", "6", "--json"]) == 0


def test_the_command_line_reaches_other_hosts_with_a_key(pair, tmp_path, monkeypatch, capsys):
    flags = ["generate", PROMPTS[0], "--model", "vllm:http://gpu-node:8000#m"]
    assert command(flags) == 2
    err = capsys.readouterr().err
    assert "--allow-http" in err and "in the clear" in err
    made = []

    def served_model(name, **options):
        made.append((name, options))
        raise ValueError("enough")

    monkeypatch.setattr(ServedModel, "from_name", served_model)
    assert command([*flags, "--allow-http", "--api-key-env", "TINY_KEY"]) == 2
    given = {"allow_http": True, "api_key_env": "TINY_KEY", "tokenizer": None, "trust_remote_code": False}
    assert made == [(flags[-1], given)]
    options = ["--served-option", "deadline=60", "--served-option", "most_difference=0.2"]
    assert command([*flags, "--allow-http", *options]) == 2
    assert made[1][1] == made[0][1] | {"api_key_env": None, "deadline": 60, "most_difference": 0.2}
    capsys.readouterr()
    assert command([*flags, "--served-option", "dead=1"]) == 2
    assert "`served_option` must be one of allow_http, " in capsys.readouterr().err and len(made) == 2


@pytest.mark.parametrize("job", ["run", "eval", "fit"])
def test_a_key_in_a_name_is_neither_shown_nor_kept(job, tmp_path, capsys):
    """Wherever it is, and before anything is written."""
    output = tmp_path / ("out.jsonl" if job == "run" else "out")
    (tmp_path / "q.jsonl").write_text(json.dumps({"question": "a", "answer": "b"}) + "\n")
    data = {
        "run": [str(tmp_path / "q.jsonl"), "--template", "{question}"],
        "fit": ["--data", str(tmp_path / "q.jsonl")],
    }
    flags = [job, *data.get(job, ["--tasks", "triviaqa", "--data", str(tmp_path)]), "--output", str(output)]
    for url in ("http://user:sk-LEAK@localhost:9", "https://localhost:9?key=sk-LEAK", "https://sk-LEAK@h:1#m"):
        assert command([*flags, "--model", f"vllm:{url}"]) == 2
        err = capsys.readouterr().err
        assert "A key goes into an environment variable" in err and "LEAK" not in err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["q.jsonl"]
    for member in (f"vllm:{url}", (f"vllm:{url}", TOKENIZERS["byte_level"]())):
        with pytest.raises(ValueError, match="environment variable") as raised:
            AdaFuseEnsemble([member])
        assert "LEAK" not in str(raised.value)
    main = enable_adafuse(copy.copy(tiny_model("llama", "byte_level", 0)))
    with pytest.raises(ValueError, match="environment variable") as raised:
        main.generate(torch.tensor([[5]]), assistant_models=[f"vllm:{url}"], tokenizer=TOKENIZERS["byte_level"]())
    assert "LEAK" not in str(raised.value)


@pytest.mark.parametrize("name", ["ollama:http://localhost:1", "vllm:localhost:8000", "https://hub.co/a/b"])
def test_what_is_meant_for_a_server_is_not_looked_for_on_the_hub(name, capsys):
    assert command(["generate", PROMPTS[0], "--model", name]) == 2
    assert "of a server like vllm:http://localhost:8000#model" in capsys.readouterr().err


def test_a_server_that_is_not_there_is_one_line(capsys):
    assert command(["generate", PROMPTS[0], "--model", "vllm:http://127.0.0.1:9"]) == 2
    err = capsys.readouterr().err
    assert "gives no answer to /v1/models: ConnectError" in err and "Traceback" not in err
    assert "must be a server that can be used, but is not" in err and "Hub" not in err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "call", "message"),
    [
        (dict(method="unite"), {}, "`method` must be one over words or answers"),
        (dict(method="gac"), {}, "`method` must be one over words or answers"),
        (dict(method="safe"), {}, "`method` must be one over words or answers"),
        (dict(method="specfuse", score="logit"), {}, "`method` must be one over words or answers"),
        (dict(exploration="beam", num_branches=2), {}, "`exploration` must be 'diverse'"),
        (dict(num_branches=21), {}, "`num_branches` must be at most 20"),
        (dict(do_sample=True), {}, "`do_sample` must be False"),
        ({}, dict(structured={"regex": "a+"}), "`structured` must be left out"),
        ({}, dict(repetition_penalty=1.3), "Logits processors must act on members that are loaded here"),
        ({}, dict(output_scores=True), "`output_logits` must be False where the main model is behind a server, but"),
    ],
)
def test_what_they_cannot_do_is_refused_before_the_first_question(pair, servers, config, call, message):
    members, stand_ins = servers
    AdaFuseEnsemble(members)  # the self-test is behind us
    asked = [len(stand_in.requests) for stand_in in stand_ins]
    with pytest.raises(ValueError, match=re.escape(message)):
        case_of(members, AdaFuseConfig.from_dict(config)).fast(**call)
    assert [len(stand_in.requests) for stand_in in stand_ins] == asked


def test_what_stands_in_for_a_model_cannot_be_called_or_saved(servers, tmp_path):
    member, _ = servers[0][0]
    with pytest.raises(NotImplementedError, match="cannot be called"):
        member(torch.tensor([[1]]))
    with pytest.raises(ValueError, match="must have its weights here"):
        member.save_pretrained(tmp_path / "saved")
    with pytest.raises(ValueError, match="ServedModel"):
        export_adafuse(tmp_path / "exported", *servers[0][0])


@pytest.mark.parametrize(
    "wrong",
    [dict(kind="tgi"), dict(num_steps=0), dict(num_parameters=1.5), dict(timeout=-1), dict(tokenizer=5),
     dict(most_difference=-1), dict(most_difference=True), dict(eos_token_id="x"), dict(eos_token_id=[]),
     dict(num_parameters=0), dict(num_parameters=False), dict(num_steps=None), dict(kind=["vllm"]),
     dict(tokenizer=LlamaConfig), dict(allow_http="no"), dict(trust_remote_code=1)],
    ids=str,
)  # fmt: skip
def test_arguments_are_checked(wrong):
    with pytest.raises(ValueError, match=f"`{next(iter(wrong))}` must be "):
        ServedModel("http://127.0.0.1:9", **wrong)


@pytest.mark.parametrize("wrong", [10**6, [2, 10**6]])
def test_an_end_that_the_tokenizer_does_not_have(pair, wrong):
    with (
        serving(StandIn(*pair[1])) as url,
        pytest.raises(ValueError, match=r"`eos_token_id` must be .*, as the tokenizer has them, but is "),
    ):
        ServedModel(url, tokenizer=pair[1][1], eos_token_id=wrong)


@pytest.mark.parametrize(
    ("flags", "name"),
    [(["--served-option", "retries=0"], "--served-option retries"), (["--served-tokenizer", "/"], "--served-tokenizer"),
     (["--api-key-env", "KEY"], "api-key-env"), (["--allow-http"], "--allow-http")],
)  # fmt: skip
def test_flags_for_servers_without_one_are_refused(flags, name, capsys):
    assert command(["generate", "a", "--model", "org/a", "--assistant", "org/b", *flags]) == 2
    assert f"`{name}` must be left out where no member is behind a server" in capsys.readouterr().err
    assert command(["generate", "a", *flags]) == 2
    assert "`--model` must be given with options of loading" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("config", [AdaFuseConfig(num_branches=3), AdaFuseConfig.robust()], ids=["adafuse", "robust"])
def test_scoring_asks_for_what_is_scored_and_nothing_else(config, pair, servers):
    """The preset `robust` asks for no log-probabilities of a prompt without examples."""
    members, stand_ins = servers
    case_of([pair[0], members[1]], config).fast()
    bodies = [body for path, body, _ in stand_ins[1].requests if path == "/v1/completions"]
    named = [body for body in bodies if "logprob_token_ids" in body]
    assert named and all(body["max_tokens"] == 1 for body in named)
    assert all(len(body["logprob_token_ids"]) <= 128 and len(body["prompt"]) <= 256 for body in named)
    assert not any("prompt_logprobs" in body or body.get("echo") for body in bodies)


@pytest.mark.slow
def test_members_work_at_the_same_time(pair):
    """Two servers that take 200 ms a request beside the work: in a batch they wait for each other little."""
    spans = []

    class Slow(StandIn):
        def answer(self, path, body, headers):
            start = time.perf_counter()
            found = super().answer(path, body, headers)
            spans.append((start, time.perf_counter()))
            return found

    case = case_of(pair, AdaFuseConfig(num_branches=2), PROMPTS[:4] * 2, 10)
    expected = case.fast()
    with serving(Slow(*pair[0], seconds=0.2)) as first, serving(Slow(*pair[1], seconds=0.2)) as second:
        members = [served(url, *one, num_steps=6) for url, one in zip((first, second), pair, strict=True)]
        case_of(members, case.config, case.prompts, 10).fast()  # from here on the stand-ins know all answers
        spans.clear()
        output = case_of(members, case.config, case.prompts, 10).fast()
    assert output.sequences.tolist() == expected.sequences.tolist()
    # Of the time in which any server is at work, and no other: what this process does between takes longer under load.
    seconds, last = 0.0, 0.0
    for start, end in sorted(spans):
        seconds += max(0.0, end - max(start, last))
        last = max(last, end)
    one_by_one = sum(end - start for start, end in spans)
    assert seconds <= 0.6 * one_by_one, f"{seconds:.2f} s of {one_by_one:.2f} s"


def test_the_oracle_reads_what_a_stand_in_says(pair):
    """The stand-in's numbers are those of plain forward passes: what is compared with it is compared with the model."""
    model, tokenizer = pair[1]
    ids = tokenizer(PROMPTS[0]).input_ids
    known = StandIn(model, tokenizer).log_probs(ids)
    torch.testing.assert_close(known, RefMember(model, tokenizer, eos_ids(tokenizer)).log_probs(ids))
