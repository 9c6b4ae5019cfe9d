"""`hf-adafuse paper`: its numbers beside a recount of the answers, going on after a stop, and what it refuses."""

from __future__ import annotations

import json
import math
import shutil
import statistics
import sys

import pytest
import torch
from support.jobs import lines_of, write_lines
from support.stand_in import StandIn, serving
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_adafuse import __version__, demo
from hf_adafuse.cli import main, members
from hf_adafuse.decoding.strategies import registry
from hf_adafuse.decoding.strategies.sweetspan import SweetSpan
from hf_adafuse.decoding.strategies.unite import UniTE
from hf_adafuse.lab.benchmarks import instruments
from hf_adafuse.lab.benchmarks import report as bench_report
from hf_adafuse.lab.cli import paper, paper_job
from hf_adafuse.lab.evaluation import translation
from hf_adafuse.lab.evaluation.language_model import AdaFuseLM
from hf_adafuse.lab.evaluation.metrics import exact_match
from hf_adafuse.lab.paper import clock as paper_clock
from hf_adafuse.lab.paper import experiments as contents
from hf_adafuse.lab.paper import scores as paper_scores

LIMIT = 12
TABLES = [name for name in contents.NAMES if name != "fig5"]
ROWS = {
    "table1": ["1: llama", "2: gpt_neox", "SweetSpan", "AdaFuse, B = 1"],
    "table2": ["2 members", "3 members"],
    "fig2": ["1 word", "2 words", "3 words", "adaptive"],
    "fig3": ["1 word", "adaptive"],
    "fig4": [f"B = {number}" for number in range(1, 6)],
    "fig6": [f"tau = {tau}" for tau in ("0", "0.1", "0.3", "0.5", "0.7", "0.9", "1.1")],
    "fig7": [f"{kind}, B = {number}" for kind in ("diverse", "beam") for number in range(1, 6)],
}


@pytest.fixture(autouse=True)
def own_peers(monkeypatch):
    """The peers of this test are the same whatever is registered."""
    for name in ("blender", "deepen", "unite"):
        monkeypatch.delitem(registry.STRATEGIES, name, raising=False)


@pytest.fixture
def make(tmp_path, loaded_once, capsys):
    """Makes a table or figure; gives the exit code and the two streams."""

    def run(*arguments):
        code = main(["paper", *arguments, "--output", str(run.output)])
        return code, *capsys.readouterr()

    run.output = tmp_path / "out"
    run.read = lambda name: json.loads((run.output / f"{name}.json").read_text(encoding="utf-8"))
    return run


@pytest.fixture
def asked(monkeypatch):
    """The prompts that any model is asked."""
    prompts, generate = [], AdaFuseLM._generate
    monkeypatch.setattr(AdaFuseLM, "_generate", lambda self, *a: prompts.extend(a[0]) or generate(self, *a))
    return prompts


@pytest.fixture
def data(tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    texts = ["a time", "a cat", "the tree", "a big cat", "to sit in a tree", "She said"]
    asked = [{"question": f"Once upon {text}", "answer": ["cat", "tree"]} for text in texts]
    write_lines(folder / "nq.jsonl", asked)
    write_lines(folder / "flores_de_en.jsonl", asked)
    return folder


@pytest.fixture
def tiny(folders, data):
    """Flags: members that know nothing, and the data."""
    flags = ["--model", folders[0], "--assistant", folders[1], "--data", str(data)]
    return [*flags, "--max-new-tokens", "6", "--num-fewshot", "1", "--no-plot"]


def recount(output, cell):
    """The mean, its error, and the rounds' numbers of words, from the file of answers."""
    samples = lines_of(output / "answers" / cell["folder"] / f"samples_{cell['task']}.jsonl")
    scores = [100 * exact_match(sample["resps"][0][0], sample["doc"]["answers"]) for sample in samples]
    sizes = [len(committed["words"]) + committed["ends"] for sample in samples for committed in sample["rounds"]]
    return scores, [] if cell["folder"].endswith("_alone") else sizes


@pytest.mark.slow
@pytest.mark.parametrize("name", TABLES)
def test_the_numbers_are_those_of_the_answers(name, make, asked):
    code, out, err = make(name, "--limit", str(LIMIT))
    assert code == 0, err
    found = make.read(name)
    assert [cell["who"] for cell in found["cells"]] == ROWS[name]
    scores = {}
    for cell in found["cells"]:
        values, sizes = recount(make.output, cell)
        scores[cell["who"]] = values
        assert cell["n"] == len(values) == LIMIT and cell["metric"] == "exact_match"
        assert cell["value"] == pytest.approx(statistics.mean(values))
        assert cell["standard_error"] == pytest.approx(statistics.stdev(values) / math.sqrt(LIMIT))
        assert cell["rounds"] == len(sizes)
        if sizes:
            assert cell["words_per_round"] == pytest.approx(statistics.mean(sizes))
            for size in (1, 2, 3):
                assert cell["shares"][str(size)] == pytest.approx(sizes.count(size) / len(sizes))
        assert f"| {cell['value']:.1f} ± {cell['standard_error']:.1f} |" in " ".join(out.split())
    assert any(0 < cell["value"] < 100 for cell in found["cells"])
    for difference in found["differences"]:
        ours = difference["what"].split(" - ")[0].replace("AdaFuse", "AdaFuse, B = 1")
        steps = [a - b for a, b in zip(scores[ours], scores[difference["over"]], strict=True)]
        assert difference["value"] == pytest.approx(statistics.mean(steps))
        assert difference["standard_error"] == pytest.approx(statistics.stdev(steps) / math.sqrt(LIMIT))
        assert f"{difference['value']:+.1f} ± " in out
    assert len(asked) == LIMIT * len(found["cells"])
    assert (make.output / f"{name}.md").read_text(encoding="utf-8") in out
    assert (make.output / f"{name}.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_differences_are_to_the_best_of_the_others(make):
    assert make("fig2", "--limit", "40")[0] == 0
    found = make.read("fig2")
    values = {cell["who"]: cell["value"] for cell in found["cells"]}
    (difference,) = found["differences"]
    assert values[difference["over"]] == max(value for who, value in values.items() if who != "adaptive")


def test_a_second_run_asks_nothing_and_tables_share_answers(make, asked):
    first = make("fig2", "--limit", "4")
    number = len(asked)
    assert make("fig2", "--limit", "4") == first and len(asked) == number == 16
    # Of figure 6, tau = 0.7 is the adaptive rounds, and the limit may grow.
    assert make("fig6", "--limit", "4")[0] == 0 and len(asked) == number + 6 * 4
    assert make("fig2", "--limit", "6")[0] == 0 and len(asked) == number + 6 * 4 + 4 * 2


def test_one_question_has_no_errors(make):
    code, out, err = make("fig6", "--limit", "1")
    assert code == 0 and "100.0 ± ?" in out, err
    assert {cell["standard_error"] for cell in make.read("fig6")["cells"]} == {None}
    assert (make.output / "fig6.png").exists()


def test_another_metric(make, asked):
    assert make("fig3", "--limit", "40", "--no-plot")[0] == 0
    number = len(asked)
    by_exact_match = make.read("fig3")["partings"]["demo"]
    assert {parting["metric"] for parting in by_exact_match} == {"exact_match"}
    code, out, _ = make("fig3", "--limit", "40", "--no-plot", "--metric", "f1", "--show", "40")
    assert code == 0 and len(asked) == number and "standard error: F1 (demo)" in out
    (cell, other) = make.read("fig3")["cells"]
    partings = make.read("fig3")["partings"]["demo"]
    scores = [
        {sample["doc_id"]: 100 * sample["f1"] for sample in lines_of(make.output / "answers" / folder)}
        for folder in (f"{one['folder']}/samples_demo.jsonl" for one in (cell, other))
    ]
    assert "A: one-word rounds, B: adaptive rounds; scores are of F1" in out
    assert partings and {parting["metric"] for parting in partings} == {"f1"}
    for parting in partings:
        assert parting["scores"] == pytest.approx([of_file[parting["number"]] for of_file in scores])
    steps = [abs(one - two) for one, two in (parting["scores"] for parting in partings)]
    assert steps == sorted(steps, reverse=True) and steps[0] > 0
    samples = lines_of(make.output / "answers" / cell["folder"] / "samples_demo.jsonl")
    assert cell["metric"] == "f1"
    assert cell["value"] == pytest.approx(100 * statistics.mean(sample["f1"] for sample in samples))


def test_interrupted_it_goes_on(make, asked, monkeypatch):
    generate = AdaFuseLM._generate

    def breaking(self, *arguments):
        if len(asked) == 8:
            raise KeyboardInterrupt
        return generate(self, *arguments)

    monkeypatch.setattr(AdaFuseLM, "_generate", breaking)
    flags = ["fig2", "--limit", "4", "--batch-size", "2", "--progress"]
    code, out, err = make(*flags)
    assert code == 130 and out == "" and "8/16" in err and "answers" in err
    monkeypatch.setattr(AdaFuseLM, "_generate", generate)
    assert make(*flags)[0] == 0
    assert len(asked) == len(set(asked)) * 4 == 16


@pytest.mark.slow
def test_rounds_that_part_are_shown_with_their_candidates(make):
    code, out, _ = make("fig3", "--limit", "40", "--show", "2")
    found = make.read("fig3")["partings"]["demo"]
    assert code == 0 and 1 <= len(found) <= 2
    for parting in found:
        fixed, adaptive = (rounds[-1] for rounds in parting["rounds"])
        assert fixed["text"] != adaptive["text"] and len(fixed["words"]) <= 1
        before = ["".join(committed["text"] for committed in rounds[:-1]) for rounds in parting["rounds"]]
        assert not (before[0] + fixed["text"]).startswith(before[1] + adaptive["text"])
        assert f"question {parting['number']}: {parting['question']}" in out
        for committed in (fixed, adaptive):
            assert committed["candidates"][committed["winner"]]["text"].startswith(committed["text"])
            for candidate in committed["candidates"]:
                assert f'"{candidate["text"]}"' in out and f"{candidate['score']:.3f}" in out
    assert (make.output / "fig3.png").stat().st_size > 10_000


def test_numbers_come_before_their_picture(make, monkeypatch):
    flags = ["fig2", "--limit", "2"]
    assert make(*flags)[0] == 0
    picture = make.output / "fig2.png"
    assert picture.exists() and make(*flags, "--no-plot")[0] == 0
    assert not picture.exists()  # it would be of the earlier run

    def fail(report, path):
        raise OSError("No space left")

    monkeypatch.setattr(paper_job, "save_scores", fail)
    for name in ("fig2.json", "fig2.md"):
        (make.output / name).unlink()
    assert make(*flags)[0] == 2
    assert make.read("fig2")["cells"] and (make.output / "fig2.md").exists()
    assert [path.name for path in make.output.rglob("*.tmp")] == []


@pytest.mark.slow
def test_time(make, monkeypatch):
    clock = iter(range(1, 1000))
    monkeypatch.setattr(paper_clock, "timed", lambda device, work: (work(), float(next(clock)))[::-1])
    code, out, err = make("fig5", "--limit", "3")
    assert code == 0, err
    found = make.read("fig5")
    assert [one["who"] for one in found["times"]] == [*ROWS["table1"], "AdaFuse, B = 3"]
    taken = [record[1] for record in lines_of(make.output / "answers" / "seconds.jsonl")]
    assert len(taken) == 3 and found["taken"] == taken
    # Five candidates in turn, after two rounds of warming up: 1 to 10, then 11 to 15, 16 to 20, ...
    assert list(taken[1].values()) == [16.0, 17.0, 18.0, 19.0, 20.0]
    for index, one in enumerate(found["times"]):
        seconds = [11.0 + index, 16.0 + index, 21.0 + index]
        ratios = [mine / own for mine, own in zip(seconds, (11 + 12, 16 + 17, 21 + 22), strict=True)]
        assert one["seconds"]["value"] == pytest.approx(statistics.mean(seconds))
        assert one["ratio"]["value"] == pytest.approx(statistics.mean(ratios)) and one["ratio"]["n"] == 3
        assert one["ratio"]["standard_error"] == pytest.approx(statistics.stdev(ratios) / math.sqrt(3))
        assert one["tokens_per_second"] == pytest.approx(30 / sum(seconds))
        assert f"{statistics.mean(ratios):.3f} ± " in out
    assert (make.output / "fig5.png").exists()
    settings = found["settings"]
    assert (settings["limit"], settings["batch_size"], settings["max_new_tokens"]) == (3, 1, 10)
    assert settings["conditions"]["threads"] == 1 and settings["conditions"]["torch"] == torch.__version__
    assert [list(places) for places in settings["conditions"]["weights"]] == [["cpu"]] * 2
    measured = paper_clock.timed
    monkeypatch.setattr(paper_clock, "timed", None)
    assert make("fig5", "--limit", "3")[:2] == (0, out)
    # On another processor all times are taken anew.
    monkeypatch.setattr(paper_clock, "timed", measured)
    monkeypatch.setattr(bench_report, "_processor", lambda: "another")
    assert make("fig5", "--limit", "3")[0] == 0
    again = make.read("fig5")
    assert again["taken"] != found["taken"] and again["settings"]["conditions"]["processor"] == "another"


def test_without_a_limit_the_file_says_how_many_were_timed(make, monkeypatch):
    monkeypatch.setattr(paper_clock, "timed", lambda device, work: (1.0, None))
    monkeypatch.setattr(paper, "_NUM_TIMED", 2)
    monkeypatch.setattr(paper, "_DEMO_LIMIT", 4)
    assert make("fig5", "--no-plot")[0] == 0
    found = make.read("fig5")
    assert len(found["taken"]) == found["settings"]["limit"] == 2
    assert make("fig2", "--no-plot")[0] == 0 and make.read("fig2")["settings"]["limit"] == 4


@pytest.mark.slow
def test_ten_tokens_are_written_for_the_clock(make, monkeypatch):
    lengths, counted = [], []
    # No pass of what is timed waits for the device.
    monkeypatch.setattr(instruments.Meter, "count", lambda *args: counted.append(is_timed))
    is_timed = False

    def timed(device, work):
        nonlocal is_timed
        is_timed = True
        made = work()
        is_timed = False
        lengths.append(None if made is None else made.shape[1])
        return 1.0, made

    monkeypatch.setattr(paper_clock, "timed", timed)
    monkeypatch.setattr(paper_clock, "WARM_UPS", 0)
    code, _, err = make("fig5", "--limit", "1")
    assert code == 0, err
    prompt = demo.load_pair()[0][1](demo.test_questions(1)[0].prompt)["input_ids"]
    assert [length for length in lengths if length] == [len(prompt) + 10] * 3
    assert not any(counted)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:spBLEU is left out")
def test_what_is_missing_is_said(make, tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(translation, "_tokenizer_file", lambda: tmp_path / "none")
    translation.has_spbleu.cache_clear()
    code, out, err = make("table1", *tiny, "--limit", "4")
    assert code == 0, err
    found = make.read("table1")
    assert set(found["left_out"]) == {
        "squad",
        "triviaqa",
        "gsm8k",
        "flores_en_de",
        "LLM-Blender, by NLL",
        "DeePEn",
        "UniTE",
    }
    assert "Left out: " in out and "SQuAD (no file squad*.jsonl in " in out
    head = [cell.strip() for cell in next(line for line in out.splitlines() if line.startswith("|")).split("|")]
    assert head == ["", "", "NQ", "De-En", "average", ""]
    assert not (make.output / "table1.png").exists()
    (cell,) = [one for one in found["cells"] if (one["task"], one["who"]) == ("flores_de_en", "AdaFuse, B = 1")]
    samples = lines_of(make.output / "answers" / cell["folder"] / "samples_flores_de_en.jsonl")
    assert cell["metric"] == "bleu" and len(samples) == cell["n"] == 4
    pairs = [(sample["doc"]["answers"], sample["resps"][0][0].strip()) for sample in samples]
    assert cell["value"] == pytest.approx(translation.corpus_bleu(pairs))
    averages = {one["who"]: one for one in found["averages"]}
    means = [one for one in found["cells"] if one["who"] == "AdaFuse, B = 1"]
    assert averages["AdaFuse, B = 1"]["value"] == pytest.approx(sum(one["value"] for one in means) / 2)
    error = math.hypot(*(one["standard_error"] for one in means)) / 2
    assert averages["AdaFuse, B = 1"]["standard_error"] == pytest.approx(error)


def test_translations_are_asked_without_examples_and_others_with_five(make, folders, data, asked):
    rows = [{"question": f"q{number}", "answer": f"a{number}"} for number in range(7)]
    write_lines(data / "nq.jsonl", rows)
    flags = [
        "--model",
        folders[0],
        "--assistant",
        folders[1],
        "--data",
        str(data),
        "--max-new-tokens",
        "2",
        "--no-plot",
    ]
    translation.has_spbleu.cache_clear()
    assert make("fig2", "--task", "nq", "--limit", "1", *flags)[0] == 0
    assert asked[0].count("Question: ") == 6
    asked.clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hf_adafuse.lab.evaluation.task_metrics.has_spbleu", lambda: False)
        assert make("fig2", "--task", "flores_de_en", "--limit", "1", *flags)[0] == 0
    assert asked[0] == "German: Once upon a time\nEnglish:"


@pytest.mark.slow
def test_only_some_tasks_have_all_branches(make, tiny, data):
    (data / "flores_de_en.jsonl").rename(data / "squad.jsonl")
    assert make("fig4", *tiny, "--limit", "2")[0] == 0
    found = [(cell["task"], cell["who"]) for cell in make.read("fig4")["cells"]]
    assert {who for task, who in found if task == "nq"} == set(ROWS["fig4"])
    assert {who for task, who in found if task == "squad"} == {"B = 1", "B = 3"}
    assert make("fig4", *tiny, "--limit", "2", "--task", "squad")[0] == 0
    assert [cell["who"] for cell in make.read("fig4")["cells"]] == ROWS["fig4"]


@pytest.mark.slow
def test_all_without_the_questions_of_some(make, tiny, data):
    (data / "nq.jsonl").rename(data / "squad.jsonl")
    (data / "flores_de_en.jsonl").unlink()
    code, out, err = make("all", *tiny, "--limit", "1")
    assert code == 0, err
    assert {path.stem for path in make.output.glob("*.md")} == {"table1", "fig4"}
    for name in ("table2", "fig2", "fig3", "fig5", "fig6", "fig7"):
        assert f"hf-adafuse: {name} is left out: no file nq*.jsonl in " in err
    assert out.endswith(f"Written in {make.output}: table1, fig4, each as .md, .json\n")


@pytest.fixture
def served(folders, data):
    """Flags: a member here, and one behind a server."""
    (data / "flores_de_en.jsonl").unlink()
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folders[1]), AutoTokenizer.from_pretrained(folders[1])
    with serving(StandIn(model.eval(), tokenizer)) as url:
        flags = ["--model", folders[0], "--assistant", f"vllm:{url}", "--served-tokenizer", folders[1]]
        flags += ["--served-option", f"eos_token_id={tokenizer.eos_token_id}"]
        yield [*flags, "--data", str(data), "--num-fewshot", "1", "--no-plot", "--limit", "1"]


@pytest.mark.slow
def test_what_a_member_behind_a_server_cannot_do_is_left_out(make, served, monkeypatch):
    monkeypatch.setitem(registry.STRATEGIES, "unite", UniTE)
    code, out, err = make("all", *served, "--max-new-tokens", "3")
    assert code == 0, err
    assert [cell["who"] for cell in make.read("table1")["cells"]][2:] == ["SweetSpan", "AdaFuse, B = 1"]
    reason = "`method` must be one over words or answers with "
    assert make.read("table1")["left_out"]["UniTE"].startswith(reason) and f"UniTE ({reason}" in out
    diverse = [name for name in ROWS["fig7"] if name.startswith("diverse")]
    assert [cell["who"] for cell in make.read("fig7")["cells"]] == diverse
    assert make.read("fig7")["left_out"]["beam, B = 1"].startswith("`exploration` must be 'diverse' with ")
    assert "hf-adafuse: fig5 is left out: `--assistant` must be a model with its weights here" in err
    assert not (make.output / "fig5.md").exists()


def test_what_a_member_behind_a_server_cannot_do_is_refused_before_it_is_asked(make, served, asked):
    code, _, err = make("table1", *served, "--peers", "sweetspan,gac")
    assert code == 2 and "`--peers` must be methods that can be used, but are not: `method` must be one over " in err
    code, _, err = make("fig5", *served)
    assert code == 2 and "must be a model with its weights here for `paper fig5`" in err
    assert asked == []


def test_chats(make, folders, data, tmp_path, asked):
    (data / "flores_de_en.jsonl").unlink()
    named = []
    for number, folder in enumerate(folders):
        named.append(shutil.copytree(folder, tmp_path / f"chat {number}"))
        tokenizer = AutoTokenizer.from_pretrained(folder)
        tokenizer.chat_template = "{% for message in messages %}(" + message_of(number) + "){% endfor %}"
        tokenizer.save_pretrained(named[-1])
    flags = ["--data", str(data), "--limit", "1", "--num-fewshot", "1", "--max-new-tokens", "3", "--no-plot"]
    flags.append("--apply-chat-template")
    code, _, err = make("table1", "--model", str(named[0]), "--assistant", folders[1], *flags)  # which asks each alone
    assert code == 2 and "must have a chat template" in err and asked == []
    code, _, err = make("fig3", "--model", str(named[0]), "--assistant", str(named[1]), *flags)
    assert code == 0, err
    assert len(asked) == 2 and all(prompt.startswith("hf-adafuse chat: ") for prompt in asked)
    assert make.read("fig3")["settings"]["apply_chat_template"] is True


def message_of(number):
    """The part of a chat template that writes a message, another one for each member."""
    return f"{number} " + "{{ message['content'] }}"


def test_peers_appear_once_they_are_registered(make, monkeypatch):
    monkeypatch.setitem(registry.STRATEGIES, "unite", SweetSpan)
    assert make("table1", "--limit", "2", "--no-plot")[0] == 0
    found = make.read("table1")
    assert [cell["who"] for cell in found["cells"]][2:] == ["SweetSpan", "UniTE", "AdaFuse, B = 1"]
    assert set(found["left_out"]) == {"LLM-Blender, by NLL", "DeePEn"}
    assert make("table1", "--limit", "2", "--no-plot", "--peers", "cool-fusion,rerank")[0] == 0
    cells = make.read("table1")["cells"]
    assert [cell["who"] for cell in cells][2:] == ["cool-fusion", "rerank", "AdaFuse, B = 1"]
    assert cells[3]["shares"] == {}  # whole answers are no rounds


def test_options_of_a_peer(make):
    flags = ["table1", "--limit", "2", "--no-plot", "--peers", "sweetspan,spans"]
    assert make(*flags, "--peer-option", "sweetspan.num_words=2", "--peer-option", "spans.unit=sentence")[0] == 0
    cells = make.read("table1")["cells"]
    assert cells[2]["settings"] == {"method": "sweetspan", "method_options": {"num_words": 2}}
    assert cells[2]["folder"] == "1+2_sweetspan_num_words=2" and max(cells[2]["shares"]) == "3"


@pytest.mark.slow
def test_everything_at_once(make):
    code, out, err = make("all", "--limit", "2", "--no-plot")
    assert code == 0, err
    for name in contents.NAMES:
        assert (make.output / f"{name}.md").read_text(encoding="utf-8") in out
    assert len(make.read("fig5")["taken"]) == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["table9"], "invalid choice: 'table9'"),
        (["fig2", "--task", "nq,tqa"], "`--task` must be of nq, squad, "),
        (["fig2", "--data", "nowhere"], "`--data` must be a folder, but 'nowhere' is none"),
        (["fig2", "--model", "A", "--data", "{data}"], "The members must be 2 or more, but are 1."),
        (["fig2", "--assistant", "B"], "`--model` must be given with `--assistant`, but is not."),
        (
            ["fig2", "--task", "squad", "--data", "{data}"],
            "`--data` must hold one file squad*.jsonl for the task squad",
        ),
        (["table1", "--peers", "unite"], "but has 'unite'. Choose of these."),
        (["table1", "--peer-option", "unite.top_k"], "must be NAME=VALUE, but is 'unite.top_k'"),
        (["table1", "--peer-option", "top_k=1"], "`--peer-option` must be PEER.NAME=VALUE with a peer of blender, "),
        (
            ["table1", "--peers", "sweetspan", "--peer-option", "sweetspan.n=1"],
            "), but has 'n'. The fields are",
        ),
        (["fig6", "--peers", "sweetspan"], "`--peers` must be left out with `paper fig6`, which has no use for it"),
        (["fig2", "--peer-option", "sweetspan.num_words=2"], "`--peer-option` must be left out with `paper fig2`"),
        (["fig6", "--show", "2"], "`--show` must be left out with `paper fig6`"),
        (["fig5", "--metric", "f1"], "`--metric` must be left out with `paper fig5`"),
        (["fig5", "--max-new-tokens", "5"], "`--max-new-tokens` must be left out with `paper fig5`"),
        (["table1", "--limit", "0"], "must be a whole number of at least 1"),
        (["fig2", "--data", "{empty}"], "`--data` must hold questions of nq, but '"),
        (["fig2", "--data", "{data}"], "must have more lines than the 5 worked examples, but has 5"),
        (["fig2", "--model", "A", "--assistant", "B"], "`--data` must hold questions of nq, but the Hub has none"),
    ],
)
def test_mistakes_are_named_before_models_are_loaded(arguments, message, make, data, tmp_path, monkeypatch):
    (tmp_path / "empty").mkdir()
    write_lines(data / "nq.jsonl", [{"question": "q", "answer": "a"}] * 5)
    monkeypatch.setattr(members, "load_members", None)
    code, out, err = make(*[one.format(data=data, empty=tmp_path / "empty") for one in arguments])
    assert (code, out) == (2, "") and message in err and err.count("\n") == 1
    assert not make.output.exists()


def test_other_members_are_refused(make, tiny):
    assert make("fig3", *tiny, "--limit", "1")[0] == 0
    code, _, err = make("fig3", "--limit", "1", "--no-plot")
    assert code == 2 and "`--model` must be " in err and "--overwrite" in err
    kept = {path: path.read_bytes() for path in make.output.rglob("*.*")}
    code, _, err = make("fig2", "--limit", "1", "--no-plot", "--overwrite", *tiny, "--model", "missing/model")
    assert code == 2 and "missing/model" in err
    assert {path: path.read_bytes() for path in make.output.rglob("*.*")} == kept
    assert make("fig2", "--limit", "1", "--no-plot", "--overwrite")[0] == 0
    # Nothing of the earlier members is left.
    assert {path.suffix for path in make.output.glob("fig3.*")} == set()
    assert [path.name for path in make.output.rglob("samples_*")] == ["samples_demo.jsonl"] * 4


@pytest.mark.parametrize("earlier", ["0.0.1", None])
def test_answers_of_another_version_are_refused(earlier, make, tiny):
    assert make("fig3", *tiny, "--limit", "1")[0] == 0
    file = make.output / "settings.json"
    settings = json.loads(file.read_text(encoding="utf-8"))
    assert settings["hf_adafuse"] == __version__
    file.write_text(json.dumps({**settings, "hf_adafuse": earlier}), encoding="utf-8")
    code, _, err = make("fig3", *tiny, "--limit", "1")
    whose = f"are of {earlier}" if earlier else "do not say of which"
    assert code == 2 and f", but {whose}. Use another --output, or start over with --overwrite." in err


@pytest.mark.parametrize(
    ("flag", "value"), [("--served-tokenizer", "T"), ("--served-option", "num_steps=2"), ("--trust-remote-code", None)]
)
def test_how_members_are_loaded_is_a_setting(flag, value, make, tiny):
    assert make("fig3", *tiny, "--limit", "1")[0] == 0
    code, _, err = make("fig3", *tiny, "--limit", "1", flag, *([value] if value else []))
    assert code == 2 and f"`{flag}` must be left out, as in the earlier run" in err
    # How long is waited changes no answer: the settings are the same, and only a server takes it.
    code, _, err = make("fig3", *tiny, "--limit", "1", "--served-option", "deadline=9")
    assert code == 2 and "`--served-option deadline` must be left out where no member is behind a server" in err


def test_an_output_that_is_a_file(make):
    make.output.write_text("", encoding="utf-8")
    code, _, err = make("fig2", "--limit", "1")
    assert code == 2 and "`--output` must be a folder or a new name" in err


@pytest.mark.parametrize(
    ("module", "message"),
    [
        ("lm_eval", 'pip install "hf_adafuse[eval]"'),
        (
            "matplotlib",
            "must be installed for pictures, but is not. Install it with "
            '`pip install "hf_adafuse[plots]"`, or pass --no-plot.',
        ),
    ],
)
def test_without_a_library(module, message, make, monkeypatch):
    monkeypatch.setitem(sys.modules, module, None)
    code, _, err = make("fig2", "--limit", "1")
    assert code == 2 and message in err and not make.output.exists()


def test_the_help_names_what_there_is(capsys):
    assert paper._ALL == contents.NAMES and paper._METRICS == paper_scores.OTHERS
    assert main(["paper", "--help"]) == 0
    out = capsys.readouterr().out
    assert all(f"\n  {name}  " in out for name in contents.NAMES)
    assert "the demo's" in out and f"first {paper._DEMO_LIMIT}" in out
